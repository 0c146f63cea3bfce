"""Gauges, comparison with the store, `fsck`, the health probe; for `app.py` and the commands."""
