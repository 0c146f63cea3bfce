"""Recorded columns and rows to episodes.

Callers: `files` and `training`.
"""
