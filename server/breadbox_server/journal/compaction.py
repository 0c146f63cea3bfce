"""Keeps the journal short: starts the compactor when it is time, and trims what it made old."""

import asyncio
import logging
import sys
from time import monotonic
from typing import Final

from breadbox_server.journal.place import JournalPlace
from breadbox_server.journal.storage import JournalUnavailableError, JournalWriter
from breadbox_server.journal.turn_journal import TurnJournal
from breadbox_server.metrics import Metrics

log = logging.getLogger(__name__)

ENTRIES_DEFAULT: Final = 30_000
"""Entries after which a new snapshot is made: they replay in a quarter of a second."""
SIZE_BYTES_MAX: Final = 32 * 2**20
"""Bytes of turns after which one is made, however few the entries."""
REST_FACTOR: Final = 4.0
"""How much longer than a compaction the pause after it is, so that it costs a fifth of a core."""
PERIOD_S: Final = 0.5
RUN_S_MAX: Final = 300.0
"""A compactor that takes longer is stuck, and is killed."""
TRIM_PAUSE_S: Final = 0.01
"""Between two portions of a trim, so that the loop and Redis serve others."""


class Compaction:
    """Runs compactors, one at a time.

    Args:
        place: Of the journal.
        writer: Trims it.
        journal: Says how far it has grown.
        metrics: Counts snapshots by outcome.
        grown_entries: Entries that wait for a snapshot already, from before this process.
        entries_max: Entries after which a snapshot is made.
        size_bytes_max: Bytes of turns after which one is made, however few the entries.
    """

    def __init__(
        self,
        place: JournalPlace,
        writer: JournalWriter,
        journal: TurnJournal,
        *,
        metrics: Metrics,
        grown_entries: int,
        entries_max: int = ENTRIES_DEFAULT,
        size_bytes_max: int = SIZE_BYTES_MAX,
    ) -> None:
        self._place = place
        self._writer = writer
        self._journal = journal
        self._metrics = metrics
        self._entries_max = entries_max
        self._size_bytes_max = size_bytes_max
        self._entries_before = -grown_entries
        self._bytes_before = 0
        self._rest_until = 0.0

    async def run(self) -> None:
        """Make snapshots when it is time, for ever. A failure is logged and tried again."""
        while True:
            await asyncio.sleep(PERIOD_S)
            if self._is_due():
                await self._compact()

    def _is_due(self) -> bool:
        grown = self._journal.entry_count - self._entries_before
        grown_bytes = self._journal.size_bytes - self._bytes_before
        is_long = grown >= self._entries_max or grown_bytes >= self._size_bytes_max
        return is_long and monotonic() >= self._rest_until

    async def _compact(self) -> None:
        started = monotonic()
        entries, size_bytes = self._journal.entry_count, self._journal.size_bytes
        sequence = await self._run_compactor()
        self._rest_until = monotonic() + REST_FACTOR * (monotonic() - started)
        self._metrics.snapshots.labels("failed" if sequence is None else "made").inc()
        if sequence is None:
            return
        log.debug("snapshot at turn %d took %.1f s", sequence, monotonic() - started)
        self._entries_before, self._bytes_before = entries, size_bytes
        await self._trim(sequence)

    async def _run_compactor(self) -> int | None:
        """Start the process and wait for its end; gives the snapshot's sequence."""
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "breadbox_server.journal.compactor"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as error:  # The machine is short of processes, memory or descriptors.
            log.warning("the compactor could not be started: %s", error)
            return None
        try:
            async with asyncio.timeout(RUN_S_MAX):
                out, problem = await process.communicate(self._place.to_line().encode())
        except TimeoutError:
            log.warning("the compactor took longer than %.0f s", RUN_S_MAX)
            return None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0 or not out.strip().isdigit():
            log.warning("no snapshot was made: %s", problem.decode(errors="replace").strip()[-500:])
            return None
        return int(out)

    async def _trim(self, sequence: int) -> None:
        try:
            has_more = True
            while has_more:
                has_more = await self._writer.trim(sequence)
                await asyncio.sleep(TRIM_PAUSE_S)
        except JournalUnavailableError as error:
            log.warning("%s; old turns are left for the next snapshot", error)
