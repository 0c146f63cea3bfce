"""Heartbeats of a server that starts: it has claimed its journal, and has no turns yet."""

import logging
import threading

from breadbox_server.journal.storage.claims import RENEW_S
from breadbox_server.journal.storage.interface import (
    JournalArchive,
    JournalError,
    JournalUnavailableError,
)

log = logging.getLogger(__name__)


class Heartbeats:
    """Sends heartbeats from a thread, once there is a claim, until it is ended.

    Meanwhile the journal is read back, which blocks the loop.

    Args:
        archive: Through which the journal is claimed.
    """

    def __init__(self, archive: JournalArchive) -> None:
        self._archive = archive
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="breadbox-heartbeats", daemon=True)

    def start(self) -> None:
        """Show them from now on."""
        self._thread.start()
        """Send them from now on."""

    def is_alive(self) -> bool:
        """Whether more are to come."""
        return self._thread.is_alive()

    def end(self) -> None:
        """Show none any more, but for one that is under way. Idempotent."""
        self._ended.set()
        """Send none any more, but for one that is under way. Idempotent."""

    def close(self) -> None:
        """Send none any more; block until the one under way is sent."""
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
