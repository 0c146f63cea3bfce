"""Payloads as files in a directory.

Callers: `stores`.
"""
