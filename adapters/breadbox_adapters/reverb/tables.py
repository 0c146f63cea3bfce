"""Tables: Reverb's word for a buffer, described in its terms and created in Breadbox's."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from breadbox.client import Client
from breadbox.model.presets import UNLIMITED
from breadbox.model.types import (
    BufferConfig,
    BufferDescription,
    BufferState,
    FullPolicy,
    MinimumChunks,
    ModelState,
    SampleToInsertRatio,
    SchemaPolicy,
)
from breadbox_adapters.reverb import rate_limiters, selectors
from breadbox_adapters.reverb.items import Signature
from breadbox_adapters.reverb.rate_limiters import RateLimiter
from breadbox_adapters.reverb.selectors import Selector
from breadbox_adapters.reverb.sending import current_state

_FAR = 2.0**40
"""Samples to be ahead or behind that stand for an infinite bound."""


@dataclass(frozen=True, slots=True)
class CallStats:
    """Calls completed since the table was made."""

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
    """A table's state, without Reverb's counts of episodes and workers."""

    name: str
    sampler_options: Selector
    remover_options: Selector
    max_size: int
    max_times_sampled: int
    rate_limiter_info: RateLimiterInfo
    signature: Any
    """Leaves with `dtype` and `shape`, in the table's structure."""
    current_size: int
    inserted_count: int
    """Items inserted since the last reset, except for those that left without a sample."""
    sampled_count: int
    """Samples since the last reset."""

    def can_sample(self, num_samples: int) -> bool:
        """Return True if the rate limiter would have let so many samples through."""
        limits = self.rate_limiter_info
        return (
            self.current_size >= limits.min_size_to_sample
            and self._ahead() - num_samples >= limits.min_diff
        )

    def can_insert(self, num_inserts: int) -> bool:
        """Return True if the rate limiter would have let so many inserts through."""
        limits = self.rate_limiter_info
        return (
            self.current_size + num_inserts <= limits.min_size_to_sample
            or self._ahead() + num_inserts * limits.samples_per_insert <= limits.max_diff
        )

    def _ahead(self) -> float:
        ratio = self.rate_limiter_info.samples_per_insert
        return self.inserted_count * ratio - self.sampled_count


def info_of_table(description: BufferDescription, signature: Any = None) -> TableInfo:
    """Describe a buffer as a table, with a signature that was read before."""
    config, state = description.config, description.state
    exponent = 1.0 if config.priority_exponent is None else config.priority_exponent
    is_queue = config.full_policy is FullPolicy.BLOCK and config.uses_max == 1
    inserted = CallStats(state.counters.get("chunks_closed", 0))
    sampled = CallStats(state.counters.get("uses", 0))
    size = config.capacity_chunks or 0
    match config.limiter:
        case SampleToInsertRatio(ratio, error, minimum, lead):
            low, high = (
                math.copysign(math.inf, each) if abs(each) >= _FAR / 2 else each
                for each in (lead - error, lead + error)
            )
            limits = (ratio, low, high, minimum)
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
        signature=signature,
        current_size=state.chunk_count,
        inserted_count=state.inserted_chunk_count,
        sampled_count=state.delivered_chunk_count,
    )


