"""Episodes into files.

Callers: `processes` and `acting`.
"""
