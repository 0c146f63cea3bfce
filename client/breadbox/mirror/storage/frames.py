"""Large observations, each stored once: a ring of frames, with stacks of frames taken apart."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from breadbox.model.errors import InvalidRequestError
from breadbox.model.fragment import Fragment


@dataclass(frozen=True, slots=True)
class End:
    """The end of an episode within a fragment."""

    row: int | None
    """Row of its true final observation, or None if that is unknown."""
    is_usable: bool
    """True if the step can be learned from: its next observation is known, or not needed."""


def ends_of(fragment: Fragment) -> dict[int, End]:
    """Return the ends of episodes in a fragment, by step."""
    rows: dict[int, int] = {}
    if fragment.final_obs is not None and fragment.final_obs_step is not None:
        rows = {int(step): row for row, step in enumerate(fragment.final_obs_step)}
    return {
        step: End(rows.get(step), step in rows or bool(fragment.terminated[step]))
        for step in fragment.ended.nonzero()[0].tolist()
    }


class Region(NamedTuple):
    """Frames of one fragment, side by side."""

    fragment: int
    start: int
    stop: int


class FrameLayout(NamedTuple):
    """Shape and type of the observations of a leaf."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    axis: int | None
    """Axis along which it is a stack of frames, the newest last, or None if it is one frame."""

    @property
    def depth(self) -> int:
        """Number of frames of one observation."""
        return 1 if self.axis is None else self.shape[self.axis]

    @property
    def frame_shape(self) -> tuple[int, ...]:
        """Shape of one frame."""
        if self.axis is None:
            return self.shape
        return self.shape[: self.axis] + self.shape[self.axis + 1 :]

    def frames(self, observations: NDArray[Any]) -> NDArray[Any]:
        """Return observations [T, ...] as frames [T, depth, ...], a view."""
        if self.axis is None:
            return observations[:, None]
        return np.moveaxis(observations, self.axis + 1, 1)

    def observations(self, frames: NDArray[Any]) -> NDArray[Any]:
        """Return frames [..., depth, *frame_shape] as observations [..., *shape], a view."""
        lead = frames.ndim - len(self.frame_shape) - 1
        if self.axis is None:
            return frames.reshape(*frames.shape[:lead], *self.frame_shape)
        return np.moveaxis(frames, lead, lead + self.axis)

    def continues(self, before: NDArray[Any], after: NDArray[Any]) -> NDArray[np.bool_]:
        """Return bool[T]: True for each stack that is the one before it, moved on by a frame."""
        # The flat stack then moves by as many elements as are behind the axis of frames. If that
        # axis is not the first, the elements at the seams are not compared.
        count = len(before)
        if self.axis is None or self.depth == 1 or count == 0:
            return np.ones(count, dtype=np.bool_)
        behind = int(np.prod(self.shape[self.axis + 1 :], dtype=np.int64))
        older = before.reshape(count, -1)[:, behind:]
        newer = after.reshape(count, -1)[:, :-behind]
        same = older == newer
        if self.axis > 0:
            block = behind * self.depth
            same = np.pad(same, ((0, 0), (0, behind)), constant_values=True)
            return np.asarray(
                same.reshape(count, -1, block)[:, :, : block - behind].all(axis=(1, 2))
            )
        return np.asarray(same.all(axis=1))


class Piece(NamedTuple):
    """Observations of a fragment that follow each other, and the one after the last of them."""

    start: int
    stop: int
    tail: NDArray[Any] | None
    """Observation after the last step, [...], or None if unknown; its own one then replaces it."""


