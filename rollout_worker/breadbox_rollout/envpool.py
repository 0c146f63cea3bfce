"""Environments of `envpool` (`pip install envpool`): `--env breadbox_rollout.envpool:make`."""

from typing import Any


def make(task_id: str, num_envs: int, seed: int, **options: Any) -> Any:
    """Return `envpool.make_gymnasium`'s vector environment; ImportError if not installed."""
    import envpool

    return envpool.make_gymnasium(task_id, num_envs=num_envs, seed=seed, **options)
