"""Keeps the journal short: starts the compactor when it is time, and trims what it made old."""

import asyncio
import logging
import sys
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from time import monotonic
from typing import Final

from breadbox_server.journal import compactor
from breadbox_server.journal.storage.interface import (
    JournalDamagedError,
    JournalError,
    JournalUnavailableError,
    JournalWriter,
)
from breadbox_server.journal.storage.place import JournalPlace
from breadbox_server.journal.turn_journal import TurnJournal
from breadbox_server.metrics.metrics import Metrics

log = logging.getLogger(__name__)

ENTRIES_DEFAULT: Final = 30_000
"""Entries after which a new snapshot is made: they replay in a quarter of a second."""
SIZE_BYTES_MAX: Final = 32 * 2**20
"""Bytes of turns after which one is made, however few the entries."""
URGENT_PRESSURE: Final = 0.5
"""`TurnJournal.pressure` from which a compaction neither runs at low priority nor rests."""
REST_FACTOR: Final = 4.0
"""How much longer than a compaction the pause after it is, so that it costs a fifth of a core."""
REST_S_MAX: Final = 5.0
"""A compaction that took long, since others had the cores, is not followed by a rest as long."""
FAILED_REST_S: Final = 2.0
"""Seconds after a compaction that failed, however urgent the next is."""
FAILURES_MAX: Final = 3
"""Failures in a row after which a journal that has no room left is begun again from memory."""
NICENESS_MAX: Final = 19
"""At the lowest priority a compactor gets a sixtieth of a core that others want."""
PERIOD_S: Final = 0.5
RUN_S_MAX: Final = 300.0
"""A compactor that takes longer is stuck, and is killed."""
TRIM_PAUSE_S: Final = 0.01
"""Between two portions of a trim, so that the loop and Redis serve others."""


class _NoSnapshotError(Exception):
    """No snapshot was made; says why."""


class _BrokenError(_NoSnapshotError):
    """The compactor failed for want of nothing; perhaps since what it reads is damaged."""

    def __init__(self, problem: str, *, is_damaged: bool = False) -> None:
        super().__init__(problem)
        self.is_damaged = is_damaged