@dataclass(frozen=True, slots=True)
class Table:
    """A table to create: a buffer with items as its chunks.

    Attributes:
        name: The buffer's name.
        sampler: Which item is drawn.
        remover: Which item leaves when there are more than `max_size`; it may be the new one.
        max_size: Items held at most, at least 1.
        rate_limiter: Which calls wait.
        max_times_sampled: Draws after which an item leaves; below 1 it stays.
        extensions: None, because there are no extensions.
        signature: Structure of leaves with `shape` and `dtype`. Writers check items against it:
            `trajectory_writer` as a whole, `insert` and `writer` in each step. Lengths that are
            None may be any. Without a signature, items may differ in their arrays.
    """

    name: str
    sampler: Selector
    remover: Selector
    max_size: int
    rate_limiter: RateLimiter
    max_times_sampled: int = 0
    extensions: Sequence[Any] = ()
    signature: Any = field(default=None, repr=False)
    _clients: list[Client] = field(default_factory=list, init=False, repr=False, compare=False)
    """The client of the server that has the table, if one has."""

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
        """Return a table that gives each item once, in order; inserts wait while it is full."""
        fifo, limiter = selectors.Fifo(), rate_limiters.Queue(max_size)
        return cls(name, fifo, fifo, max_size, limiter, 1, extensions, signature)

    @classmethod
    def stack(cls, name: str, max_size: int, extensions: Any = (), signature: Any = None) -> Self:
        """Return a table that gives each item once, newest first; inserts wait while it is full."""
        lifo, limiter = selectors.Lifo(), rate_limiters.Stack(max_size)
        return cls(name, lifo, lifo, max_size, limiter, 1, extensions, signature)

    def config(self) -> BufferConfig:
        """Return the limits of the buffer that is this table."""
        is_queue = isinstance(self.rate_limiter, rate_limiters.Queue)
        drawn_by = self.sampler if self.sampler.is_prioritised else self.remover
        return BufferConfig(
            fragments_per_chunk=1,
            capacity_chunks=self.max_size,
            staleness_max=UNLIMITED,
            uses_max=self.max_times_sampled if self.max_times_sampled >= 1 else UNLIMITED,
            full_policy=FullPolicy.BLOCK if is_queue else FullPolicy.EVICT,
            sampler=self.sampler.name,
            remover=self.remover.name,
            with_replacement=self.max_times_sampled != 1,
            priority_exponent=drawn_by.priority_exponent,
            limiter=_limiter(self.rate_limiter),
            # Writers check, because a signature may leave lengths open, and may be that of steps.
            schema=SchemaPolicy.ANY,
        )

    def replace(self, **changes: Any) -> Self:
        """Return a table with some arguments changed, which is on no server."""
        return replace(self, **changes)

    def belong_to(self, client: Client) -> None:
        """Read `info` from this client's server from now on."""
        self._clients[:] = [client]

    @property
    def info(self) -> TableInfo:
        """The table's state on the server that has it; empty without one."""
        described = (
            self._clients[0].get_buffer(self.name)
            if self._clients
            else BufferDescription(self.name, self.config(), "", None, BufferState())
        )
        return info_of_table(described, self.signature)

    def can_sample(self, num_samples: int) -> bool:
        """Return True if the rate limiter would let so many samples through now; takes none."""
        return self.info.can_sample(num_samples)

    def can_insert(self, num_inserts: int) -> bool:
        """Return True if the rate limiter would let so many inserts through now; makes none."""
        return self.info.can_insert(num_inserts)


def publish_signature(client: Client, table: str, state: ModelState, signature: Signature) -> None:
    """Publish a signature in a table's session, unless the session has one."""
    if state.weights is None:
        version = state.model_version or 0
        client.publish(state.session_id, version, signature.packed(), buffer=table)


def create_tables(client: Client, tables: Sequence[Table]) -> None:
    """Create tables on a running server; those that exist with the same limits stay as they are.

    Raises:
        ValueError: There is none, or two have one name; nothing was created.
        BufferExistsError: A buffer of the name has other limits; those before it were created.
    """
    if not tables:
        raise ValueError("at least one table must be given")
    names = [table.name for table in tables]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"several tables are named {min(twice)!r}")
    for table in tables:
        client.create_buffer(table.name, table.config())
        state = current_state(client, table.name)
        if table.signature is not None:
            publish_signature(client, table.name, state, Signature.of(table.signature))
        table.belong_to(client)


def _limiter(limiter: RateLimiter) -> MinimumChunks | SampleToInsertRatio:
    if isinstance(limiter, rate_limiters.Queue) or not limiter.is_ratio:
        return MinimumChunks(limiter.min_size_to_sample)
    low, high = (min(max(each, -_FAR), _FAR) for each in (limiter.min_diff, limiter.max_diff))
    return SampleToInsertRatio(
        limiter.samples_per_insert,
        (high - low) / 2,
        limiter.min_size_to_sample,
        lead_chunks=(low + high) / 2,
    )
