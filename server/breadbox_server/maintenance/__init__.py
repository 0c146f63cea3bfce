"""Gauges, comparison with the store, `fsck`, the health probe.

For `app.py` and the command line.
"""
