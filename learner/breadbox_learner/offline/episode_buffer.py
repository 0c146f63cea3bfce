"""`EpisodeBuffer`: episodes up to a number of steps, whole ones leaving when there are more.

Keeps:
  E1  At most `capacity_steps` steps, unless a single episode has more; then it is alone.
  E2  Episodes leave whole, the one that came first before others, at a cost of what leaves.
  E3  Parts of one episode are joined, in whatever order they come; a part that contradicts what is
      held is refused and nothing changes.
  E4  A position stands for one step, in the order in which steps came; every sampling ends.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from breadbox_learner.offline.draws import Draws, RandomDraws
from breadbox_learner.offline.episode import Episode
from breadbox_learner.offline.errors import EpisodeJoinError, EpisodeShapeError, SamplingError
from breadbox_learner.offline.serialized import episode_from_state, episode_to_state
from breadbox_learner.offline.step_index import StepIndex

EpisodeKey = tuple[str, str | None]


class AddOutcome(Enum):
    """What became of an added episode."""

    ADDED = "added"
    """It is a new one."""
    JOINED = "joined"
    """It continues, or precedes, a part that was held."""
    HELD_APART = "held_apart"
    """Steps between it and the held parts of its episode are missing so far."""
    TOO_LONG = "too_long"
    """It has more steps than the buffer may hold, and such episodes are refused."""


@dataclass(slots=True)
class BufferCounters:
    """What has happened since the buffer was made."""

    added_step_count: int = 0
    evicted_step_count: int = 0
    evicted_episode_count: int = 0
    sampled_step_count: int = 0
    redrawn_count: int = 0
    """Draws that fell too near an end and were drawn again."""


@dataclass(frozen=True, slots=True)
class Place:
    """One step of a held part."""

    episode: Episode
    step: int
    """0 is the first step of the part."""


@dataclass(slots=True)
class _Entry:
    """All that is held of one episode."""

    parts: list[Episode] = field(default_factory=list)
    """Ascending, not touching each other."""
    segments: set[int] = field(default_factory=set)
    digests: dict[int, bytes] = field(default_factory=dict)
    """Content of every part as it was added, by first timestep."""

    def step_count(self) -> int:
        return sum(len(part) for part in self.parts)

    def part_at(self, t: int) -> Episode:
        for part in self.parts:
            if part.t_started <= t < part.t:
                return part
        raise AssertionError(f"no held part has step {t}: the step index is wrong")


class EpisodeBuffer:
    """Holds episodes for sampling. Not thread-safe. Episodes are shared, never changed."""

    def __init__(
        self,
        capacity_steps: int = 10_000,
        *,
        seed: int | None = None,
        draws: Draws | None = None,
        refuses_too_long: bool = False,
    ) -> None:
        """Make an empty buffer.

        Args:
            capacity_steps: Steps held at most; 1 or more.
            seed: Seed of the draws; None takes one from the system.
            draws: Another source of draws; `seed` is not used then.
            refuses_too_long: Refuse an episode longer than the capacity instead of letting it push
                out all others.
        """
        if capacity_steps < 1:
            raise SamplingError(f"capacity_steps must be at least 1, got {capacity_steps}")
        self.capacity_steps = capacity_steps
        self.counters = BufferCounters()
        self.draws: Draws = draws if draws is not None else RandomDraws(seed)
        self._refuses_too_long = refuses_too_long
        self._entries: dict[EpisodeKey, _Entry] = {}
        self._segments: dict[int, tuple[EpisodeKey, int]] = {}
        self._index = StepIndex()

    @property
    def step_count(self) -> int:
        """Steps held."""
        return self._index.step_count

    @property
    def episode_count(self) -> int:
        """Episodes held."""
        return len(self._entries)

    def episodes(self) -> list[Episode]:
        """Everything held, in the order in which episodes came; parts that do not touch apart."""
        return [part for entry in self._entries.values() for part in entry.parts]

    def held_digest(self, episode: Episode) -> bytes | None:
        """Content digest of the part that was added with the same id, agent and first timestep."""
        entry = self._entries.get(episode.key)
        return None if entry is None else entry.digests.get(episode.t_started)

    def add_all(self, episodes: Iterable[Episode]) -> list[AddOutcome]:
        """Add several; those before one that raises stay."""
        return [self.add(episode) for episode in episodes]

    def add(self, episode: Episode) -> AddOutcome:
        """Add an episode, or a part of one; then the oldest leave while there are too many steps.

        Raises:
            EpisodeJoinError: it contradicts the held parts of its episode (an overlap, another
                observation at the seam, steps after the end). Nothing changes.
            EpisodeShapeError: it has no steps. Nothing changes.
        """
        if not len(episode):
            raise EpisodeShapeError(f"{episode!r} has no steps")
        if self._refuses_too_long and len(episode) > self.capacity_steps:
            return AddOutcome.TOO_LONG
        entry = self._entries.get(episode.key)
        if entry is None:
            entry = self._entries[episode.key] = _Entry([episode])
            outcome = AddOutcome.ADDED
        else:
            part_count = len(entry.parts)
            entry.parts = _with_part(entry.parts, episode)
            is_apart = len(entry.parts) > part_count
            outcome = AddOutcome.HELD_APART if is_apart else AddOutcome.JOINED
        entry.digests[episode.t_started] = episode.content_digest()
        number = self._index.append(len(episode))
        entry.segments.add(number)
        self._segments[number] = (episode.key, episode.t_started)
        self.counters.added_step_count += len(episode)
        self._evict()
        return outcome

    def places(self, positions: NDArray[np.int64]) -> list[Place]:
        """The steps at positions below `step_count`."""
        numbers, offsets = self._index.find(positions)
        found = []
        for number, offset in zip(numbers.tolist(), offsets.tolist(), strict=True):
            key, t_started = self._segments[number]
            parts = self._entries[key].parts
            t = t_started + offset
            part = parts[0] if len(parts) == 1 else self._entries[key].part_at(t)
            found.append(Place(part, t - part.t_started))
        return found

    def segment_places(self) -> list[tuple[Place, int]]:
        """First step of every segment, and its length, in the order of positions."""
        numbers, lengths = self._index.lengths()
        found = []
        for number, length in zip(numbers.tolist(), lengths.tolist(), strict=True):
            key, t_started = self._segments[number]
            part = self._entries[key].part_at(t_started)
            found.append((Place(part, t_started - part.t_started), length))
        return found

    def get_state(self) -> dict[str, Any]:
        """Everything as plain values and arrays (`pack_message` serializes them)."""
        numbers, lengths = self._index.lengths()
        return {
            "capacity_steps": self.capacity_steps,
            "episodes": [episode_to_state(part) for part in self.episodes()],
            "segments": [
                [*self._segments[number], length]
                for number, length in zip(numbers.tolist(), lengths.tolist(), strict=True)
            ],
            "digests": [
                [*key, t_started, digest]
                for key, entry in self._entries.items()
                for t_started, digest in entry.digests.items()
            ],
            "counters": {
                name: getattr(self.counters, name) for name in BufferCounters.__dataclass_fields__
            },
            "draws": self.draws.get_state(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Become the buffer that `get_state` described; what was held is forgotten."""
        entries: dict[EpisodeKey, _Entry] = {}
        for held in state["episodes"]:
            part = episode_from_state(held)
            entries.setdefault(part.key, _Entry()).parts.append(part)
        segments: dict[int, tuple[EpisodeKey, int]] = {}
        index = StepIndex()
        for (episode_id, agent_id), t_started, length in state["segments"]:
            number = index.append(length)
            segments[number] = ((episode_id, agent_id), t_started)
            entries[episode_id, agent_id].segments.add(number)
        for episode_id, agent_id, t_started, digest in state["digests"]:
            entries[episode_id, agent_id].digests[t_started] = digest
        self.draws.set_state(state["draws"])
        self.capacity_steps = state["capacity_steps"]
        self.counters = BufferCounters(**state["counters"])
        self._entries, self._segments, self._index = entries, segments, index

    def _evict(self) -> None:
        while self._index.step_count > self.capacity_steps and len(self._entries) > 1:
            key, entry = next(iter(self._entries.items()))
            del self._entries[key]
            for number in entry.segments:
                del self._segments[number]
            self._index.remove(entry.segments)
            self.counters.evicted_episode_count += 1
            self.counters.evicted_step_count += entry.step_count()


def _with_part(parts: list[Episode], new: Episode) -> list[Episode]:
    """The parts with one more, joined where they touch."""
    joined = list(parts)
    place = 0
    while place < len(joined) and joined[place].t_started < new.t_started:
        place += 1
    if place and joined[place - 1].is_done:
        raise EpisodeJoinError(f"{joined[place - 1]!r} has ended: {new!r} cannot follow")
    if place and joined[place - 1].t > new.t_started:
        raise EpisodeJoinError(f"{new!r} overlaps {joined[place - 1]!r}")
    if place < len(joined) and (new.is_done or new.t > joined[place].t_started):
        raise EpisodeJoinError(f"{new!r} does not end before {joined[place]!r} starts")
    if place < len(joined) and new.t == joined[place].t_started:
        new = new.join(joined.pop(place))
    if place and joined[place - 1].t == new.t_started:
        new = joined.pop(place - 1).join(new)
        place -= 1
    joined.insert(place, new)
    return joined
