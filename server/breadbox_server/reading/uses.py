"""When calls used each buffer, by which operators find the buffers that nothing uses any more."""

from collections import Counter
from collections.abc import Callable

from breadbox_server.base.clock import Clock
from breadbox_server.core.model.ids import BufferName


class Uses:
    """Calls and read leases that use a buffer now, and when one last did. Not durable."""

    def __init__(self, clock: Clock, exists: Callable[[BufferName], bool]) -> None:
        self._clock = clock
        self._exists = exists
        self._current: Counter[BufferName] = Counter()
        self._last_at: dict[BufferName, float] = {}
        """Missing for buffers that none has used yet."""
        self._started_at = clock.now()

    def begin(self, buffer: BufferName) -> None:
        """Count a use that goes on until `end`; the buffer need not exist."""
        self._current[buffer] += 1

    def end(self, buffer: BufferName) -> None:
        """End a use that began."""
        self._current[buffer] -= 1
        if not self._current[buffer]:
            del self._current[buffer]
        self.note(buffer)

    def note(self, buffer: BufferName) -> None:
        """Note that a buffer was used until now."""
        if self._exists(buffer):
            self._last_at[buffer] = self._clock.now()

    def forget(self, buffer: BufferName) -> None:
        """Forget when a buffer that was deleted was used."""
        self._last_at.pop(buffer, None)

    def idle_s(self, buffer: BufferName) -> float:
        """Return the seconds since the last use of a buffer; 0 while one goes on."""
        if buffer in self._current:
            return 0.0
        return self._clock.now() - self._last_at.get(buffer, self._started_at)
