"""`EpisodeBuffer`: episodes up to a number of steps; at capacity the oldest leave, whole.

E1 At most `capacity_steps` steps, or a single longer episode. E2 Episodes leave whole, with all
agents, oldest first, at a cost proportional to what leaves. E3 Parts of an episode join in any
order; a part that contradicts is refused and changes nothing. E4 A position stands for one step, in
order of arrival; every draw ends.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from breadbox_offline.episodes.episode import Episode
from breadbox_offline.episodes.serialized import episode_from_state, episode_to_state
from breadbox_offline.errors import EpisodeJoinError, EpisodeShapeError, SamplingError


class RandomDraws:
    """Draw uniformly from a seeded generator; a test may pass scripted draws."""

    def __init__(self, seed: int | None = None) -> None:
        self._generator = np.random.default_rng(seed)

    def steps(self, count: int, held_count: int) -> NDArray[np.int64]:
        """Draw `count` positions below `held_count`, with replacement."""
        return self._generator.integers(0, held_count, size=count)

    def lengths(self, count: int, low: int, high: int) -> NDArray[np.int64]:
        """Draw `count` lengths, uniform from `low` to below `high`."""
        return self._generator.integers(low, high, size=count)

    def order(self, held_count: int) -> NDArray[np.int64]:
        """Return every position below `held_count` once, shuffled."""
        return self._generator.permutation(held_count)

    def get_state(self) -> str:
        """Return the generator's state as JSON, because its numbers have 128 bits."""
        return json.dumps(self._generator.bit_generator.state)

    def set_state(self, state: str) -> None:
        """Continue from the state that `get_state` returned."""
        held: Any = json.loads(state)
        self._generator.bit_generator.state = held


EpisodeKey = tuple[str, str | None]


class _Segment(NamedTuple):
    """One added part."""

    key: EpisodeKey
    t_started: int
    length: int


class AddOutcome(Enum):
    """How an added episode was stored."""

    ADDED = "added"
    """It was added as a new episode."""
    JOINED = "joined"
    """Joined to a part of its episode that it continues or precedes."""
    HELD_APART = "held_apart"
    """Beside the parts of its episode; steps between them are missing so far."""


@dataclass(slots=True)
class BufferCounters:
    """Numbers since the buffer was made."""

    added_step_count: int = 0
    evicted_episode_count: int = 0
    sampled_step_count: int = 0
    redrawn_count: int = 0
    """Draws that were too near an end, and were repeated."""


@dataclass(frozen=True, slots=True)
class HeldStep:
    """One step of a held part."""

    episode: Episode
    step: int
    """0 is the first step of the part."""


@dataclass(frozen=True, slots=True)
class Moment:
    """One environment step of an episode."""

    time: int
    steps: list[HeldStep]
    """The step of every agent that acted, in the order of agents."""


@dataclass(slots=True)
class _Entry:
    parts: list[Episode] = field(default_factory=list)
    """Parts in ascending order, with gaps between them."""
    segments: set[int] = field(default_factory=set)
    digests: dict[int, bytes] = field(default_factory=dict)
    """Content digest of every added part, by first timestep."""

    def part_at(self, t: int) -> Episode:
        for part in self.parts:
            if part.t_started <= t < part.t:
                return part
        raise AssertionError(f"no held part has step {t}: the step index is wrong")


class _Moments:
    """Find the moments of episodes, the times at which any agent acted; collected when needed."""

    def __init__(self, entries: dict[EpisodeKey, _Entry]) -> None:
        self._entries = entries
        self.keys: dict[str, list[EpisodeKey]] = {}
        """Keys of an episode's agents, by its id."""
        self._times: dict[str, NDArray[np.int64]] = {}
        self._ids: list[str] = []
        self._ends: NDArray[np.int64] | None = None
        for key in entries:
            self.add_key(key)

    def add_key(self, key: EpisodeKey) -> None:
        self.keys.setdefault(key[0], []).append(key)

    def forget_times(self, episode_id: str) -> None:
        self._times.pop(episode_id, None)
        self._ends = None

    def pop_oldest(self) -> list[EpisodeKey]:
        episode_id = next(iter(self.keys))
        self.forget_times(episode_id)
        return self.keys.pop(episode_id)

    def find(self, positions: NDArray[np.int64]) -> Iterator[tuple[str, int]]:
        ends = self.ends()
        slots = np.searchsorted(ends, positions, side="right")
        for slot, position in zip(slots.tolist(), positions.tolist(), strict=True):
            times = self._times[self._ids[slot]]
            yield self._ids[slot], int(times[position - int(ends[slot]) + len(times)])

    def ends(self) -> NDArray[np.int64]:
        if self._ends is None:
            for episode_id, keys in self.keys.items():
                if episode_id not in self._times:
                    times = [part.times() for key in keys for part in self._entries[key].parts]
                    self._times[episode_id] = np.unique(np.concatenate(times))
            self._ids = list(self.keys)
            self._ends = np.cumsum([len(self._times[each]) for each in self._ids], dtype=np.int64)
        return self._ends


