"""The worker's side of the service: fragments, reports, model versions; for `acting`, `app.py`."""
