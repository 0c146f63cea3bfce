"""Batches into updates: loading, PPO, publishing, checkpoints.

Callers: `app.py`.
"""
