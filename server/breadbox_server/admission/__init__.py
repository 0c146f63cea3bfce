"""Appends, published weights, quotas and deletions. For `driver.py`, `rpc` and `reading`."""
