"""Supervise environment processes, for `acting` and `worker.py`."""
