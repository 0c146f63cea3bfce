"""Give an adapter a run's buffer; its own steps come back by the mirror once admitted."""

import logging
import os
import weakref
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any
from uuid import uuid4

from numpy.typing import ArrayLike

from breadbox.client import Client
from breadbox.environment import connect_from_environment
from breadbox.mirror import ReplayMirror
from breadbox.model.errors import (
    BufferExistsError,
    BufferNotFoundError,
    InvalidRequestError,
    PermissionDeniedError,
    ReplayBufferError,
    SchemaMismatchError,
    WaitElapsedError,
)
from breadbox.model.fragment import Tree
from breadbox.model.trees import field_of
from breadbox.model.types import ArrayType, BufferConfig, FullPolicy, SchemaPolicy
from breadbox.writing.step_writer import StepWriter

_log = logging.getLogger(__name__)

STEPS_PER_FRAGMENT = 32
FLUSH_S = 0.5
"""Most seconds until other readers can see a step."""
LAG_STEPS = 64
"""Most steps of an environment that may still be on their way when a sample is drawn."""
ARRIVAL_WAIT_S = 60.0
FOUND_WAIT_S = 1.0
"""Most seconds for which a run's steps are read before their number is logged."""
CLOSE_WAIT_S = 10.0
CHUNKS_MAX = 2**31 - 1


