"""Environments of the package `envpool`: `--env breadbox_rollout.envpool:make`.

EnvPool steps many environments in threads of its own, written in C++; it brings Atari, MuJoCo and
others. It is not among Breadbox's dependencies: `pip install envpool`.
"""

from typing import Any


def make(task_id: str, num_envs: int, seed: int, **options: Any) -> Any:
    """Make a vector environment, as `envpool.make_gymnasium` does of "Pong-v5".

    It gets *options* such as `num_threads` or `frame_skip`. ImportError if it is not installed.
    """
    import envpool

    return envpool.make_gymnasium(task_id, num_envs=num_envs, seed=seed, **options)
