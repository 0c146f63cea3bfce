"""What changes a buffer's state: admission, fetches, leases, cursors. For `core/buffer.py`."""
