"""A run's folder and its records.

Callers: `training`, `evaluation` and `app.py`.
"""
