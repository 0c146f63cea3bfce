"""`Episode`: what one agent saw, did and got, as stacked arrays.

T actions, rewards and extra outputs; T + 1 observations and infos. `lookback` more entries in front
are context only. Episodes never change in place and slices are views: sharing is safe.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from breadbox.model import trees
from breadbox.model.trees import Tree
from breadbox_offline.decoding.rows import row_types, rows_equal
from breadbox_offline.errors import EpisodeJoinError, EpisodeShapeError

Info = Mapping[str, Any]
"""What the environment said beside an observation."""


@dataclass(slots=True, eq=False, kw_only=True)
class Episode:
    """Hold consecutive steps of one episode; `EpisodeShapeError` if the buffers do not fit."""

    id: str
    observations: Tree
    """Leaves [lookback + T + 1, ...]."""
    actions: Tree
    """Leaves [lookback + T, ...]."""
    rewards: NDArray[Any]
    """[lookback + T]; any float dtype, as recorded."""
    terminated: bool = False
    """The last step led into a terminal state."""
    truncated: bool = False
    """The episode was cut off after the last step."""
    agent_id: str | None = None
    module_id: str | None = None
    t_started: int = 0
    """Timestep of the first step (after the lookback) within the whole episode."""
    lookback: int = 0
    """Entries at the front of every buffer that are context only."""
    infos: Sequence[Info] | None = None
    """lookback + T + 1 infos; None when the recorder kept none."""
    extra_model_outputs: dict[str, Tree] = field(default_factory=dict)
    """Per name, leaves [lookback + T, ...]: log-probabilities, recurrent states and so on."""
    in_states: Mapping[int, Tree] = field(default_factory=dict)
    """Recurrent states before some of the steps, by timestep, leaves without axes of batch or time:
    recorders that keep one per fragment and not per step."""
    step_times: NDArray[np.int64] | None = None
    """int64[lookback + T], ascending: environment step in which each step was taken, for an agent
    that does not act in all of them. None: in every one, from `t_started` on."""
    _digest: bytes | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        step_count = len(self.rewards)
        if not 0 <= self.lookback <= step_count:
            raise EpisodeShapeError(
                f"episode {self.id!r}: lookback {self.lookback} with {step_count} rewards"
            )
        self._check_length("observations", self.observations, step_count + 1)
        self._check_length("actions", self.actions, step_count)
        for name, output in self.extra_model_outputs.items():
            self._check_length(name, output, step_count)
        if self.infos is not None and len(self.infos) != step_count + 1:
            raise EpisodeShapeError(
                f"episode {self.id!r}: {len(self.infos)} infos for {step_count} rewards; "
                f"wanted {step_count + 1}"
            )
        times = self.step_times
        if times is not None and (len(times) != step_count or (np.diff(times) < 1).any()):
            raise EpisodeShapeError(
                f"episode {self.id!r}: step_times are {len(times)} for {step_count} rewards, or do "
                "not ascend"
            )

    def _check_length(self, name: str, tree: Tree, wanted: int) -> None:
        if isinstance(tree, np.ndarray) and tree.shape[:1] == (wanted,):
            return
        for path, leaf in trees.leaves(tree):
            if not isinstance(leaf, np.ndarray) or not leaf.ndim:
                kind = "scalar" if isinstance(leaf, np.ndarray) else type(leaf).__name__
                self._refuse(name, path, f"a {kind}", wanted)
            elif len(leaf) != wanted:
                self._refuse(name, path, len(leaf), wanted)

    def _refuse(self, name: str, path: str, held: object, wanted: int) -> None:
        raise EpisodeShapeError(
            f"episode {self.id!r}: {name}{'/' if path else ''}{path} has {held} entries for "
            f"{len(self.rewards)} rewards; wanted {wanted}"
        )

    def __len__(self) -> int:
        """Steps, without the lookback."""
        return len(self.rewards) - self.lookback

    def __repr__(self) -> str:
        end = "terminated" if self.terminated else "truncated" if self.truncated else "open"
        agent = f" agent {self.agent_id}" if self.agent_id is not None else ""
        return f"<Episode {self.id}{agent} steps {self.t_started}..{self.t} {end}>"

    @property
    def t(self) -> int:
        """Timestep after the last step."""
        return self.t_started + len(self)

    @property
    def is_done(self) -> bool:
        """Whether nothing can follow."""
        return self.terminated or self.truncated

    @property
    def key(self) -> tuple[str, str | None]:
        """What makes two parts parts of one episode: id and agent."""
        return self.id, self.agent_id

    def times(self) -> NDArray[np.int64]:
        """int64[T]; the environment step in which each step was taken, without the lookback."""
        if self.step_times is not None:
            return self.step_times[self.lookback :]
        return np.arange(self.t_started, self.t)

    def step_at(self, time: int) -> int | None:
        """The step taken in an environment step (0 is the first after the lookback), if any."""
        if self.step_times is None:
            step = time - self.t_started
            return step if 0 <= step < len(self) else None
        step = int(np.searchsorted(self.times(), time))
        return step if step < len(self) and self.times()[step] == time else None

    def own_observations(self) -> Tree:
        """The T + 1 observations without the lookback."""
        return trees.rows(self.observations, self.lookback, None)

    def own_actions(self) -> Tree:
        """The T actions without the lookback."""
        return trees.rows(self.actions, self.lookback, None)

    def own_rewards(self) -> NDArray[Any]:
        """The T rewards without the lookback."""
        return self.rewards[self.lookback :]

    def own_infos(self) -> Sequence[Info]:
        """The T + 1 infos without the lookback; empty ones when none were kept."""
        if self.infos is None:
            return [{} for _ in range(len(self) + 1)]
        return self.infos[self.lookback :]

    def own_extra_model_outputs(self) -> dict[str, Tree]:
        """Every extra output without the lookback."""
        return {
            name: trees.rows(output, self.lookback, None)
            for name, output in self.extra_model_outputs.items()
        }

    def has_states(self, *names: str) -> bool:
        """Whether recurrent states were recorded: extra outputs of these names, or `in_states`."""
        return bool(self.in_states) or not set(names).isdisjoint(self.extra_model_outputs)

    def return_sum(self) -> float:
        """Undiscounted sum of the rewards."""
        return float(self.own_rewards().sum(dtype=np.float64))

    def slice(self, start: int, stop: int, *, lookback: int = 0) -> "Episode":
        """Return steps `start` to `stop` (0 is the first after the lookback), as views.

        The slice has the end flags only if it reaches the end, and up to `lookback` steps before
        `start`. Raises EpisodeShapeError if the range is empty or out of bounds.
        """
        if not 0 <= start < stop <= len(self):
            raise EpisodeShapeError(
                f"episode {self.id!r}: no steps {start}..{stop} in one of {len(self)} steps"
            )
        kept = min(lookback, start + self.lookback)
        low, high = self.lookback + start - kept, self.lookback + stop
        reaches_end = stop == len(self)
        return replace(
            self,
            observations=trees.rows(self.observations, low, high + 1),
            actions=trees.rows(self.actions, low, high),
            rewards=self.rewards[low:high],
            infos=None if self.infos is None else self.infos[low : high + 1],
            extra_model_outputs={
                name: trees.rows(output, low, high)
                for name, output in self.extra_model_outputs.items()
            },
            step_times=None if self.step_times is None else self.step_times[low:high],
            terminated=self.terminated and reaches_end,
            truncated=self.truncated and reaches_end,
            t_started=self.t_started + start,
            lookback=kept,
            in_states={
                t: state
                for t, state in self.in_states.items()
                if start - kept <= t - self.t_started < stop
            },
        )

    def join(self, later: "Episode") -> "Episode":
        """Return this part and the one that follows it as one new episode; neither changes.

        Raises EpisodeJoinError for another episode or agent, a gap, overlap or end between them, a
        different observation at the seam, or other columns.
        """
        self._check_follows(later)
        start = later.lookback
        infos, times = None, None
        if self.infos is not None or later.infos is not None:
            # The info at the seam belongs to the observation that both parts hold; the earlier part
            # has it from the step that led there.
            front = self.infos or [{} for _ in range(len(self.rewards) + 1)]
            infos = [*front, *later.own_infos()[1:]]
        if self.step_times is not None or later.step_times is not None:
            own = self.step_times
            if own is None:
                own = np.arange(self.t_started - self.lookback, self.t)
            times = np.concatenate([own, later.times()])
        return replace(
            self,
            observations=trees.concat(
                [self.observations, trees.rows(later.observations, start + 1, None)]
            ),
            actions=trees.concat([self.actions, trees.rows(later.actions, start, None)]),
            rewards=np.concatenate([self.rewards, later.rewards[start:]]),
            infos=infos,
            step_times=times,
            extra_model_outputs={
                name: trees.concat(
                    [output, trees.rows(later.extra_model_outputs[name], start, None)]
                )
                for name, output in self.extra_model_outputs.items()
            },
            in_states={**self.in_states, **later.in_states},
            terminated=later.terminated,
            truncated=later.truncated,
        )

    def _check_follows(self, later: "Episode") -> None:
        problem = None
        if self.key != later.key:
            problem = f"{later!r} is another episode"
        elif self.is_done:
            problem = "it has ended already"
        elif later.t_started != self.t:
            problem = f"the later part starts at step {later.t_started}, wanted {self.t}"
        elif len(self) and len(later) and int(self.times()[-1]) >= int(later.times()[0]):
            problem = f"the later part was taken at time {later.times()[0]}, before this one's end"
        elif self.extra_model_outputs.keys() != later.extra_model_outputs.keys():
            problem = "the parts have other extra model outputs"
        elif row_types(self.observations) != row_types(later.observations):
            problem = "the parts have observations of other shapes"
        elif not rows_equal(
            trees.rows(self.observations, -1, None),
            trees.rows(later.observations, later.lookback, later.lookback + 1),
        )[0]:
            problem = "the later part starts from another observation than this one ends with"
        if problem is not None:
            raise EpisodeJoinError(f"{self!r} cannot be continued: {problem}")

    def as_truncated(self) -> "Episode":
        """The same steps, marked as cut off if nothing ended them."""
        return self if self.is_done else replace(self, truncated=True)

    def content_digest(self) -> bytes:
        """Return 16 bytes that change with steps, end flags or dtypes; not with infos or states."""
        if self._digest is not None:
            return self._digest
        digest = xxhash.xxh3_128()
        digest.update(f"{len(self)} {self.terminated:d} {self.truncated:d}".encode())
        buffers = {
            "observations": self.own_observations(),
            "actions": self.own_actions(),
            "rewards": self.own_rewards(),
            **self.own_extra_model_outputs(),
        }
        if self.step_times is not None:
            buffers["step_times"] = self.times()
        for path, leaf in trees.leaves(buffers):
            digest.update(f"{path} {leaf.dtype.str} {leaf.shape}".encode())
            digest.update(np.ascontiguousarray(leaf).view(np.uint8).data if leaf.size else b"")
        self._digest = digest.digest()
        return self._digest
