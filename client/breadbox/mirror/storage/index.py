"""Which steps are kept, and which belong to one fragment, worker or episode."""

import itertools
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from breadbox.mirror.storage.rings import Memory, Ring, States, Table
from breadbox.model.fragment import Fragment

NONE: Final = -1
"""No fragment, no episode, no step."""
Numbers = NDArray[np.int64]


@dataclass(slots=True)
class Stream:
    """The latest fragment of one worker, and the episode that continues after it."""

    fragment: int
    next_index: int
    episode: int
    """Number of the episode that continues, or NONE: its beginning was not seen, or it ended."""
    ordinal: int


@dataclass(slots=True)
class Arrival:
    """Numbers for a fragment, its steps and episodes, before it is written."""

    number: int
    start: int
    owner: tuple[str, str]
    stream: Stream
    before: int
    """Number of the fragment that it continues, or NONE."""
    episodes: Numbers
    """Episode number of each step, or NONE."""
    ordinals: Numbers
    """Position of each step in its episode."""
    lowest: int
    """Number of its first episode, or NONE."""
    ended: list[tuple[int, int]]
    """Whole episodes that end here, and their numbers of steps."""


class StepIndex:
    """Steps, fragments and episodes, numbered in the order of arrival; used under the lock."""

    def __init__(self, start: int) -> None:
        self.low = start
        self.floor = start
        """Oldest step with memory that is not reused yet; at most `low`."""
        self.high = start
        self.unusable_count = 0
        """Visible steps without a known next observation: never drawn."""
        self.fragment_low = 0
        self.fragments = Table("start", "count", "handle", "next", "episode")
        self.episodes = Table("fragment", "offset", "start", "count")
        self.whole = Table("episode")
        self.states: States | None = None
        self.state_count = 0

    @property
    def rings(self) -> tuple[Ring | None, ...]:
        """All rings, in the order in which they are published."""
        return self.fragments, self.episodes, self.whole, self.states

    @property
    def usable_count(self) -> int:
        """Number of steps that can be drawn."""
        return self.high - self.low - self.unusable_count

    def end_of(self, fragment: int) -> int:
        """Return the number of the step behind a fragment's last."""
        return int(self.fragments.get("start", fragment) + self.fragments.get("count", fragment))

    def numbers_of(self, handles: Numbers) -> Numbers:
        """Return the numbers of the steps with these handles, NONE for those not kept."""
        fragments = self.fragments
        found = fragments.last_at_most("handle", handles)
        inside = found >= fragments.first
        found = np.where(inside, found, fragments.first)
        if not len(fragments):
            return np.full(len(handles), NONE, dtype=np.int64)
        offsets = handles - fragments.get("handle", found)
        inside &= offsets < fragments.get("count", found)
        numbers = fragments.get("start", found) + offsets
        return np.where(inside & (numbers >= self.low), numbers, NONE)

    def onwards(
        self, starts: Numbers, owners: Numbers, offsets: Numbers
    ) -> tuple[Numbers, NDArray[np.bool_]]:
        """Return numbers [B, L] of steps at offsets from starts (or the start), and their mask.

        The offsets of each start ascend.
        """
        # `owners` are the fragments of `starts`: all steps are of one worker.
        fragments = self.fragments
        furthest = offsets[:, -1]
        ends = fragments.get("start", owners) + fragments.get("count", owners) - starts
        numbers, mask = starts[:, None] + offsets, np.ones(offsets.shape, dtype=np.bool_)
        beyond = going = np.flatnonzero(ends <= furthest)
        if not len(beyond):
            return numbers, mask
        # Where each row comes to a fragment: all of a row, then all of the next, by offset.
        row_length = int(furthest.max()) + 1
        places, shifts, owner = [going * row_length], [starts[going]], owners[going]
        while len(going):
            following = fragments.get("next", owner)
            # Of a memory that another process fills, what came after this look is not shown yet,
            # and what was written over may lead anywhere.
            is_shown = (following > owner) & (following < fragments.end)
            going, owner = going[is_shown], following[is_shown]
            begins = ends[going]
            places.append(going * row_length + begins)
            shifts.append(fragments.get("start", owner) - begins)
            ends[going] = begins + fragments.get("count", owner)
            goes_on = ends[going] <= furthest[going]
            going, owner = going[goes_on], owner[goes_on]
        place = np.concatenate(places)
        order = np.argsort(place, kind="stable")
        wanted = offsets[beyond]
        found = np.searchsorted(place[order], wanted + beyond[:, None] * row_length, side="right")
        is_there = wanted < ends[beyond, None]
        wanted += np.concatenate(shifts)[order[found - 1]]
        numbers[beyond] = np.where(is_there, wanted, starts[beyond, None])
        mask[beyond] = is_there
        return numbers, mask

    def whole_episodes(self) -> Numbers:
        """Return the numbers of the episodes that are shown from their first step to their end."""
        whole = self.whole.kept("episode")
        return whole[self._are_held_whole(whole)]

    def _are_held_whole(self, numbers: Numbers) -> NDArray[np.bool_]:
        known = numbers >= self.episodes.first
        if len(self.episodes):
            known &= self.episodes.get("start", numbers) >= self.low
        return known