class EpisodeBuffer:
    """Hold episodes to draw from. Not thread-safe. Episodes are shared, never changed."""

    def __init__(
        self,
        capacity_steps: int = 10_000,
        *,
        seed: int | None = None,
        draws: RandomDraws | None = None,
    ) -> None:
        """Make an empty buffer.

        Args:
            capacity_steps: Most steps to hold, at least 1; a longer episode replaces all others.
            seed: Seed of the draws, or None for a random one.
            draws: Another source of draws, which ignores `seed`.
        """
        if capacity_steps < 1:
            raise SamplingError(f"capacity_steps must be at least 1, got {capacity_steps}")
        self.capacity_steps = capacity_steps
        self.counters = BufferCounters()
        self.draws = draws if draws is not None else RandomDraws(seed)
        self._entries: dict[EpisodeKey, _Entry] = {}
        self._segments: dict[int, _Segment] = {}
        """What was added, by number, in order of arrival."""
        self._segment_count = self._step_count = 0
        self._found: tuple[list[_Segment], NDArray[np.int64]] | None = None
        """The segments in order and the ends of each, or None if they have changed since."""
        self._moments = _Moments(self._entries)

    @property
    def step_count(self) -> int:
        """Number of steps held."""
        return self._step_count

    @property
    def episode_count(self) -> int:
        """Number of episodes held."""
        return len(self._entries)

    def episodes(self) -> list[Episode]:
        """Return all episodes, in order of arrival, in their parts where steps are missing."""
        return [part for entry in self._entries.values() for part in entry.parts]

    def held_digest(self, episode: Episode) -> bytes | None:
        """Return the digest of the added part with the same id, agent and first timestep."""
        entry = self._entries.get(episode.key)
        return None if entry is None else entry.digests.get(episode.t_started)

    def add_all(self, episodes: Iterable[Episode]) -> list[AddOutcome]:
        """Add several episodes; those before one that raises stay."""
        return [self.add(episode) for episode in episodes]

    def add(self, episode: Episode) -> AddOutcome:
        """Add an episode, or a part of one; then evict the oldest while there are too many steps.

        Raises:
            EpisodeJoinError: It contradicts the parts held (an overlap, another observation at the
                seam, steps after the end). Nothing changes.
            EpisodeShapeError: It has no steps. Nothing changes.
        """
        if not len(episode):
            raise EpisodeShapeError(f"{episode!r} has no steps")
        entry = self._entries.get(episode.key)
        if entry is None:
            entry = self._entries[episode.key] = _Entry([episode])
            self._moments.add_key(episode.key)
            outcome = AddOutcome.ADDED
        else:
            part_count = len(entry.parts)
            entry.parts = _with_part(entry.parts, episode)
            is_apart = len(entry.parts) > part_count
            outcome = AddOutcome.HELD_APART if is_apart else AddOutcome.JOINED
        entry.digests[episode.t_started] = episode.content_digest()
        self._moments.forget_times(episode.id)
        self._add_segment(_Segment(episode.key, episode.t_started, len(episode)))
        self.counters.added_step_count += len(episode)
        self._evict()
        return outcome

    def held_steps(self, positions: NDArray[np.int64]) -> list[HeldStep]:
        """Return the steps at positions below `step_count`."""
        if self._found is None:
            held = [*self._segments.values()]
            self._found = held, np.cumsum([each.length for each in held], dtype=np.int64)
        segments, ends = self._found
        slots = np.searchsorted(ends, positions, side="right")
        found = []
        for slot, position in zip(slots.tolist(), positions.tolist(), strict=True):
            key, t_started, length = segments[slot]
            parts = self._entries[key].parts
            t = t_started + position - int(ends[slot]) + length
            part = parts[0] if len(parts) == 1 else self._entries[key].part_at(t)
            found.append(HeldStep(part, t - part.t_started))
        return found

    @property
    def moment_count(self) -> int:
        """Number of moments: environment steps of episodes in which at least one agent acted."""
        ends = self._moments.ends()
        return int(ends[-1]) if len(ends) else 0

    def moments(self, positions: NDArray[np.int64]) -> list["Moment"]:
        """Return the moments at positions below `moment_count`, each with all agents that acted."""
        found = []
        for episode_id, time in self._moments.find(positions):
            steps: list[HeldStep] = []
            for key in self._moments.keys[episode_id]:
                for part in self._entries[key].parts:
                    step = part.step_at(time)
                    if step is not None:
                        steps.append(HeldStep(part, step))
            found.append(Moment(time, steps))
        return found

    def get_state(self) -> dict[str, Any]:
        """Return everything as plain values and arrays (`pack_message` serializes them)."""
        return {
            "capacity_steps": self.capacity_steps,
            "episodes": [episode_to_state(part) for part in self.episodes()],
            "segments": [[*each] for each in self._segments.values()],
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
        """Replace everything by the state that `get_state` returned."""
        entries: dict[EpisodeKey, _Entry] = {}
        for held in state["episodes"]:
            part = episode_from_state(held)
            entries.setdefault(part.key, _Entry()).parts.append(part)
        for episode_id, agent_id, t_started, digest in state["digests"]:
            entries[episode_id, agent_id].digests[t_started] = digest
        self.draws.set_state(state["draws"])
        self.capacity_steps = state["capacity_steps"]
        self.counters = BufferCounters(**state["counters"])
        self._entries, self._moments = entries, _Moments(entries)
        self._segments, self._step_count = {}, 0
        for (episode_id, agent_id), t_started, length in state["segments"]:
            self._add_segment(_Segment((episode_id, agent_id), t_started, length))

    def _add_segment(self, segment: "_Segment") -> None:
        self._segments[self._segment_count] = segment
        self._entries[segment.key].segments.add(self._segment_count)
        self._segment_count += 1
        self._step_count += segment.length
        self._found = None

    def _evict(self) -> None:
        while self._step_count > self.capacity_steps and len(self._moments.keys) > 1:
            for key in self._moments.pop_oldest():
                for number in self._entries.pop(key).segments:
                    self._step_count -= self._segments.pop(number).length
                self.counters.evicted_episode_count += 1
            self._found = None


def _with_part(parts: list[Episode], new: Episode) -> list[Episode]:
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
