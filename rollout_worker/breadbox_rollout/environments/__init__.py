"""Environments as rows of shared arrays: single, grouped, vector, of several agents.

Callers: `processes`, `recording`, `acting`.
"""
