"""Turn batches into updates: loading, PPO, publishing, checkpoints; for `app.py`."""
