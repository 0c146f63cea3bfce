"""The thread that follows a buffer and fills a memory.

Callers: `mirror`.
"""
