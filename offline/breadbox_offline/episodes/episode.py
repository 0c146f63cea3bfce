"""`Episode`: the observations, actions and rewards of one agent, as stacked arrays.

It has T actions, rewards and extra outputs, and T + 1 observations and infos. `lookback` more
entries in front are context only. Episodes never change and slices are views, so sharing is safe.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from breadbox.model import trees
from breadbox.model.trees import Tree
from breadbox_offline.decoding.rows import row_types
from breadbox_offline.errors import EpisodeJoinError, EpisodeShapeError

Info = Mapping[str, Any]
"""What an environment returns with an observation."""


@dataclass(slots=True, eq=False, kw_only=True)
class Episode:
    """Consecutive steps of one episode; raises `EpisodeShapeError` if lengths do not match."""

    id: str
    observations: Tree
    """Leaves [lookback + T + 1, ...]."""
    actions: Tree
    """Leaves [lookback + T, ...]."""
    rewards: NDArray[Any]
    """[lookback + T]; any float dtype, as recorded."""
    terminated: bool = False
    """True if the last step led into a terminal state."""
    truncated: bool = False
    """True if the episode was cut off after the last step."""
    agent_id: str | None = None
    module_id: str | None = None
    t_started: int = 0
    """Timestep of the first step (after the lookback) within the whole episode."""
    lookback: int = 0
    """Entries at the front of every buffer that are context only."""
    infos: Sequence[Info] | None = None
    """lookback + T + 1 infos, or None if the recorder kept none."""
    extra_model_outputs: dict[str, Tree] = field(default_factory=dict)
    """Leaves [lookback + T, ...] by name: log-probabilities, recurrent states and so on."""
    in_states: Mapping[int, Tree] = field(default_factory=dict)
    """Recurrent states before some of the steps, by timestep, leaves without axes of batch or time;
    for recorders that keep one state per fragment."""
    step_times: NDArray[np.int64] | None = None
    """int64[lookback + T], ascending: environment step of each step, for an agent that does not act
    in every one; or None if it acts in every one, from `t_started` on."""
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
        if type(tree) is np.ndarray and tree.shape[:1] == (wanted,):
            return
        for path, leaf in trees.leaves(tree):
            trees.check_unmasked(leaf, f"{name}.{path}" if path else name)
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
        """Return the number of steps, without the lookback."""
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
        """True if no step can follow."""
        return self.terminated or self.truncated

    @property
    def key(self) -> tuple[str, str | None]:
        """Id and agent, which all parts of one episode share."""
        return self.id, self.agent_id

    def times(self) -> NDArray[np.int64]:
        """Return int64[T], the environment step of each step, without the lookback."""
        if self.step_times is not None:
            return self.step_times[self.lookback :]
        return np.arange(self.t_started, self.t)

    def step_at(self, time: int) -> int | None:
        """Return the index of the step at an environment step, without the lookback, or None."""
        if self.step_times is None:
            step = time - self.t_started
            return step if 0 <= step < len(self) else None
        step = int(np.searchsorted(self.times(), time))
        return step if step < len(self) and self.times()[step] == time else None

    def own_observations(self) -> Tree:
        """Return the T + 1 observations without the lookback."""
        return trees.rows(self.observations, self.lookback, None)

    def own_actions(self) -> Tree:
        """Return the T actions without the lookback."""
        return trees.rows(self.actions, self.lookback, None)

    def own_rewards(self) -> NDArray[Any]:
        """Return the T rewards without the lookback."""
        return self.rewards[self.lookback :]

    def own_infos(self) -> Sequence[Info]:
        """Return the T + 1 infos without the lookback, empty ones if the recorder kept none."""
        if self.infos is None:
            return [{} for _ in range(len(self) + 1)]
        return self.infos[self.lookback :]

    def own_extra_model_outputs(self) -> dict[str, Tree]:
        """Return all extra outputs without the lookback."""
        return {
            name: trees.rows(output, self.lookback, None)
            for name, output in self.extra_model_outputs.items()
        }

    def has_states(self, *names: str) -> bool:
        """Return True if it has recurrent states: extra outputs of these names, or `in_states`."""
        return bool(self.in_states) or not set(names).isdisjoint(self.extra_model_outputs)

    def return_sum(self) -> float:
        """Return the undiscounted sum of the rewards."""
        return float(self.own_rewards().sum(dtype=np.float64))

    def slice(self, start: int, stop: int, *, lookback: int = 0) -> "Episode":
        """Return steps `start` to `stop` (0 is the first after the lookback), as views.

        The slice keeps up to `lookback` steps before `start`, and has end flags only if it reaches
        the end. Raises EpisodeShapeError if the range is empty or out of bounds.
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

        Raises EpisodeJoinError as `check_follows`.
        """
        self.check_follows(later)
        start = later.lookback
        infos, times = None, None
        if self.infos is not None or later.infos is not None:
            # Both parts have the observation at the seam. The earlier part has its info, from the
            # step that led there.
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

    def leads_to(self, later: "Episode") -> bool:
        """Return True if the other begins where this part ends, by episode and timestep."""
        return self.key == later.key and not self.is_done and later.t_started == self.t

    def check_follows(self, later: "Episode") -> None:
        """Raise EpisodeJoinError unless the other is the part that follows this one.

        It is not after an end, a gap or an overlap, with another observation at the seam, or with
        other columns.
        """
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
        elif self.has_seam(later):
            problem = "the later part starts from another observation than this one ends with"
        if problem is not None:
            raise EpisodeJoinError(f"{self!r} cannot be continued: {problem}")

    def has_seam(self, later: "Episode") -> bool:
        """Return True if the other starts from another observation of the same types."""
        first = trees.rows(later.observations, later.lookback, later.lookback + 1)
        last = trees.rows(self.observations, -1, None)
        return row_types(last) == row_types(first) and not trees.rows_equal(last, first)[0]

    def as_truncated(self) -> "Episode":
        """Return the same steps, truncated unless they are terminated."""
        return self if self.is_done else replace(self, truncated=True)

    def content_digest(self) -> bytes:
        """Return 16 bytes that depend on steps, end flags and dtypes, not on infos or states."""
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
        for path, leaf in sorted(trees.leaves(buffers), key=itemgetter(0)):
            digest.update(f"{path} {leaf.dtype.str} {leaf.shape}".encode())
            digest.update(np.ascontiguousarray(leaf).view(np.uint8).data if leaf.size else b"")
        self._digest = digest.digest()
        return self._digest
