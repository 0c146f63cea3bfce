"""CleanRL's replay buffers on top of Breadbox. Needs `pip install "breadbox[cleanrl]"`.

`ReplayBuffer` is that of `cleanrl_utils.buffers`, as dqn.py, sac_continuous_action.py, td3 and
their like use it; `PrioritizedReplayBuffer` is that of rainbow_atari.py:

```python
from breadbox_adapters.cleanrl import ReplayBuffer

rb = ReplayBuffer(
    args.buffer_size,
    envs.single_observation_space,
    envs.single_action_space,
    device,
    handle_timeout_termination=False,
    server="localhost:50051",
    run=run_name,
)
```

Nothing else of a script changes. The server keeps the steps: other processes may append to them and
learn from them, and a restarted script finds them under the same `run`. docs/adapters.md lists what
is different.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from breadbox.mirror import Prioritised
from breadbox.model.fragment import Tree
from breadbox.model.trees import plain_array
from breadbox_adapters import extra

with extra("cleanrl"):
    import torch
    from gymnasium import spaces

    from breadbox_adapters.run_replay import LAG_STEPS
    from breadbox_adapters.spaced_replay import Infos, SpacedReplay

__all__ = [
    "LAG_STEPS",
    "PrioritizedBatch",
    "PrioritizedReplayBuffer",
    "ReplayBuffer",
    "ReplayBufferSamples",
]


class ReplayBufferSamples(NamedTuple):
    """B steps, as tensors."""

    observations: Any
    """[B, ...]; for a dict space, by key."""
    actions: torch.Tensor
    """[B, action size]."""
    next_observations: Any
    """[B, ...]; for a dict space, by key."""
    dones: torch.Tensor
    """float32[B, 1]."""
    rewards: torch.Tensor
    """float32[B, 1]."""


class ReplayBuffer(SpacedReplay):
    """`cleanrl_utils.buffers.ReplayBuffer`; `close()`, garbage collection or exit ends it."""

    _prefix = "cleanrl"

    def extend(self, *steps: Sequence[Any]) -> None:
        """Add several steps: each argument of `add`, with an axis of steps before the others."""
        for step in zip(*steps, strict=True):
            self.add(*step)

    def sample(self, batch_size: int) -> ReplayBufferSamples:
        """Draw steps uniformly, with replacement; `WaitElapsedError` after `arrival_wait_s`."""
        self.replay.make_ready()
        return ReplayBufferSamples(**self._values(self.replay.mirror.sample(batch_size)))


class PrioritizedBatch(NamedTuple):
    """B windows of steps, as tensors: what a script's own batch has, and `discounts`."""

    observations: torch.Tensor
    """[B, ...]."""
    actions: torch.Tensor
    """int64[B, 1]."""
    rewards: torch.Tensor
    """float32[B, 1]; the window's discounted sum."""
    next_observations: torch.Tensor
    """[B, ...]; after the window's last step."""
    dones: torch.Tensor
    """bool[B, 1]; the window's last step ended the episode in a terminal state."""
    indices: NDArray[np.int64]
    """int64[B], for `update_priorities`."""
    weights: torch.Tensor
    """float32[B, 1]; importance weights divided by the batch's largest."""
    discounts: torch.Tensor
    """float32[B, 1]; gamma to the power of the window's steps, which are fewer than n at cuts."""


class PrioritizedReplayBuffer(SpacedReplay):
    """The `PrioritizedReplayBuffer` of rainbow_atari.py; set `alpha` and `beta` at any time.

    ```python
    where = {"server": "localhost:50051", "run": "rainbow-1"}
    rb = PrioritizedReplayBuffer(10_000, (4, 84, 84), "cpu", n_step=3, gamma=0.99, **where)
    ```
    """

    _prefix = "cleanrl"

    def __init__(
        self,
        capacity: int,
        obs_shape: Sequence[int],
        device: torch.device | str,
        n_step: int,
        gamma: float,
        alpha: float = 0.6,
        beta: float = 0.4,
        eps: float = 1e-6,
        *,
        obs_dtype: Any = np.uint8,
        **where: Any,
    ) -> None:
        """Enter a run; `where` is that of `ReplayBuffer`.

        `n_step` is from 1 to 1024. `alpha` is the exponent of priorities (0: uniform), `beta` that
        of importance weights; `eps` is added to each priority that is set.
        """
        self.capacity = capacity
        self.n_step, self.gamma = n_step, gamma
        self.alpha, self.beta, self.eps = alpha, beta, eps
        low, high = (0, 255) if np.dtype(obs_dtype) == np.uint8 else (-np.inf, np.inf)
        super().__init__(
            capacity,
            spaces.Box(low, high, tuple(obs_shape), obs_dtype),
            # Only an action's number is stored.
            spaces.Discrete(2**31 - 1),
            device,
            handle_timeout_termination=False,
            **where,
        )

    def add(  # type: ignore[override]  # As the scripts call it.
        self, obs: Tree, action: ArrayLike, reward: ArrayLike, next_obs: Tree, done: ArrayLike
    ) -> None:
        """Add a step; arrays may have a leading axis of one environment.

        `action` is a number, `reward` undiscounted, and `done` True for a terminal state. A time
        limit is recognised by the next observation, which then does not follow.
        """
        infos: Infos = ({},)
        action_, reward_, done_ = (plain_array(each).reshape(1) for each in (action, reward, done))
        super().add(obs, next_obs, action_, reward_, done_, infos)

    def sample(self, batch_size: int) -> PrioritizedBatch:
        """Draw windows by the priorities of their first steps; wait as `ReplayBuffer.sample`."""
        self.replay.make_ready()
        batch = self.replay.mirror.sample(
            batch_size,
            n_step=self.n_step,
            gamma=self.gamma,
            prioritised=Prioritised(self.alpha, self.beta),
        )
        values = self._values(batch)
        values["dones"] = self._tensor(batch.terminated, (1,))
        return PrioritizedBatch(
            **values,
            indices=batch.handle.copy(),
            weights=self._tensor(batch.weight, (1,)),
            discounts=self._tensor(batch.discount, (1,)),
        )

    def update_priorities(self, indices: ArrayLike, priorities: ArrayLike) -> None:
        """Set priorities to the sizes of these values, such as losses, plus `eps`.

        Indices of steps that are no longer kept are counted in `replay.mirror.late_update_count`.
        """
        sizes = np.abs(np.asarray(priorities, np.float64)).reshape(-1) + self.eps
        self.replay.mirror.update_priorities(indices, sizes)
