"""What one buffer knows: chunks, leases, waiters, subscriptions. For `core` and `core/rules`.

More than thirteen modules: one for each thing that a buffer knows.
"""
