"""Where a journal is kept (a Redis stream or SQLite), and which server may write it.

Callers: `journal`, `maintenance` and `app.py`.
"""
