"""Environment processes under supervision.

Callers: `acting` and `worker.py`.
"""
