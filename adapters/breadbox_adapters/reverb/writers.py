"""Writers: add steps to a history, and make items of it."""

import math
import operator
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Self
from uuid import uuid4

import numpy as np
from numpy.typing import DTypeLike, NDArray

from breadbox.model.errors import DeadlineExceededError, ReplayBufferError
from breadbox.model.trees import plain_array
from breadbox.writing.appender import Appender, AppenderOptions
from breadbox_adapters.reverb.items import (
    Path,
    check_priority,
    flatten,
    flatten_with_path,
    fragment_of,
    map_leaves,
    map_with_path,
    row_of,
    union,
)
from breadbox_adapters.reverb.sending import ItemSender


class Cell:
    """The value of one column in one step."""

    __slots__ = ("array", "is_expired")

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array
        self.is_expired = False


class TrajectoryColumn:
    """Some cells of one column: a leaf of a trajectory for `create_item`."""

    def __init__(self, cells: Sequence[Cell | None], path: Path, *, is_squeezed: bool = False):
        missing = [place for place, cell in enumerate(cells) if cell is None]
        if missing:
            raise ValueError(
                f"a trajectory cannot contain None: of the {len(cells)} cells of {shown(path)} "
                f"number {missing[0]} was not given in its step, or is no longer kept"
            )
        self._cells: tuple[Cell, ...] = tuple(cell for cell in cells if cell is not None)
        self.path = path
        """Path in the appended data."""
        self.is_squeezed = is_squeezed
        """True for a single cell, without an axis of steps."""

    def __len__(self) -> int:
        return len(self._cells)

    def __iter__(self) -> Iterator[Cell]:
        return iter(self._cells)

    def __getitem__(self, key: "int | slice | list[int]") -> "TrajectoryColumn":
        return _column(self._cells.__getitem__, len(self), key, self.path)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of `numpy`."""
        of_cell = self._cells[0].array.shape if self._cells else ()
        return of_cell if self.is_squeezed else (len(self._cells), *of_cell)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The cells' dtype."""
        return self._cells[0].array.dtype

    def numpy(self) -> NDArray[Any]:
        """Stack the cells into one array, [steps, ...]; a squeezed one has no axis of steps.

        Raises:
            RuntimeError: A cell is no longer kept.
            ValueError: There are no cells, or their shapes or dtypes differ.
        """
        if any(cell.is_expired for cell in self._cells):
            raise RuntimeError(
                f"{shown(self.path)} refers to a step that has expired: "
                "raise num_keep_alive_refs to keep more"
            )
        if not self._cells:
            raise ValueError(f"{shown(self.path)} has no steps")
        if self.is_squeezed:
            return self._cells[0].array
        kinds = {(cell.array.dtype.str, cell.array.shape) for cell in self._cells}
        if len(kinds) > 1:
            named = ", ".join(f"{dtype}{list(shape)}" for dtype, shape in sorted(kinds))
            raise ValueError(f"cells of {shown(self.path)} differ in dtype or shape: {named}")
        return np.stack([cell.array for cell in self._cells])


class ColumnHistory:
    """One column of a writer's history, indexed as a list of all steps of the episode.

    `history[-1]` is the latest cell alone, `history[-3:]` and `history[[0, 2]]` are columns. A step
    is None, and cannot be taken, if it had no such field or is older than the steps that are kept.
    """

    def __init__(self, path: Path, keep_count: int, padding: int = 0) -> None:
        self.path = path
        self._keep_count = keep_count
        self._kept: deque[Cell | None] = deque([None] * min(padding, keep_count))
        self._gone_count = padding - len(self._kept)

    def keep(self, keep_count: int) -> None:
        """Keep this many steps from now on."""
        self._keep_count = keep_count
        self._expire()

    def add(self, cell: Cell | None) -> None:
        """Add a new step's cell; the oldest step that is too many expires."""
        self._kept.append(cell)
        self._expire()

    def complete(self, cell: Cell) -> None:
        """Set the missing cell of the latest step, which is still open."""
        self._kept[-1] = cell

    @property
    def is_latest_set(self) -> bool:
        """True if the latest step has a cell."""
        return bool(self._kept) and self._kept[-1] is not None

    def clear(self) -> None:
        """Begin an episode; cells that items refer to stay as they are."""
        for cell in self._kept:
            if cell is not None:
                cell.is_expired = True
        self._kept.clear()
        self._gone_count = 0

    def __len__(self) -> int:
        return self._gone_count + len(self._kept)

    def __iter__(self) -> Iterator[Cell | None]:
        return map(self._cell, range(len(self)))

    def __getitem__(self, key: "int | slice | list[int]") -> TrajectoryColumn:
        return _column(self._cell, len(self), key, self.path)

    def _cell(self, place: int) -> Cell | None:
        return self._kept[place - self._gone_count] if place >= self._gone_count else None

    def _expire(self) -> None:
        while len(self._kept) > self._keep_count:
            cell = self._kept.popleft()
            self._gone_count += 1
            if cell is not None:
                cell.is_expired = True


