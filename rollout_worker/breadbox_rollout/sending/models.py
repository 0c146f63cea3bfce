"""Follow models, immutable triples (session, version, weights), in the background."""

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from numpy.typing import NDArray

from breadbox.model.errors import (
    PERMANENT,
    BufferNotFoundError,
    ClosedError,
    ReplayBufferError,
    TlsError,
)
from breadbox.model.types import BufferDescription, ModelState, SchemaPolicy
from breadbox.writing.appender import AppendClient
from breadbox.writing.reporting import ReportClient


class Service(AppendClient, ReportClient, Protocol):
    """A thread-safe client of the worker's buffer, like `breadbox.Client`."""

    def watch_model(
        self, known: ModelState | None = None, *, max_wait_s: float = 0.0
    ) -> ModelState | None:
        """See `breadbox.Client.watch_model`."""

    def load_model(
        self, newer_than: ModelState | None = None
    ) -> tuple[ModelState, dict[str, Any]] | None:
        """See `breadbox.Client.load_model`."""

    def get_buffer(self, name: str | None = None) -> BufferDescription:
        """See `breadbox.Client.get_buffer`."""

    def declare_origin(self, origin: Mapping[str, str]) -> None:
        """See `breadbox.Client.declare_origin`."""

    def close(self) -> None:
        """See `breadbox.Client.close`: calls in other threads fail with ClosedError."""


logger = logging.getLogger(__name__)

WATCH_S = 60.0
"""Seconds of one long poll."""
RETRY_S = 1.0
"""Seconds between attempts, once the client has given up retrying."""
BUFFER_WAIT_S = 60.0
"""Seconds to wait for a buffer that does not exist, because a learner may create it."""


@dataclass(frozen=True, slots=True)
class Model:
    """The weights to act with, and the labels of the steps."""

    session_id: str
    """Session, or empty without one that has published weights: nothing may be produced then."""
    model_version: int
    weights: Mapping[str, NDArray[Any]] | None
    """Weights, or None at version 0 of a session: the policy as it was made."""
    staleness_max: int | None
    """Most versions that a step may be behind when its fragment arrives, or None: no bound."""
    is_ragged: bool = False
    """True if the buffer takes fragments of any length."""
    buffer: str = ""
    is_older: bool = False
    """True if the session is older than the watcher: it may belong to another, dead run."""

    @property
    def in_session(self) -> bool:
        """True if steps may be produced."""
        return bool(self.session_id)

    @property
    def waits_for(self) -> str:
        """What must happen before steps may be produced, or empty if nothing."""
        if self.in_session:
            return ""
        if self.model_version:
            return f"a learner to publish weights; version {self.model_version} has none"
        return "a learner to start a session"


NO_MODEL = Model("", 0, None, None)
NO_STATE = ModelState("", None, None)


class ModelWatcher:
    """Follow the buffer's model in a thread."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._latest = NO_MODEL
        self._taken = True
        self._error: Exception | None = None
        """Error that ended the thread: a permanent refusal, or a bug."""
        self._trouble = "no answer yet"
        self._first_session_id: str | None = None
        """The session at the server's first answer, or None before it."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="model-watcher", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self, wait_s: float = 5.0) -> None:
        """End the thread; close the service before, to interrupt its long poll."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(wait_s)

    @property
    def trouble(self) -> str:
        """Why the model is unknown, or empty while the server answers."""
        with self._lock:
            return self._trouble

    @property
    def latest(self) -> Model:
        """The newest model, taken or not."""
        with self._lock:
            return self._latest

    def take(self) -> Model | None:
        """Return the newest model if it was not taken yet, never an older one than before."""
        if self._taken:  # Without the lock: a model that comes now is taken a batch later.
            return None
        with self._lock:
            if self._error is not None:
                raise self._error
            self._taken = True
            return self._latest

    def wait(self, wait_s: float) -> None:
        """Wait until there is a model to take, at most *wait_s* seconds."""
        with self._lock:
            self._changed.wait_for(lambda: not self._taken, wait_s)

    def _run(self) -> None:
        try:
            self._follow()
        except ClosedError:
            return
        except Exception as error:  # noqa: BLE001 - raised again by `take`, where the worker is
            with self._lock:
                self._error, self._taken = error, False
                self._changed.notify_all()

    def _follow(self) -> None:
        known: ModelState | None = None
        missing_since: float | None = None
        while not self._closing.is_set():
            try:
                # The first request returns immediately, even if there is no session.
                wait_s = 0.0 if known is None else WATCH_S
                state = self._service.watch_model(known, max_wait_s=wait_s)
                missing_since = None
                self._say_trouble("")
                if self._first_session_id is None:
                    self._first_session_id = "" if state is None else state.session_id
                if state is None:
                    if known is None:
                        known = NO_STATE
                        self._offer(NO_MODEL)
                    continue
                weights = None
                if state.weights is not None:
                    newer = self._service.load_model(known)
                    if newer is None:
                        continue  # The session ended meanwhile.
                    state, weights = newer
                model = self._complete(state, weights)
            except (ClosedError, *PERMANENT):
                raise
            except ReplayBufferError as error:
                if isinstance(error, TlsError) and self._first_session_id is None:
                    raise  # The certificates never worked, so they are wrong.
                if isinstance(error, BufferNotFoundError):
                    missing_since = missing_since or time.monotonic()
                    if time.monotonic() - missing_since >= BUFFER_WAIT_S:
                        raise
                self._say_trouble(" ".join(str(error).split()))
                self._closing.wait(RETRY_S)
            else:
                known = state
                if model is not None:
                    self._offer(model)

    def _say_trouble(self, trouble: str) -> None:
        """Keep why there is no answer, and log it once, not at every attempt."""
        with self._lock:
            before, self._trouble = self._trouble, trouble
        if trouble and trouble != before:
            logger.warning("cannot read the current model, retrying: %s", trouble)

    def _complete(self, state: ModelState, weights: Mapping[str, Any] | None) -> Model | None:
        """Return the model to act with from now on, or None if it is the same."""
        # Versions without weights are never acted with. Within a session the last weights keep
        # their label; a session that begins at such a version is waited out, except at version 0.
        if not state.session_id:
            return NO_MODEL
        version = state.model_version or 0
        if weights is None:
            if state.session_id == self._latest.session_id:
                return None
            if version > 0:
                return replace(NO_MODEL, model_version=version)
        # The limit can change while running, and versions come seldom: request it each time.
        buffer = self._service.get_buffer()
        return Model(
            state.session_id,
            version,
            weights,
            buffer.config.lag_max,
            buffer.config.schema in (SchemaPolicy.RAGGED, SchemaPolicy.ANY),
            buffer.name,
            is_older=state.session_id == self._first_session_id,
        )

    def _offer(self, model: Model) -> None:
        with self._lock:
            if model == NO_MODEL and self._latest == NO_MODEL:
                return
            self._latest, self._taken = model, False
            self._changed.notify_all()
