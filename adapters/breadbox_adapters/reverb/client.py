"""Reverb's `reverb.Client` and `reverb.Server` on Breadbox."""

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from threading import Lock
from typing import Any, Self
from uuid import uuid4

import breadbox.client
from breadbox.local import ServerOptions, own_server
from breadbox.model.errors import DeadlineExceededError, UnavailableError
from breadbox.shared.loopback import loopback_host
from breadbox_adapters.reverb.checkpointers import DefaultCheckpointer
from breadbox_adapters.reverb.items import (
    ReplaySample,
    check_priority,
    flatten,
    fragment_of,
    map_leaves,
)
from breadbox_adapters.reverb.sampling import Draws, as_timesteps
from breadbox_adapters.reverb.sending import ItemSender, connect, known_tables, tables_of
from breadbox_adapters.reverb.tables import (
    Table,
    TableInfo,
    create_tables,
    info_of_table,
    publish_signature,
)
from breadbox_adapters.reverb.writers import TrajectoryWriter, Writer, cell_of


class Client:
    """Client of one server's tables. Thread-safe; a pickled copy has a connection of its own."""

    def __init__(self, server_address: str, **options: Any) -> None:
        """Connect on first use to "HOST:PORT" or "unix:PATH", with `breadbox.connect`'s options."""
        self._address = server_address
        self._options = options
        self._client = connect(server_address, options)
        self._sender = ItemSender(self._client)
        self._worker_id = f"reverb-{uuid4().hex}"
        self._lock = Lock()
        self._inserted_counts: dict[str, int] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Client, self._address, **self._options), ()

    def __repr__(self) -> str:
        return f"Client, server_address={self._address}"

    @property
    def server_address(self) -> str:
        """The server's address."""
        return self._address

    @property
    def breadbox(self) -> breadbox.client.Client:
        """The client of Breadbox underneath, for calls that Reverb lacks."""
        return self._client

    def close(self) -> None:
        """Close connections. Idempotent. Calls in progress fail."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def insert(self, data: Any, priorities: Mapping[str, float]) -> None:
        """Insert an item of one step, arrays in any structure, into each of some tables, as copies.

        Blocks until all tables have it.

        Raises:
            ValueError: There are no tables, a priority is not from 0 to 1e30, or a table's
                signature differs; nothing was inserted.
            TableNotFoundError: There is no such table; those before it have the item.
            ReverbError: See `breadbox.Client.append`.
        """
        if not priorities:
            raise ValueError("at least one table with a priority must be given")
        checked = {table: check_priority(priority) for table, priority in priorities.items()}
        step = map_leaves(lambda leaf: cell_of(leaf, (), None).array[None], data)
        for table in checked:
            signature = self._sender.signature_of(table)
            if signature is not None:
                signature.check(table, step, is_of_steps=True)
        for table, priority in checked.items():
            with self._lock:  # One at a time: items of a worker are announced in order.
                index = self._inserted_counts.get(table, 0)
                self._inserted_counts[table] = index + 1
                item = fragment_of(step, priority, worker_id=self._worker_id, index=index)
                self._sender.insert(item, table)

    def writer(
        self,
        max_sequence_length: int,
        delta_encoded: bool = False,
        chunk_length: int | None = None,
        max_in_flight_items: int | None = 25,
    ) -> Writer:
        """Return a writer of items that are the latest steps, whole, at most `max_sequence_length`.

        `create_item` blocks at `max_in_flight_items` unconfirmed items, if not None. The others
        have no effect; for compression pass the client a codec, such as `codecs="zstd"`.
        """
        return Writer(self._sender, max_sequence_length, max_in_flight_items)

    def trajectory_writer(
        self, num_keep_alive_refs: int, *, validate_items: bool = True
    ) -> TrajectoryWriter:
        """Return a writer of items that are parts of the latest `num_keep_alive_refs` steps.

        With `validate_items` it checks them against the signatures of their tables.
        """
        return TrajectoryWriter(self._sender, num_keep_alive_refs, validates_items=validate_items)

    def sample(
        self,
        table: str,
        num_samples: int = 1,
        *,
        emit_timesteps: bool = True,
        unpack_as_table_signature: bool = False,
        timeout_ms: int | None = None,
    ) -> Iterator[Any]:
        """Draw `num_samples` items as `ReplaySample`s, or one list for each item, a sample a step.

        Blocks until there is an item, for `timeout_ms` milliseconds if not None. Data is a flat
        list, or with `unpack_as_table_signature` in the structure in which it was written.

        Raises:
            ValueError: `num_samples` is below 1, or an item cannot be split into steps.
            DeadlineExceededError: No item came within the timeout.
            TableNotFoundError: There is no such table.
        """
        if num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, got {num_samples}")
        wait_s = math.inf if timeout_ms is None else timeout_ms / 1000
        items = Draws(self._client, table, at_once=num_samples, wait_s=wait_s)(num_samples)
        if not unpack_as_table_signature:
            items = ((info, flatten(tree)) for info, tree in items)
        return itertools.starmap(as_timesteps if emit_timesteps else ReplaySample, items)

    def mutate_priorities(
        self,
        table: str,
        updates: Mapping[int, float] | None = None,
        deletes: Iterable[int] | None = None,
    ) -> None:
        """Set priorities by key, from 0 to 1e30, and delete items; keys that are gone are ignored.

        Raises:
            ValueError: A priority is out of its range; nothing was changed.
            TableNotFoundError: There is no such table.
        """
        priorities = {int(key): check_priority(each) for key, each in (updates or {}).items()}
        with known_tables(self._client, table):
            self._client.update_priorities(
                priorities, delete=[int(key) for key in deletes or ()], buffer=table
            )

    def reset(self, table: str) -> None:
        """Empty a table and its limiter's counts, for all its users.

        Raises `TableNotFoundError` if there is none.
        """
        signature = self._sender.signature_of(table)
        with known_tables(self._client, table):
            state = self._client.start_session(buffer=table, take_over=True)
        if signature is not None:
            publish_signature(self._client, table, state, signature)

    def server_info(self, timeout: int | None = None) -> dict[str, TableInfo]:
        """Describe all tables. The buffer "default" of every server is among them once it was used.

        Raises `DeadlineExceededError` if there is no answer within `timeout` seconds, if not None.
        """
        if timeout is None:
            described = tables_of(self._client)
        else:
            own = {**self._options, "deadline_s": float(timeout), "reconnect_s": float(timeout)}
            try:
                with connect(self._address, own) as client:
                    described = tables_of(client)
            except UnavailableError as error:
                raise DeadlineExceededError(
                    f"the server at {self._address} did not answer within {timeout} s: {error}"
                ) from error
        tables = {}
        for each in described:
            # Describing starts no session.
            known = self._sender.signature_of(each.name) if each.session_id else None
            tables[each.name] = info_of_table(each, None if known is None else known.specs)
        return tables

    def checkpoint(self) -> str:
        """Return the server's address: it always keeps its tables, so nothing is written here.

        A server restarted on the same store has all confirmed inserts, priorities, counts and the
        limiter's state. Raises `ReverbError` if some of it may not be durable.
        """
        for each in self._client.list_buffers():
            if each.state.outage:
                raise UnavailableError(f"not everything may be durable: {each.state.outage}")
        return self._address


class Server:
    """A server on the loopback address, in a child process that ends with this process."""

    def __init__(
        self,
        tables: Sequence[Table],
        port: int | None = None,
        checkpointer: DefaultCheckpointer | None = None,
        **options: Any,
    ) -> None:
        """Start it, in about a second. *port* None: a free one; *options* are `local_server`'s.

        Without a `checkpointer` tables are in memory, and end with the server.

        Raises:
            ValueError: There is no table, or two have one name.
            UnavailableError: It could not be started, for example because the port is taken.
            ModuleNotFoundError: `breadbox[server]` is not installed.
        """
        if checkpointer is not None:
            options["store"] = f"file://{checkpointer.path}"
        with ExitStack() as started:
            self._server = started.enter_context(own_server(ServerOptions(**options)))  # type: ignore[typeddict-item]
            if port is not None:
                self._server.address = f"{loopback_host()}:{port}"
            self._server.start()
            client = started.enter_context(connect(self._server.address, {}))
            create_tables(client, tables)
            self._left = started.pop_all()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._server.address.rpartition(":")[2])

    def localhost_client(self) -> Client:
        """Return a client of it."""
        return Client(f"localhost:{self.port}")

    def stop(self) -> None:
        """End it. Idempotent."""
        self._left.close()

    def wait(self) -> None:
        """Block until it ends, which it does by itself only with an error, or until Ctrl-C."""
        while self._server.process_id is not None:
            time.sleep(0.2)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
