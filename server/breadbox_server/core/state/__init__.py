"""What one buffer knows: open chunks, held chunks, leases, waiters, subscriptions.

Callers: `core/rules`, `core/buffer.py` and `core/snapshot.py`.
"""
