"""One array of a payload: its dtype, its codec and the format's bounds.

Callers: `payload`.
"""
