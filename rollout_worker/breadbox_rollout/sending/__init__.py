"""The worker's side of the service: fragments, episode reports, model versions.

Callers: `acting` and `app.py`.
"""
