"""What one buffer knows: chunks, leases, waiters, subscriptions. For `core` and `core/rules`."""
