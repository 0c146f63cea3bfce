"""MineStudio's records of its replay buffer for Weights & Biases, from the server's counters."""

import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from breadbox.model import errors, types

_log = logging.getLogger(__name__)

Record = dict[str, Any]
Log = Callable[[Record], None]
POLL_S = 1.0
"""Seconds between two reads of the buffer's counters."""
_WANDB_LOGGER = "minestudio.online.utils.train.wandb_logger"
_EVICTED = "chunks_evicted_"
_USED_UP = "chunks_evicted_used_up"


def log_to_minestudio(record: Record) -> None:
    """Pass a record to MineStudio's own logger, if that is loaded."""
    logger = sys.modules.get(_WANDB_LOGGER)
    if logger is not None:
        logger.log(record)


def is_minestudio_logging() -> bool:
    """Return True if `log_to_minestudio` has a logger."""
    return _WANDB_LOGGER in sys.modules


class FetchRecords:
    """Make a record at each fetch, about the chunks that left the buffer since the last one.

    It has the mean uses of those chunks (0 for a chunk that this learner never fetched), and the
    mean staleness of those that this fetch used up.
    """

    def __init__(self) -> None:
        self._uses: dict[int, tuple[int, int]] = {}
        """Uses and version of the chunks that were fetched and may be fetched again."""
        self._evicted_count = 0

    def record(
        self, description: types.BufferDescription, references: Sequence[types.FragmentReference]
    ) -> Record:
        """Return the record of a fetch, given the buffer after it."""
        config, version = description.config, description.model_version or 0
        use_counts = self._uses_of_evicted(description)
        staleness = []
        for chunk_id, reference in {each.chunk_id: each for each in references}.items():
            if reference.use_count >= (config.uses_max or 1):
                self._uses.pop(chunk_id, None)
                use_counts.append(reference.use_count)
                staleness.append(reference.staleness_when_granted)
            else:
                oldest = version - reference.staleness_when_granted
                self._uses[chunk_id] = (reference.use_count, oldest)
        return _means(avg_reuse=use_counts, avg_staleness=staleness)

    def _uses_of_evicted(self, description: types.BufferDescription) -> list[int]:
        version_min = (description.model_version or 0) - (description.config.staleness_max or 0)
        stale = [chunk_id for chunk_id, (_, version) in self._uses.items() if version < version_min]
        use_counts = [self._uses.pop(chunk_id)[0] for chunk_id in stale]
        total_count = sum(
            count
            for name, count in description.state.counters.items()
            if name.startswith(_EVICTED) and name != _USED_UP
        )
        evicted_count = total_count - self._evicted_count
        self._evicted_count = total_count
        return use_counts + [0] * max(0, evicted_count - len(use_counts))


def _means(**values: Sequence[int]) -> Record:
    return {
        f"replay_buffer/{name}": sum(counts) / len(counts)
        for name, counts in values.items()
        if counts
    }


class Reporter:
    """Log a record, from a daemon thread, for each *fragments_per_report* fragments."""

    def __init__(
        self, describe: Callable[[], types.BufferDescription], fragments_per_report: int, log: Log
    ) -> None:
        self._describe = describe
        self._fragments_per_report = fragments_per_report
        self._log = log
        self._last: tuple[int, float] | None = None
        self.looks = 0
        """Number of reads of the buffer so far."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="breadbox-records", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, after a read in progress. Idempotent."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                record = self._record(self._describe())
            except errors.ReplayBufferError as error:
                # Appends and fetches report it, and wait.
                _log.debug("no records, because the buffer cannot be read: %s", error)
            else:
                if record is not None:
                    self._log(record)
            self.looks += 1
            if self._closed.wait(POLL_S):
                return

    def _record(self, description: types.BufferDescription) -> Record | None:
        counters, now = description.state.counters, time.monotonic()
        count = counters.get("fragments_admitted", 0) + counters.get("fragments_stale", 0)
        if self._last is None:
            self._last = (count, now)
            return None
        count_before, before = self._last
        if count - count_before < self._fragments_per_report:
            return None
        self._last = (count, now)
        version = description.model_version
        return {
            "replay_buffer/fragments_per_second": (count - count_before) / (now - before),
            "replay_buffer/replay_buffer_size (chunk)": description.state.chunk_count,
            "replay_buffer/model_version": -1 if version is None else version,
        }
