"""Episodes played greedily beside training.

Callers: `app.py`.
"""
