"""A policy at work on environments, for the service (players) or for files (generator).

Callers: `worker.py` and `app.py`.
"""
