"""Open the journal, rebuild the core from it, and own both while the server runs."""

import asyncio
import gc
import logging
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from math import inf
from time import monotonic, perf_counter, time
from typing import Final, cast

from breadbox.model.errors import StoreError, StoreUrlError
from breadbox.shared.threads import CallThreads
from breadbox.stores.base import PayloadCustodian
from breadbox.stores.urls import parse_store_url
from breadbox_server.base.errors import StartError
from breadbox_server.base.jobs import CLOSE_S_MAX, with_time_limit
from breadbox_server.core.buffers import DEFAULT_BUFFER, BufferSet
from breadbox_server.core.model.errors import InvalidArgumentError
from breadbox_server.core.model.ids import PayloadId
from breadbox_server.core.model.inputs import UpdateBuffer
from breadbox_server.journal.compaction import SIZE_BYTES_MAX, Compaction
from breadbox_server.journal.encoding.entries import limits_of_text, limits_to_text
from breadbox_server.journal.recovery import Recovered, begin, recover, recover_while_written
from breadbox_server.journal.standby import JournalFollower, Restore, Standby, outlasting
from breadbox_server.journal.storage.claims import RENEW_S, Claim, Holder, epoch_after
from breadbox_server.journal.storage.interface import (
    JournalArchive,
    JournalError,
    JournalHeldError,
    JournalUnavailableError,
    JournalView,
)
from breadbox_server.journal.storage.place import AUTO, NONE, JournalPlace
from breadbox_server.journal.turn_journal import TurnJournal
from breadbox_server.metrics.metrics import Metrics
from breadbox_server.settings import Settings

log = logging.getLogger(__name__)

_CONFIG_NOTE: Final = "default_config"
_STORE_NOTE: Final = "store"
CLAIM_PERIOD_S: Final = 0.05
"""Between two attempts at a journal that another server holds."""
ENDING_S_MAX: Final = 2.0
"""Seconds that a process that holds a directory may take to end, before it is taken to live."""


@dataclass(slots=True)
class JournalState:
    """The core, and where its decisions go."""

    buffers: BufferSet
    now: float = 0.0
    """The latest instant that an earlier process reached; 0: there was none."""
    journal: TurnJournal | None = None
    compaction: Compaction | None = None
    let_go: frozenset[PayloadId] = frozenset()
    archive: JournalArchive | None = None
    heartbeats: "Heartbeats | None" = None

    @property
    def epoch(self) -> int:
        """Epoch of this server's claim of the journal; 0 without a journal."""
        return 0 if self.journal is None else self.journal.custody.epoch

    def note_settings(self) -> None:
        """Note the settings beside the journal, once the core's first decisions are durable."""
        if self.journal is None or self.archive is None or self.heartbeats is None:
            return
        self.heartbeats.end()  # Turns are written, and heartbeats with them.
        for name, text in self.journal.notes.items():
            if self.archive.read_note(name) != text:
                self.archive.write_note(name, text)


class Heartbeats:
    """Send heartbeats from a thread while the journal is read back, which blocks the loop."""

    def __init__(self, archive: JournalArchive) -> None:
        self._archive = archive
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="breadbox-heartbeats", daemon=True)

    def start(self) -> None:
        """Send heartbeats from now on."""
        self._thread.start()

    def is_alive(self) -> bool:
        """Whether more heartbeats are to come."""
        return self._thread.is_alive()

    def end(self) -> None:
        """Send no more heartbeats, but for one that is under way. Idempotent."""
        self._ended.set()

    def close(self) -> None:
        """Send no more heartbeats; block until the one under way is sent."""
        self.end()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(RENEW_S):
            try:
                self._archive.send_heartbeat()
            except JournalUnavailableError as error:
                log.debug("no heartbeat: %s", error)
            except JournalError as error:
                # The server learns of it as well, when it writes the first turn, and ends.
                log.debug("no heartbeats any more: %s", error)
                return


