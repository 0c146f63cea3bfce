"""What both clients are, whichever way they make their calls."""

import random
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from breadbox.model.moved import moved
from breadbox.model.options import ClientOptions
from breadbox.operations.operations import Context, Origin, StoreSlot
from breadbox.shared.outages import Outages
from breadbox.shared.process_bound import ProcessBound
from breadbox.stores.base import PayloadStore


class Connected(ProcessBound):
    """Base of the clients."""

    _interpreter: Any

    def __init__(
        self,
        address: str,
        options: ClientOptions,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        store: PayloadStore | None = None,
    ) -> None:
        """Use `connect` instead; the keyword arguments are for tests."""
        self._context = Context(
            address=address,
            options=options,
            now=clock,
            rng=rng or random.Random(),
            new_id=lambda: uuid4().hex,
            outages=Outages(clock),
            slot=StoreSlot(store),
        )
        self._begin()

    def _begin(self) -> None:
        """Make the interpreter of this client's kind."""
        raise NotImplementedError

    @property
    def address(self) -> str:
        """The server's address, as `connect` took it."""
        return self._context.address

    @property
    def buffer(self) -> str:
        """The buffer of calls that name none."""
        return self._context.options.buffer

    @property
    def closed(self) -> bool:
        """True after `close` was called."""
        closed: bool = self._interpreter.closed
        return closed

    @property
    def outage(self) -> str:
        """What is failing and being retried, for how long, and why; empty if nothing is."""
        return self._context.outages.words

    def declare_origin(self, origin: Mapping[str, str]) -> None:
        """Say what later fragments of this client come from, such as wrappers of an environment.

        ```python
        client.declare_origin({"environment wrappers": "FrameStackObservation(stack_size=4)"})
        ```

        Makes no call: the first fragments of each session bring it to the server. If another
        producer of the session said another text under a name, the append raises
        SchemaMismatchError, and nothing of it is admitted. Producers that do not say a name are not
        compared. At most 16 names, and 512 printable characters for a name or text.
        """
        self._context.origin = Origin(dict(origin))

    def __repr__(self) -> str:
        package, _, _ = type(self).__module__.rpartition(".")
        state = " closed" if self.closed else ""
        return f"<{package}.Client of {self.address}, buffer {self.buffer!r}{state}>"

    if not TYPE_CHECKING:  # Type checkers are to find old names.

        def __getattr__(self, name: str) -> Any:
            return moved(self, name)