class RunReplay:
    """A run's buffer, its mirror and a writer. Only `mirror` is thread-safe. `close` it."""

    def __init__(
        self,
        *,
        server: str | None = None,
        run: str | None = None,
        buffer: str | None = None,
        capacity_steps: int,
        env_count: int = 1,
        prefix: str = "run",
        seed: int | None = None,
        frame_stack: Mapping[str, int] | None = None,
        arrival_wait_s: float = ARRIVAL_WAIT_S,
        process: bool = False,
        must_exist: bool = False,
        arrays: Mapping[str, ArrayType] | None = None,
    ) -> None:
        """Find or create the buffer, enter the session, begin to mirror it, and log where steps go.

        `SpacedReplay` explains the shared arguments. Token and certificates come from the
        environment, so that no saved model holds them. `capacity_steps` bounds the mirror and a new
        buffer. With `must_exist`, buffer and session must exist. `arrays` are a step's types.

        InvalidRequestError: another run's session is current. SessionEndedError: the run's ended.
        SchemaMismatchError: other arrays. BufferNotFoundError: none exists, or none can be created.
        """
        self.is_own = run is None and buffer is None
        made_up = f"{prefix}-{uuid4().hex[:8]}"
        self.buffer = buffer or run or made_up
        self.arrival_wait_s = arrival_wait_s
        self._server = server
        self._env_count = env_count
        self._writer: StepWriter | None = None
        self._model_version: int | None = None
        self._added = self._seen = 0
        self.client = connect_from_environment(server=server, buffer=self.buffer)
        with ExitStack() as undo:
            undo.callback(self.client.close)
            if not self._is_there(must_exist):
                self._make(capacity_steps)
                if self.is_own:
                    undo.callback(self._delete_vainly_made)
            self.run = self._enter(run, made_up, must_exist)
            if arrays:
                self._check_arrays(arrays)
            self.mirror = ReplayMirror(
                self.client,
                buffer=self.buffer,
                capacity_steps=capacity_steps,
                seed=seed,
                frame_stack=frame_stack,
                process=process,
            )
            undo.callback(self.mirror.close)
            self._log_start()
            undo.pop_all()
        self._state: dict[str, Any] = {
            "writer": None,
            "deletes": self.is_own,
            "process_id": os.getpid(),
        }
        """What `_end` needs. It must not refer to this object, which would then never be freed."""
        self._end = weakref.finalize(
            self, _end, self.client, self.mirror, server, self.buffer, self._state
        )

    # Buffer and session ------------------------------------------------------------------------

    def _is_there(self, must_exist: bool) -> bool:
        try:
            self.client.get_buffer(self.buffer)
        except BufferNotFoundError as error:
            if must_exist:
                raise BufferNotFoundError(
                    self.buffer,
                    f"the steps of the checkpoint were in buffer {self.buffer!r}, which is not at "
                    f"{self.client.address}: it was deleted, or the server is another one. A "
                    "checkpoint has no steps in it; to continue without them, do not "
                    "load it: a new buffer is filled",
                ) from error
            return False
        return True

    def _make(self, capacity_steps: int) -> None:
        chunks = 4 * (capacity_steps // STEPS_PER_FRAGMENT) + 1024
        config = BufferConfig.preset(
            "off-policy",
            capacity_chunks=min(chunks, CHUNKS_MAX),
            fragments_per_chunk=1,
            full_policy=FullPolicy.EVICT,
        )
        try:
            self.client.create_buffer(self.buffer, config)
        except BufferExistsError:
            return  # Another process of the run was faster.
        except PermissionDeniedError as error:
            raise BufferNotFoundError(
                self.buffer,
                f"no buffer is named {self.buffer!r}, and making one takes a token of the role "
                f"admin: breadbox buffers create {self.buffer} --preset off-policy",
            ) from error

    def _delete_vainly_made(self) -> None:
        with suppress(ReplayBufferError):
            self.client.delete_buffer(self.buffer)

    def _enter(self, run: str | None, made_up: str, must_exist: bool) -> str:
        current = self.client.get_buffer(self.buffer).session_id
        if run is None and current:
            return current
        if current and current != run:
            raise InvalidRequestError(
                "run",
                f"is {run!r}, but session {current!r} of another run is current in buffer "
                f"{self.buffer!r}: leave out `buffer`, or name another one, and this run has its "
                f"own; say run={current!r} to go on with that run's data; or end it, if nobody "
                f"needs it any more: breadbox buffers end-session {self.buffer}",
            )
        if must_exist and not current:
            raise InvalidRequestError(
                "run", f"{run!r} has no data any more: buffer {self.buffer!r} has no session"
            )
        return self.client.start_session(run or made_up, buffer=self.buffer).session_id

    def _check_arrays(self, arrays: Mapping[str, ArrayType]) -> None:
        described = self.client.get_buffer(self.buffer)
        if not described.schema or described.config.schema is SchemaPolicy.ANY:
            return
        there = {
            path: array
            for path, array in described.schema.items()
            if field_of(path) in ("obs", "action")
        }
        for path in sorted({**there, **arrays}):
            wanted, got = (str(each.get(path, "nothing")) for each in (there, arrays))
            if wanted != got:
                raise SchemaMismatchError(
                    f"run {self.run!r} has steps of other spaces in buffer {self.buffer!r}: {path} "
                    f"is {wanted} in them, and {got} with the spaces that were given. A training "
                    f"with another environment needs another `run`; or delete the steps: breadbox "
                    f"buffers delete {self.buffer}",
                    path,
                    wanted,
                    got,
                )

    def _log_start(self) -> None:
        # A warning, because INFO is hidden by default: a name that is mistyped, or was used before,
        # must be noticed now and not after hours.
        where = f"buffer {self.buffer!r} of {self.client.address}"
        if self.is_own:
            _log.warning(
                "steps go to %s, which is deleted when this ends, and stays behind when it is "
                "killed (breadbox buffers delete %s); with a `run` they are found again",
                where,
                self.buffer,
            )
            return
        more = ""
        try:
            self.mirror.catch_up(FOUND_WAIT_S)
        except WaitElapsedError:
            more = ", and more to come"
        _log.warning(
            "steps go to %s; found there for run %r: %d%s", where, self.run, len(self.mirror), more
        )

    # Steps in ----------------------------------------------------------------------------------

    def add(
        self,
        obs: Tree,
        action: Tree,
        reward: ArrayLike,
        next_obs: Tree,
        terminated: ArrayLike,
        truncated: ArrayLike,
        *,
        is_same_step: bool = False,
    ) -> None:
        """Add a step of each environment; see `StepWriter.add`.

        `is_same_step` says that they are known to reset in the step that ends an episode. Otherwise
        environments that reset in the next step are found by their observations, and refused.
        """
        if self._writer is None:
            self._writer = self._state["writer"] = self._make_writer()
        if is_same_step:
            self._writer._after_ends.believe()  # noqa: SLF001 - the same library's
        self._writer.add(obs, action, reward, next_obs, terminated, truncated)
        self._added += self._env_count

    def act_with(self, model_version: int) -> None:
        """Label the steps that are added from now on with the version that acts."""
        self._model_version = model_version
        if self._writer is not None:
            self._writer.model_version = model_version

    def _make_writer(self) -> StepWriter:
        schema = self.client.get_buffer(self.buffer).config.schema
        if schema is SchemaPolicy.ONE:
            raise InvalidRequestError(
                "buffer",
                f"{self.buffer!r} takes fragments of one length only, and single steps are to be "
                f"learned from as they come: breadbox buffers update {self.buffer} --schema ragged",
            )
        writer = StepWriter(
            self.client,
            env_count=self._env_count,
            steps_per_fragment=STEPS_PER_FRAGMENT,
            flush_s=FLUSH_S,
            autoreset="same_step",
            session_id=self.run,
            buffer=self.buffer,
        )
        if self._model_version is not None:
            writer.model_version = self._model_version
        return writer

    # Steps out ---------------------------------------------------------------------------------

    def catch_up(self) -> None:
        """Wait until the mirror has all steps that the buffer holds now, this writer's included.

        Raises `WaitElapsedError` after about twice `arrival_wait_s`, and errors of sending.
        """
        if self._writer is not None:
            try:
                self._writer.flush(max_wait_s=self.arrival_wait_s)
            except TimeoutError as error:
                raise WaitElapsedError(
                    self.arrival_wait_s, "the service has not taken them", "own steps"
                ) from error
        self.mirror.catch_up(self.arrival_wait_s)
        self._seen = self._added

    def make_ready(self) -> None:
        """Wait before a draw if the mirror is empty, or if too many own steps are on their way."""
        lag_max = LAG_STEPS * self._env_count
        is_empty = not len(self.mirror)
        if is_empty or self._seen == 0 or self._added - self._seen > lag_max:
            self.catch_up()
        if is_empty:
            self.mirror.wait_until(1, self.arrival_wait_s)

    def clear(self) -> None:
        """Empty the mirror; the server keeps the steps."""
        self.catch_up()
        self.mirror.clear()

    # Lifecycle ---------------------------------------------------------------------------------

    def keep(self) -> dict[str, Any]:
        """Return where the data is, for a checkpoint; `close` then no longer deletes it."""
        self.is_own = self._state["deletes"] = False
        if self._writer is not None:
            self._writer.flush(max_wait_s=self.arrival_wait_s)
        return {"server": self._server, "run": self.run, "buffer": self.buffer}

    def close(self) -> None:
        """Send what is left, stop, and delete a buffer that was for this run alone. Idempotent."""
        self._end()


def _end(
    client: Client, mirror: ReplayMirror, server: str | None, buffer: str, state: Mapping[str, Any]
) -> None:
    """End a run when it is closed or freed, or at exit; raise nothing. A fork's is not its own."""
    if os.getpid() != state["process_id"]:
        return
    try:
        mirror.close()
        writer: StepWriter | None = state["writer"]
        if writer is not None:
            writer.close(max_wait_s=CLOSE_WAIT_S)
    except (ReplayBufferError, TimeoutError) as error:
        _log.warning("steps of buffer %s may be lost: %s", buffer, error)
    client.close()
    if state["deletes"]:
        # Do not wait at exit for an unreachable server.
        with (
            suppress(ReplayBufferError),
            connect_from_environment(server=server, reconnect_s=0.0) as last,
        ):
            last.delete_buffer(buffer)