@asynccontextmanager
async def open_journal_state(
    settings: Settings,
    rng: random.Random,
    metrics: Metrics,
    custodian: PayloadCustodian,
    on_standby: Callable[[Standby], Awaitable[None]],
) -> AsyncIterator[JournalState]:
    """Build the core from its journal or empty; writable inside the block.

    Blocks the loop; waits `STARTING_S` for a server that may be dead. A standby's thread follows.
    """
    place = _choose_place(settings)
    if place is None:
        yield JournalState(BufferSet(rng, settings.default_config, settings.buffers_max))
        return
    try:
        archive = place.open_archive()
    except JournalError as error:
        raise _cannot_start(error) from error
    heartbeats = Heartbeats(archive)
    heartbeats.start()

    async def close_heartbeats() -> None:
        close = partial(asyncio.to_thread, heartbeats.close)
        await with_time_limit(close, CLOSE_S_MAX, "ending the heartbeats")

    try:
        check = partial(_check_store, archive, settings, custodian)
        await check()
        if settings.is_standby:
            # See `check_standby`: the place is shared.
            view = cast(JournalView, archive)
            follower = JournalFollower(view, _restorer(settings, rng, epoch_after()))
            standby = Standby(follower, metrics)
            await on_standby(standby)
            claim, found = await standby.lead(check)

            async def complete() -> Recovered:
                recovered = found or _begin(archive, settings, rng)
                _apply_new_limits(archive, settings, recovered)
                return recovered

            recovered = await outlasting(complete, "beginning to lead")
        else:
            # Before the rest is read: another server could add to it meanwhile.
            claim = await _claim(archive, takes_over=settings.takes_over)
            recovered = _recover(archive, settings, rng, claim.epoch)
            _apply_new_limits(archive, settings, recovered)
        writer = place.open_writer(claim, sync=settings.has_journal_sync)
    except BaseException as error:
        await close_heartbeats()
        archive.close()
        if isinstance(error, JournalError):
            raise _cannot_start(error) from error
        if isinstance(error, StoreError):
            problem = f"--store {settings.store_shown} cannot be used: {error}"
            raise StartError(problem) from error
        raise
    journal = TurnJournal(
        *(writer, recovered.sequence, recovered.chain), grown_entries=recovered.entry_count
    )
    journal.learn(recovered.entry_count, recovered.replay_s)
    compaction = Compaction(
        place,
        writer,
        journal,
        metrics=metrics,
        entries_max=settings.snapshot_entries,
        size_bytes_max=min(SIZE_BYTES_MAX, place.turns_bytes_max()),
    )
    journal.notes = {
        _CONFIG_NOTE: limits_to_text(settings.default_config),
        _STORE_NOTE: settings.store_shown,
    }
    try:
        yield JournalState(
            *(recovered.buffers, recovered.now, journal, compaction, recovered.let_go),
            *(archive, heartbeats),
        )
    finally:
        await close_heartbeats()
        # The claim first: SQLite's lock goes with the archive.
        await with_time_limit(writer.close, CLOSE_S_MAX, "closing the journal")
        # A thread that does not hold up the end: on a disk this may hang.
        close = partial(CallThreads("journal-end", 1).run, archive.close, lambda: inf)
        await with_time_limit(close, CLOSE_S_MAX, "closing the journal's files")


async def _check_store(
    archive: JournalArchive, settings: Settings, custodian: PayloadCustodian
) -> None:
    """Refuse a store other than the journal's, lest all its payloads be given up for a typo.

    Another URL than at the last start with a note is another store; the same URL is the same store,
    whatever it may have lost.
    """
    noted = archive.read_note(_STORE_NOTE)
    if settings.accepts_store or noted in ("", settings.store_shown):
        return
    is_known = archive.identity() in await custodian.journals()
    if is_known or not archive.is_begun():
        return
    buffers = recover_while_written(archive).buffers
    if count := sum(1 for name in buffers.names() for _ in buffers[name].payloads()):
        raise StartError(
            f"--store {settings.store_shown} holds nothing of the journal {archive.shown}, which "
            f"knows {count} payloads in {noted}: all of them would be given up as lost; give that "
            "store, or start with --accept-store if it is gone"
        )


async def _claim(archive: JournalArchive, *, takes_over: bool) -> Claim:
    """Claim the right to write the journal, or raise StartError if another server writes it.

    Waits for a holder that ended without releasing its claim until its heartbeat has expired;
    displaces it immediately if its process is known to be dead.
    """
    holder = Holder.of_this_process()
    displaced = ""
    left_s = inf
    give_up_at = monotonic() + ENDING_S_MAX
    while True:
        try:
            return archive.claim(holder, displaced)
        except JournalHeldError as error:
            other = error.holder
            is_renewed = error.left_s is not None and error.left_s > left_s
            is_locked = error.left_s is None and monotonic() >= give_up_at
            if takes_over or other.is_dead():
                displaced = other.token
            elif is_renewed:
                raise _is_held(archive, error, "start this one with --take-over") from error
            if is_locked:
                # Its lock goes with its process, and with nothing else.
                remedy = "kill it if it hangs (--take-over cannot displace it from a directory)"
                raise _is_held(archive, error, remedy) from error
            left_s = inf if error.left_s is None else error.left_s
            log.debug("%s; waiting for its end", error)
        await asyncio.sleep(CLAIM_PERIOD_S)