def _column(
    cell: Callable[[int], Cell | None], count: int, key: "int | slice | list[int]", path: Path
) -> TrajectoryColumn:
    """Return some of *count* cells; a slice from before the first step is refused, not cut short.

    Only these are looked at: an episode may have many times as many steps.
    """
    places = range(count)
    if isinstance(key, slice):
        cells = [cell(place) for place in places[key]]
        if key.start is not None and key.start < -count:
            return TrajectoryColumn([None] * (-key.start - count) + cells, path)
        return TrajectoryColumn(cells, path)
    if isinstance(key, list):
        return TrajectoryColumn([cell(places[operator.index(each)]) for each in key], path)
    try:
        place = operator.index(key)
    except TypeError:
        raise TypeError(
            f"a column is indexed by a number, a slice or a list of numbers, not {type(key)}"
        ) from None
    return TrajectoryColumn([cell(places[place])], path, is_squeezed=True)


def cell_of(value: Any, path: Path, like: tuple[DTypeLike, tuple[int, ...]] | None) -> Cell:
    """Return a copy of a step's value; refuse another dtype or shape than `like`."""
    array = np.array(plain_array(value, ".".join(map(str, path))))
    if array.dtype.hasobject:
        raise ValueError(f"{shown(path)} is no array: {type(value).__name__}")
    if like is None:
        return Cell(array)
    dtype, shape = like
    # Texts of a longer width are the same kind of data.
    if (array.dtype if array.dtype.kind not in "US" else array.dtype.kind) != dtype:
        raise ValueError(f"{shown(path)} has had dtype {dtype}, and now {array.dtype}")
    if array.shape != shape:
        raise ValueError(f"{shown(path)} has had shape {list(shape)}, and now {list(array.shape)}")
    return Cell(array)


def kind_of(cell: Cell) -> tuple[DTypeLike, tuple[int, ...]]:
    """Return the dtype and shape that the later cells of a column must have."""
    dtype = cell.array.dtype
    return (dtype.kind if dtype.kind in "US" else dtype), cell.array.shape


def shown(path: Path) -> str:
    """Return a column's name for messages."""
    return f"column {'/'.join(map(str, path))!r}" if path else "the column"


_SENDING = AppenderOptions(
    flush_after_s=0.0, batch_count=16, batch_bytes=8 * 2**20, on_failure="wait"
)
"""Small batches: a batch that finds no room is written again with each attempt."""


