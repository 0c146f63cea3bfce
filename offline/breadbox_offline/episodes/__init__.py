"""Episodes, the buffer that holds them, and draws from it.

Callers: any room but `decoding`.
"""
