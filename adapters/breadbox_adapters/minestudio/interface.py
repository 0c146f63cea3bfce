"""MineStudio's interface to its replay buffer (online.rollout.replay_buffer)."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import breadbox
from breadbox.diagnosis import diagnose
from breadbox.environment import connect_from_environment, seconds_from_environment
from breadbox.model import errors, types
from breadbox.model.options import WAIT_S_MAX_PER_CALL
from breadbox_adapters.minestudio.conversion import from_fragment, named, reference_of, to_fragment
from breadbox_adapters.minestudio.datatypes import FragmentIndex, FragmentMetadata, SampleFragment
from breadbox_adapters.minestudio.records import (
    FetchRecords,
    Log,
    Reporter,
    is_minestudio_logging,
    log_to_minestudio,
)

_log = logging.getLogger(__name__)

T = TypeVar("T")
FIRST_WORD_S = 60.0
"""Seconds after which a fetch that waits logs why for the first time."""
RECONNECT_S = 30.0
"""Seconds for which the interface tries to reach a server when it is made."""
CAPACITY_BYTES_UNBOUND = 2**62
"""A bound that leaves the buffer to chunks, and to the room in the store."""
_OUTAGES = (
    errors.UnavailableError,
    errors.StoreUnavailableError,
    errors.DeadlineExceededError,
    errors.BackpressureError,
)


class ReplayBufferInterface:
    """MineStudio's interface to the replay buffer. Thread-safe but for `fetch_fragments`.

    With a configuration it creates the buffer, or sets the limits of the existing one; without one
    it uses the buffer as it is. Calls wait while server, journal or store are unreachable, and log
    that every half minute. `close` it, or let the process end.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        *,
        server: str | None = None,
        buffer: str | None = None,
        client: breadbox.Client | None = None,
        reconnect_s: float | None = None,
        version_wait_s: float = 30.0,
        log: Log | None = None,
        take_over: bool = False,
    ) -> None:
        """Connect; waits for a server for up to `RECONNECT_S`, or `reconnect_s`.

        Arguments that are None come from the environment: see `breadbox.environment`.

        Args:
            config: MineStudio's replay-buffer configuration: max_chunks, max_staleness, max_reuse,
                fragments_per_chunk, fragments_per_report; and `capacity_bytes`, without which bytes
                are not limited. Settings of its store are ignored.
            server: HOST:PORT, or None for `BREADBOX_SERVER`, else localhost:50051.
            buffer: Name of the buffer, or None for `BREADBOX_BUFFER`, else "default".
            client: Client to use, which stays open, or None for one of its own.
            reconnect_s: Seconds for which a call waits for an unreachable server, before it raises,
                or None for `BREADBOX_RECONNECT_S`, else without a limit.
            version_wait_s: Seconds that `add_fragment` waits, once for each session and version.
            log: Called with the records `replay_buffer/*`; by default MineStudio's logger, if any.
            take_over: See `breadbox.Client.start_session`; for `update_model_version`.

        Raises:
            BufferNotFoundError: There is no such buffer, and no configuration to create it with.
            InvalidRequestError: A limit is out of its range, or cannot be changed.
            UnavailableError: There is no server.
            UnauthenticatedError, PermissionDeniedError: The token is missing, unknown, or lacks
                the role; a configuration needs the role `admin`.
        """
        if reconnect_s is None:
            reconnect_s = seconds_from_environment("BREADBOX_RECONNECT_S")
        self._is_patient = reconnect_s is None
        self._owns_client = client is None
        self.client = client or connect_from_environment(
            server=server,
            buffer=buffer,
            reconnect_s=RECONNECT_S if reconnect_s is None else reconnect_s,
        )
        """For calls that MineStudio lacks; `close` closes it, unless it was passed."""
        self.buffer = buffer or self.client.buffer
        """Name of the buffer."""
        self.version_wait_s = version_wait_s
        self._log = log
        self._takes_over = take_over
        self._lease: breadbox.types.Lease | None = None
        self._session_id = ""
        self._model = types.ModelState("", None, None)
        """Session and version at the last request."""
        self._awaited: set[tuple[str, int]] = set()
        """Sessions and versions that did not come within `version_wait_s`."""
        self._ended: set[str] = set()
        """Sessions that were current once."""
        self._fetch_records = FetchRecords()
        self._reporter: Reporter | None = None
        self._closing = threading.Event()
        self.dropped_count = 0
        """Number of fragments given to `add_fragment` that the buffer refused."""
        try:
            self._begin(config)
        except BaseException as error:
            if isinstance(error, errors.UnavailableError):
                error.add_note("BREADBOX_SERVER names the server, as HOST:PORT")
            self.close()
            raise

    def _begin(self, config: Mapping[str, Any] | None) -> None:
        if config is None:
            self.client.get_buffer(self.buffer)
            return
        limits = limits_of(config)
        try:
            self.client.create_buffer(self.buffer, limits)
        except errors.BufferExistsError:
            self.client.update_buffer(self.buffer, limits)
        fragments_per_report = config.get("fragments_per_report")
        if fragments_per_report and self._is_logging:
            self._reporter = Reporter(
                lambda: self.client.get_buffer(self.buffer), int(fragments_per_report), self._report
            )

    def add_fragment(self, fragment: SampleFragment, metadata: FragmentMetadata) -> None:
        """Store a fragment; blocks while a buffer that makes producers wait is full.

        MineStudio's workers learn of a session and version before the buffer does. So this waits
        up to `version_wait_s` until the fragment's version is current. A version that does not come
        is replaced by the current one. A fragment that is stale, of another session, or from before
        the first model version is dropped and counted.

        Raises:
            UnsupportedArrayError: It holds something that only pickle could store.
            ReplayBufferError: See `breadbox.Client.append_many`. It is logged as well, because
                MineStudio's sender ends with it silently.
        """
        try:
            self._store(fragment, metadata)
        except errors.ReplayBufferError as error:
            if not self._closing.is_set():
                _log.error(
                    "fragment %d of worker %r cannot be stored, and the sender ends with it: %s",
                    metadata.fid_in_worker,
                    metadata.worker_uuid,
                    error,
                )
            raise

    def _store(self, fragment: SampleFragment, metadata: FragmentMetadata) -> None:
        if not metadata.session_id or metadata.model_version < 0:
            self.dropped_count += 1
            return
        while True:
            version = self._version_for(metadata)
            made = to_fragment(fragment, replace(metadata, model_version=version))
            try:
                result = self._patiently(partial(self.client.append, made, buffer=self.buffer))
            except errors.InvalidRequestError as error:
                # Another session began in between, and its version is lower than the fragment's.
                if error.field != "model_version_max":
                    raise
                self._look()
                continue
            break
        outcome = result.outcome
        if outcome is types.AdmissionOutcome.DUPLICATE:
            outcome = result.first_outcome
        if outcome in (types.AdmissionOutcome.STALE, types.AdmissionOutcome.WRONG_SESSION):
            self.dropped_count += 1

    def _version_for(self, metadata: FragmentMetadata) -> int:
        """Return the version to store a fragment as, once its own is current or cannot be so."""
        session_id, version = metadata.session_id, metadata.model_version
        if self._has_reached(session_id, version):
            return version
        self._look(known=types.ModelState(session_id, None, None))
        give_up_at = time.monotonic() + self.version_wait_s
        while not self._has_reached(session_id, version) and not self._is_hopeless(metadata):
            left_s = give_up_at - time.monotonic()
            if left_s <= 0:
                self._awaited.add((session_id, version))
                _log.warning(
                    "the buffer did not get session %s, version %d, within %.0f s",
                    session_id,
                    version,
                    self.version_wait_s,
                )
                break
            self._look(left_s)
        if self._model.session_id != session_id or self._model.model_version is None:
            return version  # Refused for its session, whatever its version.
        return min(version, self._model.model_version)

    def _has_reached(self, session_id: str, version: int) -> bool:
        current = self._model.model_version
        return session_id == self._model.session_id and current is not None and version <= current

    def _is_hopeless(self, metadata: FragmentMetadata) -> bool:
        session_id = metadata.session_id
        if session_id in self._ended:
            return True
        if session_id != self._model.session_id:
            return any(session_id == awaited for awaited, _ in self._awaited)
        return (session_id, metadata.model_version) in self._awaited

    def _look(self, max_wait_s: float = 0.0, known: types.ModelState | None = None) -> None:
        if max_wait_s and self._model.session_id:
            known = self._model
        wait_s = min(max_wait_s, WAIT_S_MAX_PER_CALL)
        seen = self._patiently(
            lambda: self.client.watch_model(known, max_wait_s=wait_s, buffer=self.buffer)
        )
        if seen is None:
            return
        if known is not None and seen.known_session_ended:
            self._ended.add(known.session_id)
        if seen.session_id != self._model.session_id:
            self._ended.add(self._model.session_id)
            self._ended.discard(seen.session_id)
        self._model = seen

    def load_fragment(self, fragment_id: str) -> SampleFragment:
        """Load a fragment that `fetch_fragments` or `prepared_fragments` named, in any process.

        Raises:
            KeyError: It is gone: another batch was fetched since.
            InvalidRequestError: The text was not returned by them.
        """
        reference = reference_of(fragment_id)
        try:
            read = partial(self.client.load_fragments, [reference], is_mapped=True)
            (fragment,) = self._patiently(read)
        except errors.PayloadMissingError as error:
            raise KeyError(fragment_id) from error
        return from_fragment(fragment)

    def fetch_fragments(self, num_fragments: int) -> list[tuple[FragmentIndex, str]]:
        """Fetch a batch, waiting without a limit; then release the batch before it.

        Logs what it waits for after a minute, and every few minutes after that. Raises
        InvalidRequestError for a number that is no multiple of fragments_per_chunk, or that the
        buffer can never hold.
        that is no multiple of fragments_per_chunk, or that the buffer can never hold, is refused.
        """
        lease = self._await_batch(num_fragments)
        before, self._lease = self._lease, lease.__enter__()  # Left by the next one, or by close().
        _release(before)
        if self._is_logging:
            description = self._patiently(lambda: self.client.get_buffer(self.buffer))
            self._report(self._fetch_records.record(description, lease.references))
        return named(lease.references)

    def _await_batch(self, num_fragments: int) -> breadbox.types.Lease:
        wait_s, waited_s = FIRST_WORD_S, 0.0
        describe = partial(self.client.get_buffer, self.buffer)
        before = self._patiently(describe)
        while True:
            fetch = partial(self.client.fetch, num_fragments, wait_s, buffer=self.buffer)
            try:
                return self._patiently(fetch)
            except errors.WaitElapsedError as error:
                waited_s += wait_s
                after = self._patiently(describe)
                why = diagnose(before, after, error.waited_s, fragment_count=num_fragments)
                _log.warning(
                    "waiting for %d fragments since %.0f s: %s. %s",
                    num_fragments,
                    waited_s,
                    error.reason,
                    " ".join([why.headline, *why.advice]),
                )
                before = after
                wait_s = WAIT_S_MAX_PER_CALL

    def prepared_fragments(self) -> list[tuple[FragmentIndex, str]]:
        """Return the batch that any learner fetched last, or an empty list without one.

        Raises RequestNotFoundError if its lease expired, because its process was stopped.
        """
        asked = ""
        describe = partial(self.client.get_buffer, self.buffer)
        while request_id := self._patiently(describe).state.latest_request_id:
            prepared = partial(
                self.client.service.get_prepared_fragments, request_id, buffer=self.buffer
            )
            try:
                return named(self._patiently(prepared))
            except errors.RequestNotFoundError:
                if request_id == asked:
                    raise
                asked = request_id  # Released meanwhile; another one may be the latest now.
        return []

    def update_model_version(self, session_id: str, model_version: int) -> None:
        """Make a session and a model version current; chunks that become stale are evicted.

        Raises:
            VersionRegressedError: The version is lower than the current one of the session.
            SessionEndedError: The session was current before, and another one followed.
            SessionInUseError: Other processes use the current session; see `take_over`.
        """
        if session_id != self._session_id:
            self._patiently(
                lambda: self.client.start_session(
                    session_id,
                    model_version=model_version,
                    buffer=self.buffer,
                    take_over=self._takes_over,
                )
            )
            self._session_id = session_id
        self._patiently(
            lambda: self.client.service.publish_model(session_id, model_version, buffer=self.buffer)
        )

    def update_training_session(self) -> None:
        """Do nothing, as in MineStudio."""

    def close(self) -> None:
        """Release the fetched batch and close the connection. Idempotent."""
        self._closing.set()
        reporter, self._reporter = self._reporter, None
        if reporter is not None:
            reporter.close()
        if not self.client.closed:
            lease, self._lease = self._lease, None
            _release(lease)
            if self._owns_client:
                self.client.close()

    @property
    def _is_logging(self) -> bool:
        return self._log is not None or is_minestudio_logging()

    def _report(self, record: dict[str, Any]) -> None:
        if record:
            (self._log or log_to_minestudio)(record)

    def _patiently(self, call: Callable[[], T]) -> T:
        """Repeat a call while server or store are unreachable, unless `reconnect_s` was set."""
        began_at = time.monotonic()
        logged_at = began_at - RECONNECT_S
        while True:
            try:
                return call()
            except _OUTAGES as error:
                if not self._is_patient or self._closing.is_set():
                    raise
                now = time.monotonic()
                if now - logged_at >= RECONNECT_S:
                    logged_at = now
                    _log.warning(
                        "still waiting after %.0f s for buffer %r at %s: %s",
                        now - began_at,
                        self.buffer,
                        self.client.address,
                        error,
                    )
                self._closing.wait(1.0)

    def __enter__(self) -> "ReplayBufferInterface":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to be pickled: neither connection nor lease works in another process."""
        raise TypeError("make a ReplayBufferInterface in each process instead of sending one")


def _release(lease: breadbox.types.Lease | None) -> None:
    if lease is None:
        return
    try:
        lease.release()
    except errors.LeaseExpiredError:
        return  # MineStudio knows no leases.
    except _OUTAGES as error:
        _log.warning("a batch that is done with is given up only when its lease ends: %s", error)


def limits_of(config: Mapping[str, Any]) -> types.BufferConfig:
    """Return MineStudio's configuration as limits; only `capacity_bytes` bounds bytes."""

    def whole(name: str) -> int | None:
        return None if config.get(name) is None else int(config[name])

    uses_max, capacity_bytes = whole("max_reuse"), whole("capacity_bytes")
    return types.BufferConfig(
        fragments_per_chunk=whole("fragments_per_chunk"),
        capacity_chunks=whole("max_chunks"),
        capacity_bytes=CAPACITY_BYTES_UNBOUND if capacity_bytes is None else capacity_bytes,
        staleness_max=whole("max_staleness"),
        # MineStudio compares no fragments: a value of infos may be None in one, a text in another.
        schema=types.SchemaPolicy.ANY,
        # MineStudio delivers a chunk once even with a max_reuse below 1.
        uses_max=None if uses_max is None else max(1, uses_max),
    )
