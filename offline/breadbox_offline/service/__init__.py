"""Episodes into a buffer of the service, and out of one.

Callers: `main.py`, users.
"""
