"""Readers and writers of files, and datasets of many.

Callers: users, `main.py`.
"""
