"""What goes out: learners' fetches, reads that use nothing up, read leases, inline bodies.

Callers: `driver.py`, which builds the parts, and `rpc`.
"""
