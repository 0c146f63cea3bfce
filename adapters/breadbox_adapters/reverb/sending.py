"""Items on their way into tables."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import breadbox.client
from breadbox.client import Client
from breadbox.model.errors import BackpressureError, BufferNotFoundError, SessionEndedError
from breadbox.model.fragment import Fragment
from breadbox.model.types import AdmissionOutcome, AppendResult, BufferDescription, ModelState
from breadbox_adapters.reverb.errors import TableNotFoundError
from breadbox_adapters.reverb.signatures import Signature, signature_of

_log = logging.getLogger(__name__)

DEFAULT = "default"
"""Buffer that every server has."""
SESSION = "reverb"
"""Of a table that never was in a session: one name, so that two who find it so start the same."""
_SESSIONS_MAX = 16
"""Changes of a table's session while one item is being sent; then somebody resets it in a loop."""
ROOM_S = 2.0
"""Seconds to wait for room until items that found some are confirmed, and the rest tried again."""
TOLD_S = 30.0
"""Seconds of waiting after which it is said, and between two lines about it."""
_FULL = AppendResult(AdmissionOutcome.BUFFER_FULL)
_OF_ANOTHER = (AdmissionOutcome.WRONG_SESSION, AdmissionOutcome.STALE)


def connect(address: str, options: Mapping[str, Any]) -> Client:
    """Connect to a server of Breadbox; an append waits at most `ROOM_S` for room."""
    return breadbox.client.connect(address, **{**options, "append_wait_s": ROOM_S})


class ItemSender:
    """Appends items in whatever session is current, as Reverb does, which knows none.

    A table that is reset has a new session. What was sent for the one before is sent again for the
    new one, so a writer outlives resets, as it does in Reverb. Thread-safe.
    """

    def __init__(self, client: Client, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._lock = threading.Lock()
        self._states: dict[str, ModelState] = {}
        self._signatures: dict[str, Signature | None] = {}
        self._told_at: dict[str, float] = {}
        """By table that has no room: when that was said, or when it began."""

    def append_many(
        self,
        fragments: Sequence[Fragment],
        *,
        buffer: str | None = None,
        codecs: str | Mapping[str, str] | None = None,
    ) -> list[AppendResult]:
        """Write items and announce them; blocks while their table has no room.

        Raises:
            BackpressureError: Some found no room within `ROOM_S`; its `results` say which did.
            SessionEndedError: The table was reset again and again meanwhile.
            ReplayBufferError: As `breadbox.Client.append_many`.
        """
        table = buffer or self._client.buffer
        results: list[AppendResult] = [AppendResult(AdmissionOutcome.UNSPECIFIED)] * len(fragments)
        left = list(range(len(fragments)))
        state = self._state_of(table)
        for _ in range(_SESSIONS_MAX):
            _stamp([fragments[place] for place in left], state)
            full: BackpressureError | None = None
            try:
                sent: Sequence[AppendResult] = self._client.append_many(
                    [fragments[place] for place in left], buffer=table, codecs=codecs
                )
            except BackpressureError as error:
                full, sent = error, error.results
            self._tell_of_room(table, full)
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
        """Return the signature of a table, which it has for its whole life, or None without one.

        Raises:
            TableNotFoundError: There is no such table.
            ReverbError: The server, or the store, does not answer.
        """
        if table not in self._signatures:
            self._signatures[table] = signature_of(self._client, self._state_of(table))
        return self._signatures[table]

    def _tell_of_room(self, table: str, full: BackpressureError | None) -> None:
        """Say now and then that items wait for room: in a queue that nobody samples for ever."""
        with self._lock:
            if full is None:
                self._told_at.pop(table, None)
                return
            now = self._clock()
            if now - self._told_at.setdefault(table, now) < TOLD_S:
                return
            self._told_at[table] = now
        _log.warning("inserting into table %r waits: %s", table, full.what)

    def _state_of(self, table: str, known: ModelState | None = None) -> ModelState:
        """What is current in a table, asked for once and when the `known` one was wrong."""
        with self._lock:
            state = self._states.get(table)
            if state is None or state is known:
                state = self._states[table] = current_state(self._client, table)
            return state


def _stamp(fragments: Sequence[Fragment], state: ModelState) -> None:
    version = state.model_version or 0
    for fragment in fragments:
        fragment.session_id = state.session_id
        fragment.model_version_min = fragment.model_version_max = version


def current_state(client: Client, table: str) -> ModelState:
    """What is current in a table; a session is started where there never was one.

    Raises:
        TableNotFoundError: There is no such table.
    """
    try:
        state = client.watch_model(buffer=table)
        if state is not None and state.session_id:
            return state
        try:
            return client.start_session(SESSION, buffer=table)
        except SessionEndedError:
            return client.start_session(buffer=table)
    except BufferNotFoundError as error:
        raise not_found(client, table) from error


def not_found(client: Client, table: str) -> TableNotFoundError:
    """Say that there is no such table, and which there are."""
    return TableNotFoundError(table, [each.name for each in tables_of(client)])


def tables_of(client: Client) -> list[BufferDescription]:
    """The buffers of a server that are tables.

    All are, but the one that a server always has, where nobody has used it.
    """
    return [each for each in client.list_buffers() if each.name != DEFAULT or each.session_id]