class FilledIndex(StepIndex):
    """An index that one thread fills; *notify* runs, locked, before memory is reused."""

    def __init__(
        self, start: int, memory: Memory, lock: threading.Condition, notify: Callable[[], None]
    ) -> None:
        super().__init__(start)
        self._memory = memory
        self._lock = lock
        self._notify = notify
        self._unusable: deque[int] = deque()
        self._streams: dict[tuple[str, str], Stream] = {}
        self._owners: dict[int, tuple[str, str]] = {}

    def arrival(self, fragment: Fragment, usable: NDArray[np.bool_]) -> Arrival:
        """Number a fragment's steps, behind all others; called without the lock."""
        owner = (fragment.session_id, fragment.worker_id)
        number, index = self.fragments.end, fragment.fragment_index
        known = self._streams.get(owner)
        if known is None or known.next_index != index or fragment.discontinuity:
            before, stream = NONE, Stream(number, index + 1, NONE, 0)
        else:
            before = known.fragment
            stream = Stream(number, index + 1, known.episode, known.ordinal)
        count = fragment.step_count
        arrival = Arrival(
            number=number,
            start=self.high,
            owner=owner,
            stream=stream,
            before=before,
            episodes=np.full(count, NONE, dtype=np.int64),
            ordinals=np.zeros(count, dtype=np.int64),
            lowest=NONE,
            ended=[],
        )
        self._number_episodes(arrival, fragment, usable)
        return arrival

    def _number_episodes(
        self, arrival: Arrival, fragment: Fragment, usable: NDArray[np.bool_]
    ) -> None:
        stream, ended = arrival.stream, fragment.ended
        begins = fragment.first.copy()
        begins[1:] |= ended[:-1]
        # Before the records below are in use, so that none of this fragment's own is dropped.
        floor = self.episodes.end
        cuts = [*sorted({0, *begins.nonzero()[0].tolist()}), fragment.step_count]
        for begin, stop in itertools.pairwise(cuts):
            if begins[begin]:
                stream.episode = self._new_episode(arrival, begin, floor)
                stream.ordinal = 0
            if arrival.lowest == NONE:
                arrival.lowest = stream.episode
            arrival.episodes[begin:stop] = stream.episode
            arrival.ordinals[begin:stop] = np.arange(stream.ordinal, stream.ordinal + stop - begin)
            stream.ordinal += stop - begin
            if ended[stop - 1]:
                # An episode is not whole if the observation after its last step is unknown.
                if stream.episode != NONE and usable[stop - 1]:
                    arrival.ended.append((stream.episode, stream.ordinal))
                stream.episode, stream.ordinal = NONE, 0

    def _new_episode(self, arrival: Arrival, offset: int, floor: int) -> int:
        """Number an episode; *floor*: lowest number that begins in its fragment."""
        episodes = self.episodes
        with self._lock:
            if episodes.is_at_size:
                lowest = self.fragments.kept("episode")
                open_ = [each.episode for each in self._streams.values()]
                needed = [*open_, *lowest.tolist()]
                episodes.drop_before(min([floor, *(each for each in needed if each != NONE)]))
                if 4 * len(episodes) > 3 * episodes.size:
                    episodes.grow(self._memory)  # Else a few would be dropped again and again.
                self._notify()
            return episodes.append(
                self._memory,
                fragment=arrival.number,
                offset=offset,
                start=arrival.start + offset,
                count=0,
            )

    def add(
        self,
        arrival: Arrival,
        *,
        count: int,
        handle: int,
        state: list[NDArray[Any]] | None,
        unusable: list[int],
    ) -> None:
        """Show a fragment that is written; its state as `States.checked` returned it."""
        number = arrival.number
        if len(self.whole) + len(arrival.ended) > self.whole.size:
            self._drop_whole()
        self.fragments.append(
            self._memory,
            start=arrival.start,
            count=count,
            handle=handle,
            next=NONE,
            episode=arrival.lowest,
        )
        if self.states is not None:
            self.states.append(self._memory, state)
            self.state_count += state is not None
        if arrival.before != NONE:
            self.fragments.set("next", arrival.before, number)
        self._owners[number] = arrival.owner
        self._streams[arrival.owner] = arrival.stream
        self.high = arrival.start + count
        self._unusable.extend(step + arrival.start for step in unusable)
        self.unusable_count += len(unusable)
        for episode, length in arrival.ended:
            self.episodes.set("count", episode, length)
            self.whole.append(self._memory, episode=episode)

    def _drop_whole(self) -> None:
        are_held = self._are_held_whole(self.whole.kept("episode"))
        oldest = int(are_held.argmax()) if are_held.any() else len(are_held)
        self.whole.drop_before(self.whole.first + oldest)
        if 4 * len(self.whole) > 3 * self.whole.size:
            self.whole.grow(self._memory)
        self._notify()

    def retire_before(self, low: int) -> None:
        """Hide the steps that are older than *low*."""
        if low <= self.low:
            return
        self.low = low
        while self._unusable and self._unusable[0] < low:
            self._unusable.popleft()
            self.unusable_count -= 1
        while self.fragment_low < self.fragments.end and self.end_of(self.fragment_low) <= low:
            if self.states is not None:
                self.state_count -= int(self.states.has(np.array([self.fragment_low]))[0])
            self.fragment_low += 1

    def drop_before(self, floor: int) -> None:
        """Drop the steps that are older than *floor*: their memory is reused."""
        self.retire_before(floor)
        self.floor = floor
        fragments = self.fragments
        while len(fragments):
            oldest = fragments.first
            if self.end_of(oldest) > floor:
                break
            owner = self._owners.pop(oldest)
            if self._streams[owner].fragment == oldest:
                del self._streams[owner]
            fragments.drop_before(oldest + 1)
        if self.states is not None:
            self.states.drop_before(fragments.first)
