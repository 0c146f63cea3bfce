"""Fragments to stacked batches, on a device or not."""
