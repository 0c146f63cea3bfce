"""Tickets for the fragments that environments fill, from before the first step to the answer."""

import logging
import queue
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

from breadbox.model.errors import (
    ClosedError,
    InvalidRequestError,
    ReplayBufferError,
    WaitElapsedError,
)
from breadbox.model.fragment import Fragment
from breadbox.model.types import AssemblyPolicy, BufferConfig
from breadbox.shared.throttle import Throttle

_log = logging.getLogger(__name__)

LEASE_S: Final = 60.0
"""Seconds for which the buffer waits for the fragments of a producer that has died."""
ASK_S: Final = 5.0
"""Longest wait of one request for tickets."""
WEIGHTS_S: Final = 5.0
"""Longest wait for the weights of a ticket's version; after it older ones are acted with."""
_RETRY_S: Final = 1.0
_TICKETS_MAX: Final = 1024
"""Most tickets that one request may ask for."""


class HeldTicket(Protocol):
    """The part of a ticket that is used here."""

    expired: bool

    @property
    def model_version(self) -> int | None:
        """The version that was current when it was given."""

    @property
    def session_id(self) -> str:
        """The session in which it was given."""

    def give_back(self) -> None:
        """End it."""

    def __enter__(self) -> object: ...


class TicketClient(Protocol):
    """The part of a client that gives tickets."""

    def tickets(
        self, count: int, max_wait_s: float, *, lease_s: float, buffer: str | None
    ) -> Sequence[Any]:
        """See `breadbox.Client.tickets`."""


def check_paced(config: BufferConfig) -> None:
    """Raise InvalidRequestError if a buffer gives no tickets for single fragments of workers."""
    is_of_groups = config.assembly is AssemblyPolicy.GROUPS
    if is_of_groups or (config.fragments_per_chunk or 1) > 1 or not config.groups_per_version:
        raise InvalidRequestError(
            "pace",
            "is for buffers of chunks of one fragment each, with `groups_per_version`: as many as "
            "the learner fetches for each version that it publishes",
        )


class Pacer:
    """Take and give back the tickets of some environments, from two threads. Thread-safe."""

    def __init__(self, client: TicketClient, *, buffer: str | None = None) -> None:
        """Start the threads; *client* is closed by the caller, after this."""
        self._client = client
        self._buffer = buffer
        self._changed = threading.Condition()
        self._filling: dict[str, HeldTicket] = {}
        """Tickets of the fragments that workers fill or are about to, by worker."""
        self._given_at: dict[str, float] = {}
        """Times at which workers got their latest tickets."""
        self._sent: dict[tuple[str, str, int], HeldTicket] = {}
        """Tickets of the fragments that are being sent, by session, worker and index."""
        self._wanted: dict[str, None] = {}
        """Workers that lack a ticket, in order."""
        self._error: ReplayBufferError | None = None
        self._is_closed = False
        self._throttle = Throttle(time.monotonic)
        self._over: queue.SimpleQueue[HeldTicket | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=target, name=f"breadbox-{name}", daemon=True)
            for name, target in (("tickets", self._ask), ("tickets-over", self._give_back))
        ]
        for thread in self._threads:
            thread.start()

    def wait(
        self,
        workers: Iterable[str],
        session_id: str,
        max_wait_s: float = 0.0,
        *,
        model_version: int | None = None,
    ) -> bool:
        """Return whether each worker has a ticket of the session; ask for those that lack.

        Blocks until they have, at most *max_wait_s*. Raises the error that ended the asking. With
        the *model_version* that they act with, also False while a ticket is of a later one: its
        fragment would be as stale as if it had been begun before, for `WEIGHTS_S` at most.
        """
        workers = list(workers)
        with self._changed:
            for worker in workers:
                ticket = self._filling.get(worker)
                if ticket is not None and (ticket.expired or ticket.session_id != session_id):
                    self._over.put(self._filling.pop(worker))
            lacking = [worker for worker in workers if worker not in self._filling]
            self._wanted.update(dict.fromkeys(lacking))
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._error is not None or not self._wanted.keys() & set(lacking),
                max_wait_s,
            )
            if self._error is not None:
                raise self._error
            if self._wanted.keys() & set(lacking):
                return False
            return model_version is None or not any(
                (self._filling[each].model_version or 0) > model_version
                and time.monotonic() - self._given_at[each] < WEIGHTS_S
                for each in workers
                if each in self._filling
            )

    def sent(self, fragment: Fragment) -> None:
        """Note that a worker has filled its fragment, which is about to be appended."""
        with self._changed:
            ticket = self._filling.pop(fragment.worker_id, None)
            if ticket is not None:
                self._sent[_key(fragment)] = ticket

    def ended(self, fragment: Fragment) -> None:
        """Note that a fragment was answered, or given up."""
        with self._changed:
            ticket = self._sent.pop(_key(fragment), None)
        if ticket is not None:
            self._over.put(ticket)

    def dropped(self, worker: str) -> None:
        """Note that a worker has given up the fragment that it was filling."""
        with self._changed:
            ticket = self._filling.pop(worker, None)
        if ticket is not None:
            self._over.put(ticket)

    def close(self, max_wait_s: float = ASK_S) -> None:
        """Give back all tickets, for at most *max_wait_s*; what is left expires."""
        with self._changed:
            self._is_closed = True
            self._error = self._error or ClosedError("the producer was closed")
            for ticket in (*self._filling.values(), *self._sent.values()):
                self._over.put(ticket)
            self._filling.clear()
            self._sent.clear()
            self._changed.notify_all()
        self._over.put(None)
        self._threads[1].join(max_wait_s)

    def _ask(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or self._is_closed)
                if self._is_closed:
                    return
                count = min(len(self._wanted), _TICKETS_MAX)
            try:
                tickets = self._client.tickets(count, ASK_S, lease_s=LEASE_S, buffer=self._buffer)
            except WaitElapsedError as error:
                if (words := self._throttle.words("wait")) is not None:
                    _log.info("environments wait for %d tickets: %s%s", count, error, words)
            except (ClosedError, InvalidRequestError) as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            except ReplayBufferError as error:
                if (words := self._throttle.words("error")) is not None:
                    _log.warning("no tickets could be taken: %s%s", error, words)
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closed, _RETRY_S)
            else:
                self._hand_out(tickets)

    def _hand_out(self, tickets: Sequence[HeldTicket]) -> None:
        with self._changed:
            for ticket in tickets:
                if self._is_closed or not self._wanted:
                    self._over.put(ticket)
                    continue
                ticket.__enter__()  # It is renewed from now on.
                worker = next(iter(self._wanted))
                del self._wanted[worker]
                self._filling[worker] = ticket
                self._given_at[worker] = time.monotonic()
            self._changed.notify_all()

    def _give_back(self) -> None:
        while (ticket := self._over.get()) is not None:
            with suppress(ReplayBufferError):  # It has ended by itself.
                ticket.give_back()


def _key(fragment: Fragment) -> tuple[str, str, int]:
    return fragment.session_id, fragment.worker_id, fragment.fragment_index
