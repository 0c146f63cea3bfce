"""Learner: batches from a buffer on time, advantages, and a reference PPO."""
