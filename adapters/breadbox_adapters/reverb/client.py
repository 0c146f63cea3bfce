"""The client: Reverb's `reverb.Client` on a server of Breadbox."""

import math
from collections.abc import Iterable, Iterator, Mapping
from threading import Lock
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

import breadbox.client
from breadbox.model.errors import BufferNotFoundError, UnavailableError
from breadbox.model.types import BufferDescription
from breadbox_adapters.reverb.errors import DeadlineExceededError
from breadbox_adapters.reverb.items import ReplaySample, check_priority, fragment_of
from breadbox_adapters.reverb.sampling import Draws, as_timesteps
from breadbox_adapters.reverb.sending import ItemSender, connect, not_found, tables_of
from breadbox_adapters.reverb.signatures import tell_signature
from breadbox_adapters.reverb.structures import flatten, map_leaves
from breadbox_adapters.reverb.tables import TableInfo, info_of_table
from breadbox_adapters.reverb.writers import TrajectoryWriter, Writer


class Client:
    """Inserts into, samples from and looks at the tables of one server. Thread-safe.

    It connects when it is first used, and may be pickled: a copy has a connection of its own.
    """

    def __init__(self, server_address: str, **options: Any) -> None:
        """Connect to nothing yet.

        Args:
            server_address: "HOST:PORT", or "unix:PATH".
            **options: Of `breadbox.connect`, such as `token`, `tls` and `reconnect_s`.
        """
        self._address = server_address
        self._options = options
        self._client = connect(server_address, options)
        self._sender = ItemSender(self._client)
        self._worker_id = f"reverb-{uuid4().hex}"
        self._lock = Lock()
        self._inserted_counts: dict[str, int] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self._address, self._options)

    def __repr__(self) -> str:
        return f"Client, server_address={self._address}"

    @property
    def server_address(self) -> str:
        """Of the server."""
        return self._address

    @property
    def breadbox(self) -> breadbox.client.Client:
        """The client of Breadbox that it uses, for what Reverb has no word for."""
        return self._client

    def close(self) -> None:
        """Close connections. Idempotent. Calls under way fail."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def insert(self, data: Any, priorities: Mapping[str, float]) -> None:
        """Insert an item of one step into each of some tables; blocks until all have it.

        Args:
            data: Arrays in any structure.
            priorities: By table; finite, at least 0. Each table gets a copy.

        Raises:
            ValueError: There are no tables, a priority is none, or the signature of a table is
                another; nothing was inserted.
            TableNotFoundError: There is no such table; those before it have the item.
            ReverbError: As `breadbox.Client.append`.
        """
        if not priorities:
            raise ValueError("at least one table with a priority must be given")
        checked = {table: check_priority(priority) for table, priority in priorities.items()}
        step = map_leaves(lambda leaf: _as_step(leaf), data)
        for table in checked:
            signature = self._sender.signature_of(table)
            if signature is not None:
                signature.require(table, step, is_of_steps=True)
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
        """A writer whose items are the latest steps, whole.

        Args:
            max_sequence_length: Steps of the longest item.
            delta_encoded: No effect; give the client a codec instead, such as `codecs="zstd"`.
            chunk_length: No effect.
            max_in_flight_items: Unconfirmed items at which `create_item` blocks; None: it does not.
        """
        return Writer(self._sender, max_sequence_length, max_in_flight_items)

    def trajectory_writer(
        self, num_keep_alive_refs: int, *, validate_items: bool = True
    ) -> TrajectoryWriter:
        """A writer whose items are parts of a history.

        Args:
            num_keep_alive_refs: Latest steps that items may be made of.
            validate_items: Whether items are held to the signatures of their tables.
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
        """Draw items.

        Args:
            table: Of which.
            num_samples: How many, at least 1.
            emit_timesteps: Give a list of samples for each item, one for each step.
            unpack_as_table_signature: Give data in the structure in which they were written, rather
                than as a flat list.
            timeout_ms: Milliseconds to wait for an item; None: for as long as it takes.

        Yields:
            A `ReplaySample`, or a list of them. Blocks until there is an item.

        Raises:
            ValueError: `num_samples` is below 1, or an item cannot be split into steps.
            DeadlineExceededError: No item came within the timeout.
            TableNotFoundError: There is no such table.
        """
        if num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, got {num_samples}")
        wait_s = math.inf if timeout_ms is None else timeout_ms / 1000
        draws = Draws(self._client, table, at_once=num_samples, wait_s=wait_s)
        return self._samples(draws(num_samples), emit_timesteps, unpack_as_table_signature)

    def _samples(
        self, items: Iterator[tuple[Any, Any]], emits_timesteps: bool, unpacks: bool
    ) -> Iterator[Any]:
        for info, tree in items:
            data = tree if unpacks else flatten(tree)
            yield as_timesteps(info, data) if emits_timesteps else ReplaySample(info, data)

    def mutate_priorities(
        self,
        table: str,
        updates: Mapping[int, float] | None = None,
        deletes: Iterable[int] | None = None,
    ) -> None:
        """Delete items, and change the priorities of others.

        Args:
            table: Of which.
            updates: New priorities, finite and at least 0, by key.
            deletes: Keys. Those of items that are gone, here and in `updates`, are ignored.

        Raises:
            ValueError: A priority is none; nothing was changed.
            TableNotFoundError: There is no such table.
        """
        priorities = {int(key): check_priority(each) for key, each in (updates or {}).items()}
        try:
            self._client.update_priorities(
                priorities, delete=[int(key) for key in deletes or ()], buffer=table
            )
        except BufferNotFoundError as error:
            raise not_found(self._client, table) from error

    def reset(self, table: str) -> None:
        """Empty a table, with its limiter: what it was told so far is forgotten.

        Raises:
            TableNotFoundError: There is no such table.
        """
        signature = self._sender.signature_of(table)
        try:
            state = self._client.start_session(buffer=table)
        except BufferNotFoundError as error:
            raise not_found(self._client, table) from error
        if signature is not None:
            tell_signature(self._client, table, state, signature)

    def server_info(self, timeout: int | None = None) -> dict[str, TableInfo]:
        """What tables there are, and what is in them.

        The buffer "default", which every server has, is one of them once somebody has used it.

        Args:
            timeout: Seconds to wait for a server that is away; None: as the client was told.

        Raises:
            DeadlineExceededError: There was no answer within the timeout.
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
        return {each.name: info_of_table(each, self._specs_of(each)) for each in described}

    def _specs_of(self, described: BufferDescription) -> Any:
        # No session is started by asking.
        known = self._sender.signature_of(described.name) if described.session_id else None
        return None if known is None else known.specs

    def checkpoint(self) -> str:
        """Where the server keeps its tables. It does so all the time: nothing is left to write.

        What an insert was confirmed for, priorities, counts and the limiter's state included, is
        there when a server is started on the same store and journal again.

        Returns:
            The server's address: a checkpoint is no file that one could load elsewhere.

        Raises:
            ReverbError: The server does not answer, or cannot write at the moment.
        """
        for each in self._client.list_buffers():
            if each.state.outage:
                raise UnavailableError(f"not everything may be durable: {each.state.outage}")
        return self._address


def _as_step(leaf: Any) -> Any:
    from breadbox_adapters.reverb.history import cell_of

    return cell_of(leaf, (), None).array[None]


def _made(address: str, options: Mapping[str, Any]) -> Client:
    return Client(address, **options)
