"""Values of recorded files, decoded without executing anything.

Callers: `files`, `rows`, `episodes`.
"""
