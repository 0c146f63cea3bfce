"""Learner: load batches of a buffer, estimate advantages, and train with a reference PPO."""
