"""Stable-Baselines3's replay buffers on top of Breadbox. Needs `pip install "breadbox[sb3]"`.

```python
from stable_baselines3 import SAC
from breadbox_adapters.sb3 import BreadboxReplayBuffer

model = SAC(
    "MlpPolicy",
    "Pendulum-v1",
    replay_buffer_class=BreadboxReplayBuffer,
    replay_buffer_kwargs=dict(server="localhost:50051", run="pendulum-1"),
)
model.learn(20_000)
```

Samples have the shapes, types and normalisation of the library's own buffers. The server keeps the
steps: other processes may append to them and learn from them, and a restarted training finds them
under the same `run`. docs/adapters.md lists what is different.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from breadbox.mirror import StepBatch
from breadbox.model.errors import InvalidRequestError
from breadbox.model.fragment import Tree
from breadbox_adapters import extra

with extra("sb3"):
    from gymnasium import spaces
    from stable_baselines3.common.buffers import ReplayBuffer
    from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
    from stable_baselines3.her.goal_selection_strategy import GoalSelectionStrategy
    from stable_baselines3.her.her_replay_buffer import HerReplayBuffer

    from breadbox_adapters.run_replay import LAG_STEPS
    from breadbox_adapters.spaced_replay import SpacedReplay

__all__ = [
    "LAG_STEPS",
    "BreadboxHerReplayBuffer",
    "BreadboxNStepReplayBuffer",
    "BreadboxReplayBuffer",
]


class BreadboxReplayBuffer(SpacedReplay, ReplayBuffer):
    """`ReplayBuffer` or `DictReplayBuffer`; `close()`, garbage collection or exit ends it."""

    _prefix = "sb3"

    @property
    def full(self) -> bool:
        """True if as many steps are kept as may be; blocks like `size`."""
        return self.size() == self.buffer_size

    @property
    def pos(self) -> int:
        """Position of the next step in a ring of `buffer_size`; blocks like `size`."""
        self.replay.catch_up()
        return self.replay.mirror.inserted_step_count // self.n_envs % self.buffer_size

    def sample(self, batch_size: int, env: Any = None) -> Any:
        """Draw steps uniformly, with replacement; `env` is a `VecNormalize`, or None.

        Blocks while there is no step, or too many own steps are on their way; raises
        `WaitElapsedError` after about `arrival_wait_s`.
        """
        self.replay.make_ready()
        return self._samples(self.replay.mirror.sample(batch_size), env)

    def _get_samples(self, batch_inds: NDArray[Any], env: Any = None) -> Any:
        """Return steps by position, 0 for the oldest that is kept; blocks like `sample`."""
        self.replay.make_ready()
        return self._samples(self.replay.mirror.at(batch_inds), env)

    def _samples(self, batch: StepBatch, env: Any) -> Any:
        is_dict = isinstance(self.observation_space, spaces.Dict)
        kind = DictReplayBufferSamples if is_dict else ReplayBufferSamples
        return kind(**self._values(batch, env))


class BreadboxNStepReplayBuffer(BreadboxReplayBuffer):
    """`NStepReplayBuffer`: returns of up to `n_steps` steps, and the discount of what follows."""

    def __init__(self, *args: Any, n_steps: int = 3, gamma: float, **kwargs: Any) -> None:
        """Do as `BreadboxReplayBuffer`, with returns over `n_steps`, 1 to 1024.

        The algorithm's own `n_steps` is ignored. `gamma` has no default because algorithms do not
        pass theirs; the one given here is used.
        """
        self.n_steps = n_steps
        self.gamma = gamma
        super().__init__(*args, **kwargs)

    def sample(self, batch_size: int, env: Any = None) -> Any:
        """Draw steps with the returns that begin at them; see `BreadboxReplayBuffer.sample`.

        A window that ends early, as at the end of an episode, has the discount of its steps.
        """
        self.replay.make_ready()
        return self._windows(self.replay.mirror.sample(batch_size, **self._how(env)), env)

    def _get_samples(self, batch_inds: NDArray[Any], env: Any = None) -> Any:
        self.replay.make_ready()
        return self._windows(self.replay.mirror.at(batch_inds, **self._how(env)), env)

    def _how(self, env: Any) -> dict[str, Any]:
        # Normalising clips, so each reward is normalised before they are added up.
        reward_map = None if env is None else env.normalize_reward
        return {"n_step": self.n_steps, "gamma": self.gamma, "reward_map": reward_map}

    def _windows(self, batch: StepBatch, env: Any) -> Any:
        # `_how` has normalised the rewards already.
        if env is not None:
            env = SimpleNamespace(normalize_obs=env.normalize_obs, normalize_reward=lambda r: r)
        samples = self._samples(batch, env)
        return samples._replace(discounts=self._tensor(batch.discount, (1,)))


class BreadboxHerReplayBuffer(BreadboxReplayBuffer, HerReplayBuffer):
    """`HerReplayBuffer`: steps of whole episodes, most of them with a goal that was reached."""

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Dict,
        action_space: spaces.Space[Any],
        env: Any,
        *args: Any,
        n_sampled_goal: int = 4,
        goal_selection_strategy: GoalSelectionStrategy | str = "future",
        copy_info_dict: bool = False,
        **kwargs: Any,
    ) -> None:
        """Enter a run like `BreadboxReplayBuffer`; observations have achieved and desired goals.

        `env` is the training environment, for `compute_reward`. One of `n_sampled_goal` + 1 steps
        keeps its goal; the others get a reached one. `copy_info_dict` must be False.
        """
        if copy_info_dict:
            raise ValueError(
                "copy_info_dict is not supported: infos are not stored. Put what compute_reward "
                "needs into the observation"
            )
        strategy = goal_selection_strategy
        if not isinstance(strategy, GoalSelectionStrategy):
            try:
                strategy = GoalSelectionStrategy[strategy.upper()]
            except KeyError as error:
                names = [each.name.lower() for each in GoalSelectionStrategy]
                raise ValueError(
                    f"goal_selection_strategy must be one of {names}, got {strategy!r}"
                ) from error
        self.env = env
        self.copy_info_dict = False
        self.n_sampled_goal = n_sampled_goal
        self.goal_selection_strategy = strategy
        super().__init__(buffer_size, observation_space, action_space, *args, **kwargs)

    def add(self, *args: Any, **kwargs: Any) -> None:
        """Add a step of each environment; see `BreadboxReplayBuffer.add`."""
        BreadboxReplayBuffer.add(self, *args, **kwargs)

    def sample(self, batch_size: int, env: Any = None) -> Any:
        """Draw steps of whole episodes; `RuntimeError` if none has ended yet."""
        self.replay.make_ready()
        try:
            batch = self._draw(batch_size)
        except InvalidRequestError:
            # The end of the first episode may still be on its way.
            self.replay.catch_up()
            try:
                batch = self._draw(batch_size)
            except InvalidRequestError as error:
                raise RuntimeError(
                    "there is no whole episode to sample yet: set learning_starts above the number "
                    "of steps of an episode"
                ) from error
        return self._samples(batch, env)

    def _draw(self, batch_size: int) -> StepBatch:
        return self.replay.mirror.sample_goals(
            batch_size,
            self._rewards,
            strategy=self.goal_selection_strategy.name.lower(),
            goals_per_step=self.n_sampled_goal,
        )

    def _rewards(self, achieved: Any, desired: Any, _: Tree) -> NDArray[np.float32]:
        if self.env is None:
            raise ValueError("no environment can compute rewards: call set_env() first")
        infos: list[dict[str, Any]] = [{} for _ in range(len(achieved))]
        # One environment is enough: all are alike.
        (rewards,) = self.env.env_method("compute_reward", achieved, desired, infos, indices=[0])
        return np.asarray(rewards, np.float32)

    def truncate_last_trajectory(self) -> None:
        """Do nothing: after a load no writer continues an unfinished episode."""

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        del state["env"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.env = None
        super().__setstate__(state)