class TrajectoryWriter:
    """Append steps to a history, and make items of parts of it. Not thread-safe.

    ```python
    with client.trajectory_writer(num_keep_alive_refs=2) as writer:
        for observation, action in [(0.1, 0), (0.2, 1), (0.3, 0)]:
            writer.append({"observation": observation, "action": action})
            if writer.episode_steps >= 2:
                trajectory = {
                    "observation": writer.history["observation"][-2:],
                    "action": writer.history["action"][-1],
                }
                writer.create_item("queue", priority=1.0, trajectory=trajectory)
        writer.end_episode()
    ```

    Unlike Reverb's: an item has its own copy of its steps; an item whose table is reset before it
    was confirmed is inserted after the reset; `create_item` blocks at 4,096 unsent items or 256
    MiB of them; `close` sends them all.
    """

    def __init__(
        self,
        sender: ItemSender,
        num_keep_alive_refs: int,
        *,
        validates_items: bool = True,
        takes_steps: bool = False,
    ) -> None:
        if num_keep_alive_refs < 1:
            raise ValueError(
                f"num_keep_alive_refs must be a positive integer, got {num_keep_alive_refs}"
            )
        self._sender = sender
        self._keep_count = num_keep_alive_refs
        self._worker_id = f"reverb-{uuid4().hex}"
        self._structure: Any = None
        self._columns: dict[Path, ColumnHistory] = {}
        self._kinds: dict[Path, Any] = {}
        self._keep_counts: dict[Path, int] = {}
        self._episode_steps = 0
        self._is_step_open = False
        self.is_closed = False
        self._validates_items = validates_items
        self._takes_steps = takes_steps
        self._appenders: dict[str, Appender] = {}
        self._created_counts: dict[str, int] = {}

    @property
    def history(self) -> Any:
        """Columns of the episode so far, in the structure of the data."""
        if not self._columns:
            raise RuntimeError("history cannot be accessed before append was called")
        return map_with_path(lambda path, _: self._columns[path], self._structure)

    @property
    def episode_steps(self) -> int:
        """Number of steps since the episode began, without one that is still open."""
        return self._episode_steps

    def configure(
        self, path: Path, *, num_keep_alive_refs: int, max_chunk_length: int | None = None
    ) -> None:
        """Set how many steps of one column are kept; `max_chunk_length` has no effect."""
        if num_keep_alive_refs < 1:
            raise ValueError(
                f"num_keep_alive_refs ({num_keep_alive_refs}) must be a positive integer"
            )
        if max_chunk_length is not None and not 1 <= max_chunk_length <= num_keep_alive_refs:
            raise ValueError(
                f"max_chunk_length ({max_chunk_length}) must be None or a positive integer <= "
                f"num_keep_alive_refs ({num_keep_alive_refs})"
            )
        self._keep_counts[path] = num_keep_alive_refs
        if path in self._columns:
            self._columns[path].keep(num_keep_alive_refs)

    def append(self, data: Any, *, partial_step: bool = False) -> None:
        """Add a step, or with `partial_step` a part of one, to the history. Copies; sends nothing.

        Data may have fields that earlier steps lacked, and lack some that they had.

        Raises:
            ValueError: A field has another dtype, shape or structure than before, or was set in
                this step already; nothing was added.
            RuntimeError: The writer was closed.
        """
        self._check_open()
        leaves = dict(flatten_with_path(data))
        structure = union(self._structure, data)
        cells = {path: cell_of(leaf, path, self._kinds.get(path)) for path, leaf in leaves.items()}
        if self._is_step_open:
            for path in cells:
                if path in self._columns and self._columns[path].is_latest_set:
                    raise ValueError(
                        f"{shown(path)} has been set in this step by an earlier partial append, "
                        "and must be left out of the others"
                    )
        self._structure = map_leaves(lambda _: True, structure)
        self._add(cells)
        self._is_step_open = partial_step
        if not partial_step:
            self._episode_steps += 1

    def create_item(self, table: str, priority: float, trajectory: Any) -> None:
        """Make an item of columns of `history`, in any structure, and send it in the background.

        Raises:
            TypeError: A leaf is no column of a history.
            ValueError: There is no column, or an expired one; the priority is not from 0 to 1e30;
                or the table's signature differs.
            RuntimeError: The writer was closed.
            TableNotFoundError: There is no such table.
            ReverbError: An earlier item of the table failed; so does every later call.
        """
        self._check_open()
        columns = flatten(trajectory)
        for column in columns:
            if not isinstance(column, TrajectoryColumn):
                raise TypeError(
                    "all leaves of a trajectory must be TrajectoryColumn, made by indexing "
                    f"history, got {type(column).__name__}"
                )
            for cell in column:
                if cell.is_expired:
                    raise ValueError(
                        f"{shown(column.path)} refers to a step that has expired: "
                        "raise num_keep_alive_refs to keep more"
                    )
        if not columns:
            raise ValueError("a trajectory must have at least one column")
        item = map_leaves(TrajectoryColumn.numpy, trajectory)
        signature = self._sender.signature_of(table) if self._validates_items else None
        if signature is not None:
            signature.check(table, item, is_of_steps=self._takes_steps)
        index = self._created_counts.get(table, 0)
        fragment = fragment_of(
            item, check_priority(priority), worker_id=self._worker_id, index=index
        )
        if table not in self._appenders:
            self._appenders[table] = Appender(self._sender, _SENDING, buffer=table)
        self._appenders[table].append(fragment)
        self._created_counts[table] = index + 1

    def flush(self, block_until_num_items: int = 0, timeout_ms: int | None = None) -> None:
        """Wait until at most `block_until_num_items` items are unconfirmed, of all tables.

        Raises:
            DeadlineExceededError: It took `timeout_ms` milliseconds; sending continues.
            ReverbError: An item failed.
        """
        self._check_open()
        if block_until_num_items < 0:
            raise ValueError(f"block_until_num_items must be >= 0, got {block_until_num_items}")
        timeout_s = math.inf if timeout_ms is None or timeout_ms < 0 else timeout_ms / 1000
        ends_at = time.monotonic() + timeout_s
        appenders = list(self._appenders.values())
        # Twice: a later appender's bound is known only once the earlier ones have waited.
        for appender in appenders * 2:
            others = sum(each.counts.pending for each in appenders if each is not appender)
            left_s = max(0.0, ends_at - time.monotonic())
            try:
                appender.flush(
                    max_wait_s=None if left_s == math.inf else left_s,
                    pending_max=max(0, block_until_num_items - others),
                )
            except ReplayBufferError:
                raise
            except TimeoutError as error:
                raise DeadlineExceededError(
                    f"not all items were confirmed within {timeout_ms} ms: {error}"
                ) from error

    def end_episode(self, clear_buffers: bool = True, timeout_ms: int | None = None) -> None:
        """Begin an episode, and wait like `flush` until all items are confirmed.

        The episode begins even on a timeout. Without `clear_buffers` items may span two episodes.
        """
        self._check_open()
        self._episode_steps = 0
        self._is_step_open = False
        if clear_buffers:
            for column in self._columns.values():
                column.clear()
        self.flush(timeout_ms=timeout_ms)

    def close(self) -> None:
        """Send what is left, and end the threads that send. Idempotent; blocks like `flush`.

        Nothing can be appended afterwards. Leaving a `with` block sends too, but does not close.
        """
        self.is_closed = True
        self._end_sending()

    def _end_sending(self) -> None:
        while self._appenders:
            self._appenders.popitem()[1].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Send what is left, except after an error of the service, and on Ctrl-C."""
        if error is None or (
            isinstance(error, Exception) and not isinstance(error, ReplayBufferError)
        ):
            self._end_sending()
            return
        for appender in self._appenders.values():
            with suppress(ReplayBufferError, TimeoutError):
                appender.close(max_wait_s=0.0)

    def _check_open(self) -> None:
        if self.is_closed:
            raise RuntimeError("close() was called on this writer: make another one")

    def _add(self, cells: dict[Path, Cell]) -> None:
        step_count = len(next(iter(self._columns.values()))) if self._columns else 0
        if self._is_step_open:
            step_count -= 1
        else:
            for path, column in self._columns.items():
                column.add(cells.get(path))
        for path, cell in cells.items():
            if path not in self._columns:
                keep_count = self._keep_counts.get(path, self._keep_count)
                self._columns[path] = ColumnHistory(path, keep_count, step_count)
                self._columns[path].add(cell)
                self._kinds[path] = kind_of(cell)
            elif self._is_step_open:
                self._columns[path].complete(cell)


class Writer:
    """Reverb's older writer; its items are the latest steps, whole. Not thread-safe."""

    def __init__(
        self, sender: ItemSender, max_sequence_length: int, max_in_flight_items: int | None
    ) -> None:
        if max_sequence_length < 1:
            raise ValueError(f"max_sequence_length must be >= 1, got {max_sequence_length}")
        if max_in_flight_items is not None and max_in_flight_items < 1:
            raise ValueError(f"max_in_flight_items must be >= 1, got {max_in_flight_items}")
        self._writer = TrajectoryWriter(sender, max_sequence_length, takes_steps=True)
        self._max_in_flight_items = max_in_flight_items

    def append(self, data: Any) -> None:
        """Add a step; refuse a field of another dtype, shape or structure than before."""
        self._writer.append(data)

    def append_sequence(self, sequence: Any) -> None:
        """Add the steps along the first axis of all leaves, which must be of one length."""
        lengths = {len(leaf) for leaf in flatten(sequence)}
        if len(lengths) != 1:
            raise ValueError(f"all leaves of a sequence must be of one length, got {lengths}")
        for step in range(lengths.pop()):
            self.append(row_of(sequence, step))

    def create_item(self, table: str, num_timesteps: int, priority: float) -> None:
        """Make an item of the latest steps. Blocks while too many items are unconfirmed.

        Raises:
            ValueError: `num_timesteps` is below 1 or more than are kept, or the signature differs.
            ReverbError: An item failed.
        """
        if num_timesteps < 1:
            raise ValueError(f"num_timesteps must be a positive integer, got {num_timesteps}")
        latest = map_leaves(lambda column: column[-num_timesteps:], self._writer.history)
        self._writer.create_item(table, priority, latest)
        if self._max_in_flight_items is not None:
            self._writer.flush(self._max_in_flight_items)

    def flush(self) -> None:
        """Wait until all items are confirmed."""
        self._writer.flush()

    def close(self, retry_on_unavailable: bool = True) -> None:
        """Wait until all items are confirmed, and end; `ValueError` if it was closed before.

        `retry_on_unavailable` has no effect: calls wait `reconnect_s` for an unreachable server.
        """
        if self._writer.is_closed:
            raise ValueError("close() was called on this writer before")
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._writer.__exit__(kind, error, trace)
        self._writer.is_closed = True
