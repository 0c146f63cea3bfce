"""Tables: what Reverb calls a buffer, described in its words and made in ours."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from breadbox.client import Client
from breadbox.compat.reverb import rate_limiters, selectors
from breadbox.compat.reverb.rate_limiters import RateLimiter
from breadbox.compat.reverb.selectors import Selector
from breadbox.compat.reverb.sending import current_state
from breadbox.compat.reverb.structures import flatten
from breadbox.presets import UNLIMITED
from breadbox.types import (
    BufferConfig,
    BufferDescription,
    FullPolicy,
    MinimumChunks,
    SampleToInsertRatio,
    SchemaPolicy,
)


@dataclass(frozen=True, slots=True)
class Table:
    """A table to make: a buffer whose chunks are items.

    Attributes:
        name: Of the buffer.
        sampler: Which item is drawn.
        remover: Which item goes when there are more than `max_size`; it may be the new one.
        max_size: Items held at most, at least 1.
        rate_limiter: Who waits.
        max_times_sampled: Draws after which an item goes; below 1: it stays.
        extensions: None: there are no extensions.
        signature: Structure of what has `shape` and `dtype`. Where one is given and no length in it
            is open, the server refuses items of other arrays than the first had; without, each item
            may have others.

    Raises:
        ValueError: A value is out of its range.
    """

    name: str
    sampler: Selector
    remover: Selector
    max_size: int
    rate_limiter: RateLimiter
    max_times_sampled: int = 0
    extensions: Sequence[Any] = ()
    signature: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a table's name must not be empty")
        if self.max_size < 1:
            raise ValueError(f"max_size must be a positive integer, got {self.max_size}")
        exponents = {
            each.priority_exponent for each in (self.sampler, self.remover) if each.is_prioritised
        }
        if len(exponents) > 1:
            raise ValueError("sampler and remover must have the same priority_exponent")
        if self.extensions:
            raise ValueError("there are no extensions of tables here; write to both tables instead")

    @classmethod
    def queue(cls, name: str, max_size: int, extensions: Any = (), signature: Any = None) -> Self:
        """A table that gives each item once, in order; inserts wait while it is full."""
        fifo, limiter = selectors.Fifo(), rate_limiters.Queue(max_size)
        return cls(name, fifo, fifo, max_size, limiter, 1, extensions, signature)

    @classmethod
    def stack(cls, name: str, max_size: int, extensions: Any = (), signature: Any = None) -> Self:
        """A table that gives each item once, the newest first; inserts wait while it is full."""
        lifo, limiter = selectors.Lifo(), rate_limiters.Stack(max_size)
        return cls(name, lifo, lifo, max_size, limiter, 1, extensions, signature)

    def config(self) -> BufferConfig:
        """Limits of the buffer that is this table."""
        is_queue = isinstance(self.rate_limiter, rate_limiters.Queue)
        return BufferConfig(
            fragments_per_chunk=1,
            capacity_chunks=self.max_size,
            staleness_max=UNLIMITED,
            uses_max=self.max_times_sampled if self.max_times_sampled >= 1 else UNLIMITED,
            full_policy=FullPolicy.BLOCK if is_queue else FullPolicy.EVICT,
            sampler=self.sampler.name,
            remover=self.remover.name,
            with_replacement=self.max_times_sampled != 1,
            priority_exponent=self._exponent(),
            limiter=_limiter(self.rate_limiter),
            schema=SchemaPolicy.ONE if self._is_of_one_schema() else SchemaPolicy.ANY,
        )

    def _exponent(self) -> float:
        return (self.sampler if self.sampler.is_prioritised else self.remover).priority_exponent

    def _is_of_one_schema(self) -> bool:
        if self.signature is None:
            return False
        shapes = [getattr(leaf, "shape", ()) for leaf in flatten(self.signature)]
        return all(length is not None for shape in shapes for length in shape)


def create_tables(client: Client, tables: Sequence[Table]) -> None:
    """Make tables on a running server; those that exist with the same limits stay as they are.

    Args:
        client: Connected to it, as an administrator where there are roles.
        tables: At least one, each with a name of its own.

    Raises:
        ValueError: There is none, or two have one name; nothing was made.
        BufferExistsError: A buffer of the name has other limits; those before it were made.
    """
    if not tables:
        raise ValueError("at least one table must be given")
    names = [table.name for table in tables]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"several tables are named {min(twice)!r}")
    for table in tables:
        client.create_buffer(table.name, table.config())
        current_state(client, table.name)


def _limiter(limiter: RateLimiter) -> MinimumChunks | SampleToInsertRatio:
    """A buffer's limiter: see the package for where it is not Reverb's to the letter."""
    if isinstance(limiter, rate_limiters.Queue) or not limiter.is_ratio:
        return MinimumChunks(limiter.min_size_to_sample)
    bounds = [abs(each) for each in (limiter.min_diff, limiter.max_diff) if math.isfinite(each)]
    return SampleToInsertRatio(limiter.samples_per_insert, max(bounds), limiter.min_size_to_sample)


@dataclass(frozen=True, slots=True)
class CallStats:
    """How often something was done since the table's session began."""

    completed: int


@dataclass(frozen=True, slots=True)
class RateLimiterInfo:
    """A table's limiter, and what passed it."""

    samples_per_insert: float
    min_diff: float
    max_diff: float
    min_size_to_sample: int
    insert_stats: CallStats
    sample_stats: CallStats


@dataclass(frozen=True, slots=True)
class TableInfo:
    """A table as it was when asked.

    `num_episodes` and `num_deleted_episodes` of Reverb are not there: a server of Breadbox knows
    nothing of episodes; nor are `num_unique_samples` and `table_worker_time`.
    """

    name: str
    sampler_options: Selector
    remover_options: Selector
    max_size: int
    max_times_sampled: int
    rate_limiter_info: RateLimiterInfo
    signature: Any
    """Arrays of an item by path; None while there was no item."""
    current_size: int


def info_of_table(description: BufferDescription) -> TableInfo:
    """A buffer as a table."""
    config, state = description.config, description.state
    exponent = 1.0 if config.priority_exponent is None else config.priority_exponent
    is_queue = config.full_policy is FullPolicy.BLOCK and config.uses_max == 1
    inserted = CallStats(state.counters.get("chunks_closed", 0))
    sampled = CallStats(state.counters.get("uses", 0))
    size = config.capacity_chunks or 0
    match config.limiter:
        case SampleToInsertRatio(ratio, error, minimum):
            limits = (ratio, -error, error, minimum)
        case MinimumChunks(minimum) if not is_queue:
            limits = (1.0, -math.inf, math.inf, minimum)
        case _:
            limits = (1.0, 0.0, float(size), 1)
    uses = config.uses_max or 0
    return TableInfo(
        name=description.name,
        sampler_options=Selector(config.sampler or "uniform", exponent),
        remover_options=Selector(config.remover or "oldest_first", exponent),
        max_size=size,
        max_times_sampled=0 if uses >= UNLIMITED else uses,
        rate_limiter_info=RateLimiterInfo(*limits, insert_stats=inserted, sample_stats=sampled),
        signature=description.schema,
        current_size=state.chunk_count,
    )
