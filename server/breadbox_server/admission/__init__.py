"""What comes in, before the core: appends and their queue, published weights, quotas, deletions.

Callers: `driver.py`, which builds the parts, and `rpc`; `reading` takes bodies from memory here.
"""
