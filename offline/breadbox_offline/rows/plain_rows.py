"""Old-stack SampleBatch rows without surprises, a block of them at a time.

Most rows are plain: every column is an array with one entry per step, of a dtype that needs no
conversion. Those are checked and joined here by whole columns. Anything else ends the attempt, and
the block is read row by row (`sample_batches`), which knows every form that recorders write, and
says what is wrong and where.

Keeps:
  P1  A block that is read here gives the same episodes as one that is read row by row.
  P2  Observations, and samples that came one by one, are copied once; all else are views of the
      arrays that came in. A block's copies are about `_BLOCK_BYTES` at most, unless a single row
      has more, so that an episode that is kept keeps little else.
"""

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from breadbox_offline.decoding import packing
from breadbox_offline.episodes.episode import Episode, Info
from breadbox_offline.errors import OfflineDataError
from breadbox_offline.rows import columns as read
from breadbox_offline.rows.assembly import step_times
from breadbox_offline.rows.columns import Columns
from breadbox_offline.rows.row_layout import RowLayout

_BLOCK_BYTES = 1 << 22
_BLOCK_ROWS_MAX = 256

_dtype_of = attrgetter("dtype")
_ndim_of = attrgetter("ndim")


class _NotPlainError(Exception):
    """The block has to be read row by row."""


