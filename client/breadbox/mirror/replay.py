"""A step memory that fills itself from a buffer."""

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

from breadbox.client import Client, connect
from breadbox.mirror.following import MirrorReader, Selection
from breadbox.mirror.memory import StepMemory
from breadbox.mirror.sharing.process import AttachedSource, OwnedSource, ProcessSource
from breadbox.mirror.storage.rings import Memory
from breadbox.mirror.storage.step_storage import FilledStepStorage, StepStorage
from breadbox.model.checks import check_whole, checked_columns
from breadbox.model.errors import InvalidRequestError
from breadbox.model.options import ClientOptions
from breadbox.shared.process_bound import ProcessBound


class ReplayMirror(ProcessBound, StepMemory):
    """A local copy of a buffer's latest steps, which a thread or process keeps current.

    ```python
    from breadbox.mirror import ReplayMirror

    with ReplayMirror("localhost:50051", process=True, capacity_steps=100_000) as mirror:
        mirror.catch_up(timeout_s=60)
        print(len(mirror), mirror.session_id, mirror.lag_s, mirror.skipped_chunk_count)
    ```

    Its contents follow from the buffer alone. A learner that is killed and restarted has the same
    steps, but for those that left the buffer meanwhile. A new session empties the mirror. So does a
    buffer that was restored from an older state; the mirror then reads it again. While server or
    store are unreachable, the mirror keeps its steps. An error that does not pass by itself, such
    as refused credentials, ends the thread, and the next call that draws or waits raises it.

    A call that waits for steps reports what keeps them: no session, no server, no fragments, or
    steps refused as stale. It does so in its error when the time is over, and in a line of the log
    every 30 s. A warning at the start names limits of the buffer that are for on-policy learners.

    Use it as a context manager, or call `close`.

    Args:
        client: A client, or the address of a server, HOST:PORT, for a client of the mirror's own. A
            client that is passed stays open, and the thread uses it.
        buffer: The buffer's name, or None for the client's buffer.
        subscription: Name of a subscription to read by, used by no other reader, or None to read
            what the buffer holds. The mirror acknowledges chunks once it has stored them. A
            retaining subscription also returns chunks that left while no mirror ran.
        capacity_steps: Number of steps to keep; see `StepMemory`.
        seed: Seed of all draws.
        frame_stack: Observations that are stacks of frames; see `StepMemory`.
        columns: Paths of the arrays to keep, such as "obs.image", or None for all.
        process: True to fill the memory from another process instead of a thread. That process
            starts and ends with this mirror, and both share the memory. Filling then hardly slows
            draws down, and other processes of this host can draw from it, see `share`. Draws are
            the same. Linux only. The process makes a client of its own; `client` is an address, or
            a `breadbox.Client`. A forked child gets ClosedError from this mirror, and can `attach`.
        connection: Further arguments of `breadbox.connect`, such as `token`, for an address.

    Raises:
        InvalidRequestError: An argument is out of its range.
    """

    _kind = "ReplayMirror"
    _remedy = (
        "make one in each process; or make it with process=True, and attach in this process: "
        "ReplayMirror.attach(address), with the address that share() gave before"
    )

    def __init__(
        self,
        client: Client | str,
        *,
        buffer: str | None = None,
        subscription: str | None = None,
        capacity_steps: int = 1_000_000,
        seed: int | None = None,
        frame_stack: Mapping[str, int] | None = None,
        columns: Sequence[str] | None = None,
        process: bool = False,
        **connection: Any,
    ) -> None:
        check_whole("capacity_steps", capacity_steps, 1)
        selection = Selection(buffer, subscription, checked_columns(columns))
        stack = frame_stack or {}
        if process:
            server, options = _address_and_options(client, buffer, connection)
            owned = OwnedSource(server, options, selection, int(capacity_steps), stack)
            self._enter(owned.held, seed, owned)
            return
        held = FilledStepStorage(capacity_steps, stack, Memory())
        own = (
            connect(client, buffer=buffer or "default", **connection)
            if isinstance(client, str)
            else None
        )
        reader: Any = own or client
        mirror_reader = MirrorReader(held, self.extend, reader, selection, own_client=own)
        self._enter(held, seed, mirror_reader)
        mirror_reader.start()

    def _enter(
        self, held: StepStorage, seed: int | None, source: MirrorReader | ProcessSource
    ) -> None:
        self._source = source
        self._is_closed = False
        self._begin(held, seed)

    @classmethod
    def attach(cls, address: str, *, seed: int | None = None) -> Self:
        """Return a mirror that shares the steps of one in another process of this user and host.

        ```python
        address = mirror.share()  # In the process of the learner.
        other = ReplayMirror.attach(address, seed=2)
        ```

        The steps are stored once. Each process has its own draws and priorities: a priority update
        is visible in that process alone. The mirror ends with the process that created it; the next
        call that draws or waits then raises ClosedError. `clear` empties it for all processes. Give
        each process another `seed`, or they draw the same steps. Blocks for at most 30 s.

        Raises:
            InvalidRequestError: The address is not one of `share`.
            ClosedError: No mirror answered within 30 s.
            PermissionDeniedError: The mirror is another user's.
        """
        mirror = cls.__new__(cls)
        attached = AttachedSource(address)
        mirror._enter(attached.held, seed, attached)  # noqa: SLF001 - its own
        return mirror

    def share(self) -> str:
        """Return an address at which other processes of this host can `attach`.

        ```python
        print(mirror.share())
        ```

        Raises:
            InvalidRequestError: The mirror was made without `process`.
        """
        if not isinstance(self._source, ProcessSource):
            raise InvalidRequestError(
                "process", "must be True where a mirror is made that others attach to"
            )
        return self._source.address

    @property
    def session_id(self) -> str:
        """Session of the steps, or empty before the first read and without a current session."""
        return self._source.progress().session_id

    @property
    def skipped_chunk_count(self) -> int:
        """Number of chunks that left the buffer before they were loaded, or cannot be read.

        With a subscription, chunks that it had passed before do not count.
        """
        return self._source.progress().skipped_chunk_count

    @property
    def lag_s(self) -> float:
        """Seconds for which the mirror has been behind the buffer; 0 while it keeps up."""
        return max(0.0, time.monotonic() - self._source.progress().behind_since)

    def catch_up(self, timeout_s: float | None = None) -> None:
        """Block until the mirror has all steps that the buffer holds now.

        ```python
        mirror.catch_up(timeout_s=60)
        ```

        Every fragment is then in the mirror if its append was answered before this call.

        Raises:
            WaitElapsedError: Steps were missing after `timeout_s`; None waits without a limit.
            ReplayBufferError: The mirror's thread failed, or the server is unreachable.
        """
        self._raise_failure()
        source, target = self._source, self._source.target()
        self._wait_for(lambda: target.is_met(source.progress()), "all steps", timeout_s)

    @property
    def closed(self) -> bool:
        """True after `close` was called."""
        return self._is_closed

    def close(self) -> None:
        """End the thread. Idempotent; blocks for up to a second, and raises nothing.

        ```python
        mirror.close()
        ```

        Its steps can still be sampled.
        """
        self._is_closed = True
        if self._is_here:
            self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _waiting(self) -> AbstractContextManager[None]:
        return self._source.waiting()

    def _raise_failure(self) -> None:
        self._check_process()
        if self._source.failure is not None:
            raise self._source.failure

    def _why_nothing_comes(self) -> str:
        return self._source.why_nothing_comes()


def _address_and_options(
    client: Client | str, buffer: str | None, connection: dict[str, Any]
) -> tuple[str, ClientOptions]:
    """Return the address and options for a process's client like this one."""
    if isinstance(client, str):
        with connect(client, buffer=buffer or "default", **connection) as made:
            return _address_and_options(made, buffer, {})
    if not isinstance(client, Client):
        raise InvalidRequestError(
            "process", "needs the address of a server, or a breadbox.Client of one"
        )
    return client.address, client._context.options  # noqa: SLF001 - the same library's
