"""Work beside serving: gauges, comparison with the payload store, `fsck`, the health probe.

Callers: `app.py` and the command line.
"""
