"""Breadbox: a replay-buffer service for online reinforcement learning."""