@dataclass(repr=False, eq=False)
class Compaction:
    """Run compactors, one at a time.

    The longer the turns to replay at a restart, the higher the compactor's priority, and the
    shorter the rest. Priorities cannot be raised: a low one that becomes urgent is ended and begun
    anew.
    """

    place: JournalPlace
    writer: JournalWriter
    journal: TurnJournal
    _: KW_ONLY
    metrics: Metrics
    entries_max: int = ENTRIES_DEFAULT
    size_bytes_max: int = SIZE_BYTES_MAX
    _rest_until: float = field(default=0.0, init=False)
    _failures: int = field(default=0, init=False)
    _had_room: bool = field(default=True, init=False)

    async def run(self, on_damaged: Callable[[JournalError], None]) -> None:
        """Make snapshots when it is time, for ever. A failure is logged and tried again."""
        while True:
            await asyncio.sleep(PERIOD_S)
            await self.look(on_damaged)

    async def look(self, on_damaged: Callable[[JournalError], None]) -> None:
        """Make a snapshot if it is time, and trim what it made old; `on_damaged` as for `run`."""
        self._tell_pressure()
        if self._is_due():
            await self._compact(on_damaged)

    def _tell_pressure(self) -> None:
        self.metrics.journal_replay_seconds.set(self.journal.replay_s)
        has_room = self.journal.pressure < 1.0
        if has_room != self._had_room:
            self._had_room = has_room
            if has_room:
                log.info("the journal is short enough again; producers continue")
            else:
                log.warning(
                    "producers wait for a snapshot: %s (the machine lacks CPU, or snapshots fail)",
                    self.journal.hold(),
                )

    def _is_due(self) -> bool:
        backlog = self.journal.backlog
        is_long = (
            backlog.entry_count >= self.entries_max or backlog.size_bytes >= self.size_bytes_max
        )
        return (is_long or self._is_urgent()) and monotonic() >= self._rest_until

    def _is_urgent(self) -> bool:
        return self.journal.pressure >= URGENT_PRESSURE

    def _niceness(self) -> int:
        return max(0, round(NICENESS_MAX * (1.0 - self.journal.pressure / URGENT_PRESSURE)))

    async def _compact(self, on_damaged: Callable[[JournalError], None]) -> None:
        started = monotonic()
        written, beginnings = self.journal.written, self.journal.beginnings
        try:
            sequence = await self._run_compactor()
        except _NoSnapshotError as error:
            self.metrics.journal_snapshots.labels("failed").inc()
            self._failures += 1
            self._rest_until = monotonic() + FAILED_REST_S
            log.warning("no snapshot was made: %s", error)
            is_stuck = self._failures >= FAILURES_MAX and not self.journal.pressure < 1.0
            # One that was begun again meanwhile was read half from before, half from after.
            is_known = beginnings == self.journal.beginnings
            if is_known and isinstance(error, _BrokenError) and (error.is_damaged or is_stuck):
                on_damaged(JournalDamagedError(f"the journal cannot be read back ({error})"))
            return
        took_s = monotonic() - started
        self.metrics.journal_snapshots.labels("made").inc()
        self._failures = 0
        log.debug("snapshot at turn %d took %.1f s", sequence, took_s)
        self.journal.cover(written)
        rest_s = 0.0 if self._is_urgent() else min(REST_FACTOR * took_s, REST_S_MAX)
        self._rest_until = monotonic() + rest_s
        await self._trim(sequence)

    async def _run_compactor(self) -> int:
        while True:
            niceness = self._niceness()
            try:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "breadbox_server.journal.compactor", str(niceness)),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                )
            except OSError as error:  # Short of processes, memory or descriptors.
                raise _NoSnapshotError(f"the compactor could not be started: {error}") from error
            answer = await self._talk(process, is_patient=niceness > 0)
            if answer is not None:
                return self._learn(process.returncode, *answer)

    async def _talk(
        self, process: asyncio.subprocess.Process, *, is_patient: bool
    ) -> tuple[bytes, bytes] | None:
        """Return what the process wrote, or None if it was killed so that an urgent one begins."""
        loop = asyncio.get_running_loop()
        talk = loop.create_task(process.communicate(self.place.to_line().encode()))
        give_up_at = monotonic() + RUN_S_MAX
        try:
            while not talk.done():
                await asyncio.wait({talk}, timeout=PERIOD_S)
                self._tell_pressure()
                if talk.done():
                    break
                if is_patient and self._is_urgent():
                    return None
                if monotonic() >= give_up_at:
                    raise _BrokenError(f"the compactor took longer than {RUN_S_MAX:.0f} s")
            try:
                return talk.result()
            except RuntimeError as error:  # uvloop's, where the process ended before it read.
                raise _BrokenError(f"the compactor ended at its start: {error}") from error
        finally:
            talk.cancel()
            if process.returncode is None:
                process.kill()
                await process.wait()

    def _learn(self, code: int | None, out: bytes, problem: bytes) -> int:
        if code != 0:
            text = problem.decode(errors="replace").strip()[-500:]
            if code == compactor.UNAVAILABLE:
                raise _NoSnapshotError(text)
            raise _BrokenError(text, is_damaged=code == compactor.DAMAGED)
        sequence, entry_count, replay_s = out.split()
        self.journal.learn(int(entry_count), float(replay_s))
        return int(sequence)

    async def _trim(self, sequence: int) -> None:
        try:
            has_more = True
            while has_more:
                has_more = await self.writer.trim(sequence)
                await asyncio.sleep(TRIM_PAUSE_S)
        except JournalUnavailableError as error:
            log.warning("%s; old turns are left for the next snapshot", error)