class FrameRing:
    """Frames of one leaf of the observations, for at most *capacity_steps* steps.

    Fragments lie in order of arrival; ends of episodes and fragments take frames of their own.
    """

    def __init__(
        self,
        layout: FrameLayout,
        capacity_steps: int,
        make_array: Callable[[tuple[int, ...], np.dtype[Any]], NDArray[Any]],
    ) -> None:
        self.layout = layout
        self._size_max = capacity_steps * (layout.depth + 2) + layout.depth + 2
        self._top = 0
        """End of the frames in use; the next are at the front again."""
        self._head = 0
        self._regions: deque[Region] = deque()
        element_count = int(np.prod(layout.frame_shape, dtype=np.int64))
        self._frames = make_array((self._size_max, element_count), layout.dtype)
        self._offsets = np.arange(1 - layout.depth, 1)

    @property
    def size_bytes(self) -> int:
        """Number of bytes of frames that were written to."""
        return self._top * int(self._frames.shape[1] * self._frames.dtype.itemsize)

    def drop_before(self, fragment: int) -> None:
        """Drop the frames of fragments of lower numbers."""
        while self._regions and self._regions[0].fragment < fragment:
            self._regions.popleft()

    def drop_from(self, fragment: int) -> None:
        """Drop the frames of fragments from this number on, which readers never saw."""
        while self._regions and self._regions[-1].fragment >= fragment:
            self._head = self._regions.pop().start

    def place(self, frame_count: int, *, may_grow: bool) -> int | None:
        """Return a position for the frames, or None to drop older fragments; raise if too many."""
        if frame_count > self._size_max:
            raise InvalidRequestError("capacity_steps", "is less than a fragment needs")
        if not self._regions:
            self._head = 0
            self._top = max(self._top, frame_count)
            return 0
        oldest = self._regions[0].start
        if self._head <= oldest:
            return self._head if self._head + frame_count <= oldest else None
        if self._head + frame_count <= self._top:
            return self._head
        if may_grow and self._head + frame_count <= self._size_max:
            self._top = self._head + frame_count
            return self._head
        if frame_count <= oldest:
            self._head = 0
            return 0
        return None

    def take_place(self, fragment: int, start: int, frame_count: int) -> None:
        """Assign the place to a fragment."""
        self._regions.append(Region(fragment, start, start + frame_count))
        self._head = start + frame_count

    def read(self, positions: NDArray[np.int64]) -> NDArray[Any]:
        """Return copies of the observations with newest frames at positions of any shape."""
        depth = self.layout.depth
        if depth > 1:
            positions = positions[..., None] + self._offsets
        rows = np.take(self._frames, positions.reshape(-1), axis=0, mode="clip")
        lead = positions.shape if depth > 1 else (*positions.shape, 1)
        return self.layout.observations(rows.reshape(*lead, *self.layout.frame_shape))


class FramePlan:
    """Positions of the frames of one fragment, and which of them each step needs."""

    def __init__(
        self, layout: FrameLayout, observations: NDArray[Any], pieces: list[Piece]
    ) -> None:
        step_count, depth = len(observations), layout.depth
        self.at = np.empty(step_count, dtype=np.int64)
        """Position of the newest frame of each step's observation, from the fragment's first."""
        self.next_at = np.empty(step_count, dtype=np.int64)
        self._copies: list[tuple[int, NDArray[Any]]] = []
        frames = layout.frames(observations)
        count = 0
        follows = layout.continues(observations[:-1], observations[1:])
        for piece in pieces:
            breaks = np.flatnonzero(~follows[piece.start : piece.stop - 1]) + piece.start + 1
            starts = [piece.start, *breaks.tolist()]
            for start, stop in zip(starts, [*starts[1:], piece.stop], strict=True):
                self._copies.append((count, frames[start]))
                self._copies.append((count + depth, frames[start + 1 : stop, -1]))
                first = count + depth - 1
                self.at[start:stop] = np.arange(first, first + stop - start)
                self.next_at[start:stop] = self.at[start:stop] + 1
                count = first + stop - start
                if stop < piece.stop:  # The next observation continues no stack: it lies behind.
                    self.next_at[stop - 1] = count + depth - 1
            last = piece.stop - 1
            if piece.tail is None:
                self.next_at[last] = self.at[last]
                continue
            tail = piece.tail[None]
            if layout.continues(observations[last:][:1], tail)[0]:
                self._copies.append((count, layout.frames(tail)[0, -1:]))
                self.next_at[last] = count
                count += 1
            else:
                self._copies.append((count, layout.frames(tail)[0]))
                self.next_at[last] = count + depth - 1
                count += depth
        self.frame_count = count

    def write(self, ring: FrameRing, start: int) -> None:
        """Copy the frames to their place."""
        memory = ring._frames.reshape(-1, *ring.layout.frame_shape)  # noqa: SLF001 - its other half
        for offset, frames in self._copies:
            memory[start + offset : start + offset + len(frames)] = frames