def _is_held(archive: JournalArchive, error: JournalHeldError, remedy: str) -> StartError:
    return StartError(
        f"--journal {archive.shown} is in use: {error}; stop that one, or {remedy}, "
        "or name another journal"
    )


def check_standby(settings: Settings) -> None:
    """Raise StartError if this is to be a standby that could not take over from another machine."""
    if not settings.is_standby:
        return
    if settings.takes_over:
        raise StartError("--standby waits for the other server's end; leave --take-over out")
    place = _choose_place(settings)
    if place is None:
        raise StartError("--standby needs a journal, and --journal is none; leave --journal out")
    for option, is_shared in (
        ("--journal", place.is_shared),
        ("--store", not parse_store_url(settings.store).directory),
    ):
        if not is_shared:
            raise StartError(
                f"--standby needs a {option[2:]} that both servers can reach, and a directory is "
                f"of one machine, where one server is restarted instead; give {option} in Redis"
            )


def _choose_place(settings: Settings) -> JournalPlace | None:
    is_left_open = settings.journal == AUTO
    journal = NONE if is_left_open and settings.is_ephemeral else settings.journal
    try:
        return JournalPlace.choose(journal, settings.store)
    except StoreUrlError as error:
        raise StartError(f"--journal cannot be used: {error}") from error


def _restorer(settings: Settings, rng: random.Random, epoch: int) -> Restore:
    # With --seed too, a server that has the journal of an earlier one must not be its twin.
    restored_rng = random.Random((rng.getrandbits(64) << 64) + epoch)
    return partial(
        BufferSet.restore, rng=restored_rng, buffers_max=settings.buffers_max, is_recording=True
    )


def _begin(archive: JournalArchive, settings: Settings, rng: random.Random) -> Recovered:
    fresh = BufferSet(rng, settings.default_config, settings.buffers_max, is_recording=True)
    return begin(archive, fresh, time())


def _recover(
    archive: JournalArchive, settings: Settings, rng: random.Random, epoch: int
) -> Recovered:
    restore = _restorer(settings, rng, epoch)
    if not archive.is_begun():
        return _begin(archive, settings, rng)
    started = perf_counter()
    recovered = recover(archive, restore)
    # It stays, and has no cycles: not even the first collection needs to walk it.
    gc.freeze()
    log.info(
        "recovered at turn %d, of these %d after the snapshot, in %.2f s; buffers: %d",
        recovered.sequence,
        recovered.turn_count,
        perf_counter() - started,
        len(recovered.buffers.names()),
    )
    return recovered


def _apply_new_limits(archive: JournalArchive, settings: Settings, recovered: Recovered) -> None:
    """Give the default buffer the command line's limits, if new; else UpdateBuffer's stand."""
    wanted = settings.default_config
    noted = archive.read_note(_CONFIG_NOTE)
    # By value: one that this server has and the last start had not is not a change.
    if noted and limits_of_text(noted) == wanted:
        return
    buffers = recovered.buffers
    if DEFAULT_BUFFER in buffers.names():
        held_count = buffers.describe(DEFAULT_BUFFER, now=recovered.now).fragment_count
        try:
            buffers.apply(UpdateBuffer(DEFAULT_BUFFER, wanted), now=recovered.now)
        except InvalidArgumentError as error:
            option = "--" + error.field.replace("_", "-")
            raise StartError(
                f"{option} {error.problem}; the buffer 'default' exists: start with the value that "
                "it has, or delete the buffer first"
            ) from error
        left_count = buffers.describe(DEFAULT_BUFFER, now=recovered.now).fragment_count
        if left_count < held_count:
            log.warning(
                "the limits of this start hold less than those that the buffer 'default' had: it "
                "has evicted %d of its %d fragments",
                *(held_count - left_count, held_count),
            )


def _cannot_start(error: JournalError) -> StartError:
    return StartError(f"--journal cannot be used: {error}")
