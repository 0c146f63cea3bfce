"""Signs of life of a server that starts: it has claimed its journal, and has no turns yet."""

import logging
import threading

from breadbox_server.journal.claims import RENEW_S
from breadbox_server.journal.storage import JournalArchive, JournalError, JournalUnavailableError

log = logging.getLogger(__name__)


class LifeSigns:
    """Shows signs of life from a thread, once there is a claim, until it is ended.

    Meanwhile the journal is read back, which holds up the loop.

    Args:
        archive: Through which the journal is claimed.
    """

    def __init__(self, archive: JournalArchive) -> None:
        self._archive = archive
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="breadbox-life-signs", daemon=True)

    def start(self) -> None:
        """Show them from now on."""
        self._thread.start()

    def is_alive(self) -> bool:
        """Whether more are to come."""
        return self._thread.is_alive()

    def end(self) -> None:
        """Show none any more, but for one that is under way. Idempotent."""
        self._ended.set()

    def close(self) -> None:
        """Show none any more; blocks until the one under way is shown."""
        self.end()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(RENEW_S):
            try:
                self._archive.show_life()
            except JournalUnavailableError as error:
                log.debug("no sign of life: %s", error)
            except JournalError as error:
                # Whoever writes the first turn is told, too, and ends.
                log.debug("no signs of life any more: %s", error)
                return
