"""A replay buffer of steps of Gymnasium's spaces, which the adapters of libraries derive from."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from breadbox.mirror import StepBatch
from breadbox.model.fragment import Tree
from breadbox.model.trees import child_path, plain_array
from breadbox.model.types import ArrayType, ModelState
from breadbox_adapters.run_replay import RunReplay

Infos = Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""One dict for each environment, or one for all with an array for each key."""


_FINALS = frozenset({"final_obs", "final_observation"})
"""Keys of infos for the final observation, where a vector environment resets at an end."""


class SpacedReplay:
    """Take steps of environments with these spaces; return flat batches of tensors."""

    _prefix = "run"
    """Beginning of generated names."""

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        **where: Any,
    ) -> None:
        """Enter a run; the first arguments are those that libraries and scripts pass.

        Args:
            buffer_size: Most steps that are kept here, of all environments together.
            observation_space: A single environment's.
            action_space: A single environment's.
            device: Device of samples; "auto": CUDA if there is one.
            n_envs: Environments of which each `add` passes a step.
            optimize_memory_usage: No effect: an observation is kept once anyway.
            handle_timeout_termination: True if `TimeLimit.truncated` in infos makes a `done` a
                truncation. False for scripts that pass terminations alone.
            where: `server`: HOST:PORT; by default `BREADBOX_SERVER`, else localhost:50051. A token
                is taken from `BREADBOX_TOKEN`, certificates from `BREADBOX_TLS_CA` and the like.
                `run`: name of the training, under which its data is found again. `buffer`: name of
                the buffer, by default the run's. Given a buffer and no run, it joins the buffer's
                current session, such as that of remote actors. Given neither, the buffer is a new
                one, which `close` deletes unless a checkpoint was made.
                `frame_stack`: `{"obs": AXIS}`, or `{"obs.KEY": AXIS}` for dicts, if observations
                are stacks of frames, the newest last: each frame is then kept once.
                `arrival_wait_s`: seconds for which sampling waits for steps.
                `process`: True to fill the memory from another process; Linux only.

        Raises:
            NotImplementedError: There are no flat batches of such spaces.
            ReplayBufferError: See `breadbox_adapters.run_replay.RunReplay`.
        """
        self.observation_space = observation_space
        self.action_space = action_space
        self.obs_shape: Any = batch_shape(observation_space)
        """Shape of an observation in a batch, by key for dicts."""
        self.action_dim = action_size(action_space)
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device)
        self.n_envs = n_envs
        self.buffer_size = max(buffer_size // n_envs, 1)
        """Most steps that are kept of each environment."""
        self.optimize_memory_usage = optimize_memory_usage
        self.handle_timeout_termination = handle_timeout_termination
        self._where = where
        self.replay = self._enter()

    def _enter(self, **where: Any) -> RunReplay:
        return RunReplay(
            **{**self._where, **where},
            prefix=self._prefix,
            capacity_steps=self.buffer_size * self.n_envs,
            env_count=self.n_envs,
            arrays={
                **self._arrays(self.observation_space, "obs"),
                **self._arrays(self.action_space, "action"),
            },
            # Programs seed numpy's generator before they make the buffer.
            seed=int(np.random.randint(2**31)),
        )

    @property
    def run(self) -> str:
        """The run's name."""
        return self.replay.run

    def size(self) -> int:
        """Return the steps per environment that can be sampled, own ones on their way included."""
        self.replay.catch_up()
        return min(len(self.replay.mirror) // self.n_envs, self.buffer_size)

    def reset(self) -> None:
        """Empty the mirror; the server keeps the steps."""
        self.replay.clear()

    def close(self) -> None:
        """Send the remaining steps, and stop. Idempotent."""
        self.replay.close()

    # Steps in ----------------------------------------------------------------------------------

    def add(
        self,
        obs: Tree,
        next_obs: Tree,
        action: NDArray[Any],
        reward: NDArray[Any],
        done: NDArray[Any],
        infos: Infos,
    ) -> None:
        """Add a step of each environment; blocks only while the server has no room.

        Arguments have an axis of `n_envs`. `obs` and `reward` are not normalised; `next_obs` is the
        final observation where an episode ended; `action` is as the policy learns it. With
        `handle_timeout_termination`, `TimeLimit.truncated` in `infos` marks a truncation. An
        observation that does not follow the last step starts an episode.
        """
        ended = np.asarray(done, np.bool_).reshape(self.n_envs)
        truncated = np.zeros(self.n_envs, np.bool_)
        if self.handle_timeout_termination:
            # Without a `done` too: libraries still end their windows there.
            truncated = self._limits(infos)
        self.replay.add(
            self._stored(obs, self.observation_space),
            self._stored(action, self.action_space),
            plain_array(reward, "reward").reshape(self.n_envs),
            self._stored(next_obs, self.observation_space),
            ended & ~truncated,
            truncated,
            # Lists of infos are of libraries that reset at ends. Scripts may pass the first
            # observation of the next episode after a terminal state, which looks as if it followed.
            is_same_step=not isinstance(infos, Mapping) or not _FINALS.isdisjoint(infos),
        )

    def _limits(self, infos: Infos) -> NDArray[np.bool_]:
        name = "TimeLimit.truncated"
        if isinstance(infos, Mapping):
            return np.asarray(infos.get(name, np.zeros(self.n_envs)), np.bool_)
        return np.array([bool(info.get(name, False)) for info in infos])

    def _stored(self, tree: Tree, space: spaces.Space[Any]) -> Tree:
        """Lay data out as a rollout worker of the environment sends it."""
        if isinstance(space, spaces.Dict):
            return {key: self._stored(tree[key], part) for key, part in space.items()}
        array = plain_array(tree).astype(self._dtype(space), copy=False)
        return array.reshape(self.n_envs, *(space.shape or ()))

    def _dtype(self, space: spaces.Space[Any]) -> np.dtype[Any]:
        dtype = np.dtype(space.dtype)
        is_wide = space is self.action_space and dtype == np.float64
        return np.dtype(np.float32) if is_wide else dtype

    def _arrays(self, space: spaces.Space[Any], path: str) -> dict[str, ArrayType]:
        if isinstance(space, spaces.Dict):
            parts = [self._arrays(part, child_path(path, key)) for key, part in space.items()]
            return {name: array for part in parts for name, array in part.items()}
        return {path: ArrayType(self._dtype(space).str, tuple(space.shape or ()))}

    # Steps out ---------------------------------------------------------------------------------

    def _kept(self) -> StepBatch:
        row_count = self.size()
        return self.replay.mirror.at(np.arange(row_count * self.n_envs))

    def _in_rows(self, array: NDArray[Any], shape: tuple[int, ...] = ()) -> NDArray[Any]:
        return array.reshape(-1, self.n_envs, *shape)

    def _observation_rows(self, obs: Tree) -> Any:
        if isinstance(self.obs_shape, dict):
            return {key: self._in_rows(obs[key], part) for key, part in self.obs_shape.items()}
        return self._in_rows(obs, self.obs_shape)

    @property
    def observations(self) -> Any:
        """[`size()`, n_envs, ...], not normalised; for a dict space, by key.

        A new copy at each access, like the properties below: samples do not see changes to it. Rows
        are in order of arrival; a column is not always of one environment. Blocks like `size`;
        raises `InvalidRequestError` before the first step.
        """
        return self._observation_rows(self._kept().obs)

    @property
    def next_observations(self) -> Any:
        """The observations after; see `observations`."""
        return self._observation_rows(self._kept().next_obs)

    @property
    def actions(self) -> NDArray[Any]:
        """[`size()`, n_envs, action size]; see `observations`."""
        return self._in_rows(self._kept().action, (self.action_dim,))

    @property
    def rewards(self) -> NDArray[np.float32]:
        """float32[`size()`, n_envs], not normalised; see `observations`."""
        return self._in_rows(self._kept().reward)

    @property
    def dones(self) -> NDArray[np.float32]:
        """float32[`size()`, n_envs]: 1 where an episode ended, also by a time limit."""
        kept = self._kept()
        return self._in_rows((kept.terminated | kept.truncated).astype(np.float32))

    @property
    def timeouts(self) -> NDArray[np.float32]:
        """float32[`size()`, n_envs]: 1 where a time limit ended it."""
        return self._in_rows(self._kept().truncated.astype(np.float32))

    def _values(self, batch: StepBatch, env: Any = None) -> dict[str, Any]:
        reward = batch.reward if env is None else env.normalize_reward(batch.reward)
        return {
            "observations": self._observations(batch.obs, env),
            "actions": self._tensor(batch.action, (self.action_dim,)),
            "next_observations": self._observations(batch.next_obs, env),
            "dones": self._tensor(batch.terminated.astype(np.float32), (1,)),
            "rewards": self._tensor(reward.astype(np.float32, copy=False), (1,)),
        }

    def _observations(self, obs: Tree, env: Any) -> Any:
        shape = self.obs_shape
        if not isinstance(shape, dict):
            flat = obs.reshape(len(obs), *shape)
            return self._tensor(flat if env is None else env.normalize_obs(flat), shape)
        flat = {key: obs[key].reshape(len(obs[key]), *part) for key, part in shape.items()}
        seen = flat if env is None else env.normalize_obs(flat)
        return {key: self._tensor(seen[key], part) for key, part in shape.items()}

    def _tensor(self, array: NDArray[Any], shape: tuple[int, ...]) -> torch.Tensor:
        # A copy already; its rows need not be contiguous.
        whole = np.ascontiguousarray(array.reshape(len(array), *shape))
        return torch.as_tensor(whole, device=self.device)

    # Policies ----------------------------------------------------------------------------------

    def publish_policy(self, policy: torch.nn.Module, version: int | None = None) -> int:
        """Publish a policy's weights as a model version of the run, for remote actors; return it.

        `version` must be above the run's last one, also that of a killed learner. None: the next.

        Raises:
            VersionRegressedError: It is not above the last one.
            SessionEndedError: The run was ended.
        """
        if version is None:
            state = self.replay.client.watch_model()
            version = 1 + ((state.model_version or 0) if state else 0)
        self.replay.client.publish(self.run, version, policy.state_dict())
        self.replay.act_with(version)
        return version

    def load_policy(self, policy: torch.nn.Module, max_wait_s: float = 0.0) -> int | None:
        """Load the newest published weights into a policy; return their version, or None if known.

        Blocks for at most `max_wait_s`. Steps added from then on are labelled with that version.
        """
        known: ModelState | None = getattr(self, "_known_model", None)
        newer = self.replay.client.load_model(known, max_wait_s=max_wait_s)
        if newer is None:
            return None
        state, arrays = newer
        policy.load_state_dict({name: torch.as_tensor(each) for name, each in arrays.items()})
        self._known_model = state
        self.replay.act_with(state.model_version or 0)
        return state.model_version

    # Checkpoints -------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state.pop("_known_model", None)
        state["replay"] = self.replay.keep()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.replay = self._enter(**state["replay"], must_exist=True)


def batch_shape(space: spaces.Space[Any]) -> Any:
    """Return an observation's shape in a batch, by key for a dict; a number has an axis of 1."""
    match space:
        case spaces.Dict():
            return {key: batch_shape(part) for key, part in space.items()}
        case spaces.Discrete():
            return (1,)
        case spaces.Box() | spaces.MultiDiscrete() | spaces.MultiBinary():
            return tuple(space.shape or ())
    raise NotImplementedError(f"there are no batches of observations of {space}")


def action_size(space: spaces.Space[Any]) -> int:
    """Return how many numbers an action has in a batch."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        raise NotImplementedError(f"there are no batches of actions of {space}")
    return int(np.prod(space.shape or ()))
