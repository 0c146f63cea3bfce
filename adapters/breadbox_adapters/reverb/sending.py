"""Send items to tables."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import breadbox.client
from breadbox.client import Client
from breadbox.model.errors import BackpressureError, BufferNotFoundError, SessionEndedError
from breadbox.model.fragment import Fragment
from breadbox.model.types import AdmissionOutcome, AppendResult, BufferDescription, ModelState
from breadbox_adapters.reverb.items import Signature, TableNotFoundError

_log = logging.getLogger(__name__)

DEFAULT = "default"
"""The buffer that every server has."""
SESSION = "reverb"
"""The first session of a table: one name, so that two clients that find none start the same one."""
_SESSIONS_MAX = 16
"""Most changes of a table's session while one item is being sent."""
ROOM_S = 2.0
"""Seconds that one append waits for room; then confirmed items are counted, the rest sent again."""
LOG_PERIOD_S = 30.0
"""Seconds of waiting before it is logged, and between two such lines."""
_FULL = AppendResult(AdmissionOutcome.BUFFER_FULL)
_OF_ANOTHER = (AdmissionOutcome.WRONG_SESSION, AdmissionOutcome.STALE)


def connect(address: str, options: Mapping[str, Any]) -> Client:
    """Connect to a server of Breadbox; an append waits at most `ROOM_S` for room."""
    return breadbox.client.connect(address, **{**options, "append_wait_s": ROOM_S})


class ItemSender:
    """Append items in the current session, and again after a table's reset. Thread-safe."""

    def __init__(self, client: Client, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._lock = threading.Lock()
        self._states: dict[str, ModelState] = {}
        self._signatures: dict[str, Signature | None] = {}
        self._logged_at: dict[str, float] = {}
        """Time of the last log line, or of the beginning, for each table without room."""

    def append_many(
        self,
        fragments: Iterable[Fragment],
        *,
        buffer: str | None = None,
        codecs: str | Mapping[str, str] | None = None,
        answered: Callable[[list[AppendResult]], None] | None = None,
    ) -> list[AppendResult]:
        """Write and announce items; block while their table has no room.

        Raises BackpressureError after `ROOM_S`, with `results`, and SessionEndedError if the table
        is reset again and again.
        """
        fragments = list(fragments)
        table = buffer or self._client.buffer
        results: list[AppendResult] = [AppendResult(AdmissionOutcome.UNSPECIFIED)] * len(fragments)
        left = list(range(len(fragments)))
        state = self._state_of(table)
        for _ in range(_SESSIONS_MAX):
            for place in left:
                fragment, version = fragments[place], state.model_version or 0
                fragment.session_id = state.session_id
                fragment.model_version_min = fragment.model_version_max = version
            full: BackpressureError | None = None
            try:
                sent: Sequence[AppendResult] = self._client.append_many(
                    [fragments[place] for place in left], buffer=table, codecs=codecs
                )
            except BackpressureError as error:
                full, sent = error, error.results
            self._report_room(table, full)
            for place, result in zip(left, sent, strict=True):
                results[place] = result
            if full is not None:
                full.results = tuple(
                    _FULL if each.outcome in _OF_ANOTHER else each for each in results
                )
                raise full
            left = [place for place in left if results[place].outcome in _OF_ANOTHER]
            if not left:
                return results
            state = self._state_of(table, known=state)
        raise SessionEndedError(fragments[left[0]].session_id, state.session_id)

    def insert(self, fragment: Fragment, table: str) -> None:
        """Append one item; blocks while there is no room for it."""
        while True:
            try:
                self.append_many([fragment], buffer=table)
            except BackpressureError:
                continue
            return

    def signature_of(self, table: str) -> Signature | None:
        """Return the signature of a table, which never changes, or None without one."""
        if table not in self._signatures:
            weights = self._state_of(table).weights
            self._signatures[table] = (
                None
                if weights is None
                else Signature.unpacked(self._client.service.load_weights(weights))
            )
        return self._signatures[table]

    def _report_room(self, table: str, full: BackpressureError | None) -> None:
        """Log now and then that items wait for room, as in a queue that nothing samples from."""
        with self._lock:
            if full is None:
                self._logged_at.pop(table, None)
                return
            now = self._clock()
            if now - self._logged_at.setdefault(table, now) < LOG_PERIOD_S:
                return
            self._logged_at[table] = now
        _log.warning("inserting into table %r waits: %s", table, full.what)

    def _state_of(self, table: str, known: ModelState | None = None) -> ModelState:
        """Return a table's state, requested once, and again if the `known` one was wrong."""
        with self._lock:
            state = self._states.get(table)
            if state is None or state is known:
                state = self._states[table] = current_state(self._client, table)
            return state


@contextmanager
def known_tables(client: Client, table: str) -> Iterator[None]:
    """Raise `TableNotFoundError`, which lists the tables, if the table does not exist."""
    try:
        yield
    except BufferNotFoundError as error:
        raise TableNotFoundError(table, [each.name for each in tables_of(client)]) from error


def current_state(client: Client, table: str) -> ModelState:
    """Return a table's session and version; start a session if there never was one."""
    with known_tables(client, table):
        state = client.watch_model(buffer=table)
        if state is not None and state.session_id:
            return state
        try:
            return client.start_session(SESSION, buffer=table)
        except SessionEndedError:
            return client.start_session(buffer=table)


def tables_of(client: Client) -> list[BufferDescription]:
    """Return the buffers of a server, except for the default one while it is unused."""
    return [each for each in client.list_buffers() if each.name != DEFAULT or each.session_id]
