"""What changes a buffer's state: admission, fetching, leasing, cursor reads.

Callers: `core/buffer.py`.
"""
