"""A server of one's own with tables: Reverb's `reverb.Server`."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from breadbox.client import connect
from breadbox.local import ServerOptions, own_server
from breadbox_adapters.reverb.client import Client
from breadbox_adapters.reverb.tables import Table, create_tables

_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class DefaultCheckpointer:
    """Where a server keeps its tables; one that is started there again has them as they were."""

    path: str
    group: str = ""


class Server:
    """A server in a child process of this machine, which ends with this process.

    It listens on the loopback address. For other machines start `breadbox serve`, and make the
    tables on it with `create_tables`.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        port: int | None = None,
        checkpointer: DefaultCheckpointer | None = None,
        **options: Any,
    ) -> None:
        """Start it; takes about a second.

        Args:
            tables: At least one, each with a name of its own.
            port: To listen on; None: one that is free.
            checkpointer: Where tables are kept; None: in memory, and gone with the server.
            **options: Of `breadbox.local_server`.

        Raises:
            ValueError: There is no table, or two have one name.
            UnavailableError: It could not be started, as when the port is taken.
            ModuleNotFoundError: `breadbox[server]` is not installed.
        """
        if checkpointer is not None:
            options["store"] = f"file://{checkpointer.path}"
        with ExitStack() as started:
            self._server = started.enter_context(own_server(ServerOptions(**options)))  # type: ignore[typeddict-item]
            if port is not None:
                self._server.address = f"127.0.0.1:{port}"
            self._server.start()
            client = started.enter_context(connect(self._server.address))
            create_tables(client, tables)
            self._left = started.pop_all()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.address.rpartition(":")[2])

    def localhost_client(self) -> Client:
        """A client of it."""
        return Client(f"localhost:{self.port}")

    def stop(self) -> None:
        """End it. Idempotent."""
        self._left.close()

    def wait(self) -> None:
        """Block until it ends, which it does by itself only with an error, or until Ctrl-C."""
        while self._server.process_id is not None:
            time.sleep(_LOOK_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
