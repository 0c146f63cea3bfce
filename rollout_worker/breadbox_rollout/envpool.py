"""Environments of the package `envpool`: `--env breadbox_rollout.envpool:make`.

EnvPool steps many environments in threads of its own, written in C++; it brings Atari, MuJoCo and
others. It is not among Breadbox's dependencies: `pip install envpool`.
"""

from typing import Any


def make(task_id: str, num_envs: int, seed: int, **options: Any) -> Any:
    """Make a vector environment.

    Args:
        task_id: As in `envpool.make_gymnasium`, such as "Pong-v5".
        num_envs: Environments inside.
        seed: Of all of them.
        **options: Handed on, such as `num_threads` or `frame_skip`.

    Raises:
        ImportError: The package is not installed.
    """
    import envpool

    return envpool.make_gymnasium(task_id, num_envs=num_envs, seed=seed, **options)
