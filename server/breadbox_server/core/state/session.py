"""Which session and model version are current, and which weights are kept (B5).

Invariants:

M1  Within a session the version never goes back; a session that ended never comes back, as far as
    `ENDED_SESSIONS_MAX` are remembered.
M2  The weights kept are the latest two that the current session published; without a session none.
M3  Fragments of a session have as many steps as the first that was admitted: a learner stacks them.
"""

from collections import OrderedDict
from collections.abc import Iterable

from breadbox_server.core.model.errors import SessionNotCurrentError, VersionRegressedError
from breadbox_server.core.model.ids import ModelVersion, PayloadId, SessionId
from breadbox_server.core.model.inputs import ModelState, Payload
from breadbox_server.core.model.schemas import SCHEMAS_MAX, SessionSchemas
from breadbox_server.core.state.payloads import PayloadLedger

NO_SESSION = SessionId("")
ENDED_SESSIONS_MAX = 1024
"""Ended sessions remembered, so that a learner of an old run cannot revive it by mistake."""
WEIGHTS_KEPT = 2
"""The current weights, and those that a slow worker may be loading still."""


class CurrentModel:
    """The session, its version and its weights.

    Args:
        payloads: Told of every weights payload that is taken or let go.
    """

    def __init__(self, payloads: PayloadLedger) -> None:
        self._payloads = payloads
        self._ended_sessions: OrderedDict[SessionId, None] = OrderedDict()
        self._kept: OrderedDict[ModelVersion, Payload] = OrderedDict()
        self.session_id = NO_SESSION
        self.version: ModelVersion | None = None
        """None if and only if no session is current."""
        self.step_count: int | None = None
        """Steps of every fragment of the session; None until one was admitted."""
        self.schemas = SessionSchemas()
        """What the session's fragments are."""

    @property
    def state(self) -> ModelState:
        """The model state that workers receive."""
        weights = None if self.version is None else self._kept.get(self.version)
        return ModelState(self.session_id, self.version, weights)

    def version_min(self, staleness_max: int) -> int:
        """Give the oldest version that is fresh; negative while every version is."""
        return 0 if self.version is None else self.version - staleness_max

    def check_start(self, session_id: SessionId) -> None:
        """Refuse to start a session that has ended.

        Raises:
            SessionNotCurrentError: It has ended.
        """
        if self.has_ended(session_id):
            raise SessionNotCurrentError(session_id, self.session_id)

    def start(self, session_id: SessionId, version: ModelVersion) -> None:
        """Make a session current; no session may be."""
        assert self.version is None
        self.session_id, self.version = session_id, version

    def end(self) -> None:
        """End the current session, let go of its weights, and remember that it has ended."""
        self._ended_sessions[self.session_id] = None
        while len(self._ended_sessions) > ENDED_SESSIONS_MAX:
            self._ended_sessions.popitem(last=False)
        for weights in self._kept.values():
            self._payloads.dispose_weights(weights)
        self._kept.clear()
        self.session_id, self.version = NO_SESSION, None
        self.step_count = None
        self.schemas.clear()

    def check_publish(self, session_id: SessionId, version: ModelVersion) -> None:
        """Refuse a version of another session, or a lower one.

        Raises:
            SessionNotCurrentError: The session is not current.
            VersionRegressedError: The version is lower than the current one.
        """
        if self.version is None or session_id != self.session_id:
            raise SessionNotCurrentError(session_id, self.session_id)
        if version < self.version:
            raise VersionRegressedError(self.version, version)

    def publish(self, version: ModelVersion, weights: Payload | None) -> None:
        """Make a version of the current session current, with its weights."""
        self.version = version
        if weights is not None:
            self._payloads.take_weights(weights)
            self._kept[version] = weights
        while len(self._kept) > WEIGHTS_KEPT:
            _, oldest = self._kept.popitem(last=False)
            self._payloads.dispose_weights(oldest)

    def drop(self, payload_id: PayloadId) -> None:
        """Let go of weights that the store lost; their version goes on without."""
        for version, weights in list(self._kept.items()):
            if weights.payload_id == payload_id:
                del self._kept[version]
                self._payloads.dispose_weights(weights)

    def kept_weights(self) -> list[tuple[ModelVersion, Payload]]:
        """List the weights kept, by version."""
        return list(self._kept.items())

    def has_ended(self, session_id: SessionId) -> bool:
        """Tell whether a session is remembered to have ended."""
        return session_id in self._ended_sessions

    def ended_sessions(self) -> list[SessionId]:
        """List the ended sessions remembered, the first to have ended first."""
        return list(self._ended_sessions)

    def restore_ended(self, session_ids: Iterable[SessionId]) -> None:
        """Remember ended sessions as a snapshot has them."""
        self._ended_sessions = OrderedDict.fromkeys(session_ids)

    def restore_weights(self, version: ModelVersion, weights: Payload) -> None:
        """Keep weights as a snapshot has them, behind those restored before."""
        self._payloads.take_weights(weights)
        self._kept[version] = weights

    def check_invariants(self) -> None:
        """Assert M1 to M3."""
        assert (self.version is None) == (self.session_id == NO_SESSION), "M1: session and version"
        assert self.session_id not in self._ended_sessions, "M1: a session that has ended"
        assert self.version is not None or self.step_count is None, "M3: steps without a session"
        known_count = len(self.schemas.all())
        assert known_count <= (0 if self.version is None else SCHEMAS_MAX), "S1: schemas"
        assert len(self._kept) <= WEIGHTS_KEPT, "M2: weights kept"
        assert list(self._kept) == sorted(self._kept), "M2: order"
        assert self.version is not None or not self._kept, "M2: weights without a session"
        assert all(version <= (self.version or 0) for version in self._kept), "M2: a later version"
