"""Reads that use nothing up, read leases, inline bodies. For `driver.py` and `rpc`."""
