"""Fragments to stacked batches, on a device or not.

Callers: leases, readers and the mirror.
"""
