"""The rollout worker: environments, batched inference, fragments, and the episode generator."""
