"""Offline data: recorded episodes to training batches."""