def blocks(columns: Columns, layout: RowLayout, count: int) -> Iterator[tuple[int, int]]:
    """Runs of rows, first and behind the last, whose observations are a few megabytes together."""
    if not count:
        return
    held = columns[layout.obs]
    first = None if isinstance(held, dict | tuple) else held[0]
    row_bytes = len(first) if isinstance(first, str | bytes) else getattr(first, "nbytes", 0)
    if isinstance(first, np.ndarray) and first.dtype == object and len(first):
        row_bytes = len(first) * getattr(first[0], "nbytes", 0)
    size = max(1, min(_BLOCK_ROWS_MAX, _BLOCK_BYTES // max(1, row_bytes)))
    for low in range(0, count, size):
        yield low, min(low + size, count)


def read_plain_rows(
    columns: Columns, layout: RowLayout, low: int, high: int
) -> list[Episode] | None:
    """The episodes of rows `low` to `high`, in order; None when some row is not plain."""
    if any(read.space_spec(name, layout.options) for name in layout.sample_columns().values()):
        return None
    try:
        return _Block.of(columns, layout, low, high).episodes()
    except (_NotPlainError, OfflineDataError):
        return None


@dataclass(slots=True)
class _Block:
    """Some rows, checked; lists have one entry per row."""

    layout: RowLayout
    columns: Columns
    low: int
    high: int
    rewards: list[NDArray[Any]]
    lengths: list[int]
    """Steps of each row, 1 or more."""

    @classmethod
    def of(cls, columns: Columns, layout: RowLayout, low: int, high: int) -> "_Block":
        rewards = _arrays(columns[layout.rewards], low, high)
        _demand_kind(rewards, "biuf")
        lengths = list(map(len, rewards))
        _demand(min(lengths) > 0)
        return cls(layout, columns, low, high, rewards, lengths)

    def episodes(self) -> list[Episode]:
        """Every episode of the block, rows that hold several split."""
        layout = self.layout
        spans, all_ids = self._split()
        observations = self._observations(spans)
        actions = self._samples(layout.actions)
        extras = {name: self._samples(name) for name in layout.extras}
        terminated, truncated = self._flags(layout.terminated), self._flags(layout.truncated)
        says_nothing = terminated is None and truncated is None
        timesteps, infos = self._timesteps(), self._infos()
        has_times = layout.options.multi_agent
        found: list[Episode] = []
        place = 0
        for (row, start, stop), (episode_id, agent_id, module_id) in zip(
            spans, all_ids, strict=True
        ):
            is_terminated = says_nothing or (
                terminated is not None and bool(terminated[row][stop - 1])
            )
            is_truncated = truncated is not None and bool(truncated[row][stop - 1])
            goes_on = stop != self.lengths[row]
            count = stop - start
            own_actions, own_rewards = actions[row], self.rewards[row]
            own_extras = {name: held[row] for name, held in extras.items()}
            if start or goes_on:
                own_actions, own_rewards = own_actions[start:stop], own_rewards[start:stop]
                own_extras = {name: held[start:stop] for name, held in own_extras.items()}
            found.append(
                Episode(
                    id=uuid.uuid4().hex if episode_id is None else episode_id,
                    agent_id=agent_id,
                    module_id=module_id or layout.options.module_id_of(agent_id),
                    observations=observations[place : place + count + 1],
                    actions=own_actions,
                    rewards=own_rewards,
                    terminated=is_terminated,
                    # A row goes on with another episode: if nothing ended this one, it was cut off.
                    truncated=is_truncated or (goes_on and not is_terminated),
                    t_started=start if timesteps is None else int(timesteps[row][start]),
                    step_times=step_times(timesteps[row], start, stop)
                    if has_times and timesteps is not None
                    else None,
                    infos=None if infos is None else infos[row][start : stop + 1],
                    extra_model_outputs=own_extras,
                )
            )
            place += count + 1
        return found

    def _split(
        self,
    ) -> tuple[list[tuple[int, int, int]], Iterator[tuple[str | None, str | None, str | None]]]:
        """Row, first step and the one behind the last of every episode, and their ids."""
        layout = self.layout
        row_stops = np.cumsum(self.lengths)
        row_starts = row_stops - self.lengths
        ids = [self._ids(name) for name in (layout.eps_id, layout.agent_id, layout.module_id)]
        changes = [_changes(held) for held in ids[:2] if held is not None]
        starts, rows = row_starts, np.arange(len(row_starts))
        if any(map(len, changes)):
            starts = np.unique(np.concatenate([row_starts, *changes]))
            rows = np.searchsorted(row_stops, starts, side="right")
        stops = np.append(starts[1:], row_stops[-1])
        firsts = row_starts[rows]
        spans = list(
            zip(rows.tolist(), (starts - firsts).tolist(), (stops - firsts).tolist(), strict=True)
        )
        texts: list[Sequence[str | None]] = [
            [None] * len(spans) if held is None else list(map(str, held[starts].tolist()))
            for held in ids
        ]
        return spans, zip(*texts, strict=True)

    def _ids(self, name: str | None) -> NDArray[Any] | None:
        """The ids of all steps, one after the other."""
        if name is None:
            return None
        held = self.columns[name]
        if isinstance(held, np.ndarray) and held.ndim == 1 and held.dtype.kind in "Uiu":
            return held[self.low : self.high].repeat(self.lengths)
        rows = self._step_arrays(name)
        _demand_kind(rows, "Uiu")
        _demand(len({dtype.kind for dtype in set(map(_dtype_of, rows))}) == 1)
        return np.concatenate(rows)

    def _observations(self, spans: list[tuple[int, int, int]]) -> NDArray[Any]:
        """The observations of every episode and the one it led to, one after the other."""
        obs = self._step_arrays(self.layout.obs)
        final = obs if self.layout.new_obs is None else self._step_arrays(self.layout.new_obs)
        pieces: list[Any] = []
        if _holds_samples(obs):
            samples = [_samples_of(row) for row in obs]
            for row, start, stop in spans:
                pieces += (
                    samples[row] if stop - start == self.lengths[row] else samples[row][start:stop]
                )
                pieces.append(final[row][stop - 1])
            return _join_samples(pieces)
        for row, start, stop in spans:
            pieces += (obs[row][start:stop], final[row][stop - 1 : stop])
        return _join(pieces, obs[0].dtype)

    def _samples(self, name: str) -> Sequence[NDArray[Any]]:
        """One array per row."""
        rows = self._step_arrays(name)
        if not _holds_samples(rows):
            return rows
        joined = _join_samples([sample for row in rows for sample in _samples_of(row)])
        stops = np.cumsum(self.lengths).tolist()
        return [joined[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]

    def _flags(self, name: str | None) -> list[NDArray[Any]] | None:
        if name is None:
            return None
        rows = self._step_arrays(name)
        _demand_kind(rows, "b")
        return rows

    def _timesteps(self) -> list[NDArray[Any]] | None:
        if self.layout.t is None:
            return None
        rows = self._step_arrays(self.layout.t)
        _demand_kind(rows, "i")
        return rows

    def _infos(self) -> list[list[Info]] | None:
        name = self.layout.infos
        if name is None:
            return None
        rows = [read.row_of(self.columns[name], row) for row in range(self.low, self.high)]
        return [
            fill_infos(infos, count, name) for infos, count in zip(rows, self.lengths, strict=True)
        ]

    def _step_arrays(self, name: str) -> list[NDArray[Any]]:
        """One array per row, with an entry per step."""
        rows = _arrays(
            self.columns[name],
            self.low,
            self.high,
            unpacks=self.layout.packed.get(name, False),
            layout=self.layout,
        )
        _demand(0 not in set(map(_ndim_of, rows)) and list(map(len, rows)) == self.lengths)
        return rows


def fill_infos(infos: Any, count: int, name: str) -> list[Info]:
    """Return T + 1 infos of T steps, from T + 1 or from those after the steps."""
    filled = read.infos_of(infos, name)
    if len(filled) not in (count, count + 1):
        raise OfflineDataError(
            f"has {len(filled)} infos for {count} steps; wanted {count} or {count + 1}", column=name
        )
    return filled if len(filled) == count + 1 else [{}, *filled]


def _demand(is_plain: bool) -> None:
    if not is_plain:
        raise _NotPlainError


def _demand_kind(rows: list[NDArray[Any]], kinds: str) -> None:
    """Refuse rows that are not one entry per step of a dtype of these kinds."""
    _demand(set(map(_ndim_of, rows)) == {1})
    _demand(all(dtype.kind in kinds for dtype in set(map(_dtype_of, rows))))


def _arrays(
    column: Any, low: int, high: int, *, unpacks: bool = False, layout: RowLayout | None = None
) -> list[NDArray[Any]]:
    _demand(isinstance(column, np.ndarray | list))
    held = column[low:high]
    is_list_of_rows = isinstance(held, np.ndarray) and held.dtype == object and held.ndim == 1
    rows = held.tolist() if is_list_of_rows else list(held)
    if unpacks and layout is not None:
        _demand(set(map(type, rows)) <= {str, bytes})
        rows = [packing.unpack(row, limits=layout.options.limits) for row in rows]
    _demand(set(map(type, rows)) == {np.ndarray})
    return rows


def _changes(ids: NDArray[Any]) -> NDArray[np.int64]:
    """Steps whose id is not that of the step before."""
    if ids.dtype.kind == "U" and ids.dtype.itemsize:
        # Text is compared as numbers: one instruction does many.
        words = ids.view(np.uint32).reshape(len(ids), -1)
        different = np.flatnonzero(words[1:] != words[:-1]) // words.shape[1]
    else:
        different = np.flatnonzero(ids[1:] != ids[:-1])
    return different + 1


def _holds_samples(rows: list[NDArray[Any]]) -> bool:
    """Whether rows are arrays of samples, one object per step; all rows, or none."""
    kinds = {dtype.kind for dtype in set(map(_dtype_of, rows))}
    _demand("O" not in kinds or (kinds == {"O"} and set(map(_ndim_of, rows)) == {1}))
    return "O" in kinds


def _samples_of(row: NDArray[Any]) -> list[Any]:
    samples: list[Any] = row.tolist()
    # A first sample that is a tuple would be a container; joining takes any other for an array.
    _demand(type(samples[0]) is np.ndarray)
    return samples


def _join_samples(samples: list[Any]) -> NDArray[Any]:
    """Arrays of one dtype and shape as one array with another axis in front."""
    first = samples[0]
    _demand(first.ndim > 0 and first.dtype != object and first.dtype.isnative)
    joined = _join_vectors(samples)
    if joined is None:
        joined = _join(samples, first.dtype)
        # Joining compares all axes but the first.
        _demand(list(map(len, samples)).count(len(first)) == len(samples))
    return joined.reshape(len(samples), *first.shape)


def _join_vectors(samples: list[Any]) -> NDArray[Any] | None:
    """Vectors by their bytes, with less time for each than numpy needs; None for anything else."""
    first, count = samples[0], len(samples)
    try:
        are_alike = (
            first.ndim == 1
            and list(map(_ndim_of, samples)).count(1) == count
            and list(map(len, samples)).count(len(first)) == count
            and list(map(_dtype_of, samples)).count(first.dtype) == count
        )
        # Of bytes that own themselves, so that episodes may be written to.
        return np.frombuffer(bytearray().join(samples), first.dtype) if are_alike else None
    except (AttributeError, TypeError, ValueError, BufferError):  # no array, or with strides
        return None


def _join(pieces: list[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    _demand(dtype.isnative)  # joined row by row it would be converted
    try:
        joined: NDArray[Any] = np.concatenate(pieces, dtype=dtype, casting="equiv")
    except (TypeError, ValueError) as error:  # other dtypes or shapes
        raise _NotPlainError from error
    return joined
