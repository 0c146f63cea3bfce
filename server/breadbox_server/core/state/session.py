"""Which session and model version are current, and which weights are kept (B5).

M1  Within a session the version never goes back; a session that ended never comes back, as far as
    `ENDED_SESSIONS_MAX` are remembered.
M2  The weights kept are the latest two that the current session published; without a session none.
M3  Fragments of a session have as many steps as the first that was admitted: a learner stacks them.
"""

from collections import OrderedDict

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
    """The session, its version and its weights."""

    def __init__(self, payloads: PayloadLedger) -> None:
        self._payloads = payloads
        self.ended_sessions: OrderedDict[SessionId, None] = OrderedDict()
        """The ended sessions remembered, the first to have ended first."""
        self.weights: OrderedDict[ModelVersion, Payload] = OrderedDict()
        self.session_id = NO_SESSION
        self.version: ModelVersion | None = None
        """None if and only if no session is current."""
        self.step_count: int | None = None
        """Steps of every fragment of the session; None until one was admitted."""
        self.schemas = SessionSchemas()

    @property
    def state(self) -> ModelState:
        """The model state that workers receive."""
        weights = None if self.version is None else self.weights.get(self.version)
        return ModelState(self.session_id, self.version, weights)

    def end(self) -> None:
        """End the current session, let go of its weights, and remember that it has ended."""
        self.ended_sessions[self.session_id] = None
        while len(self.ended_sessions) > ENDED_SESSIONS_MAX:
            self.ended_sessions.popitem(last=False)
        for weights in self.weights.values():
            self._payloads.dispose_weights(weights)
        self.weights.clear()
        self.session_id, self.version = NO_SESSION, None
        self.step_count = None
        self.schemas.clear()

    def publish(self, version: ModelVersion, weights: Payload | None) -> None:
        """Make a version of the current session current, with its weights."""
        self.version = version
        if weights is not None:
            self.take_weights(version, weights)
        while len(self.weights) > WEIGHTS_KEPT:
            _, oldest = self.weights.popitem(last=False)
            self._payloads.dispose_weights(oldest)

    def take_weights(self, version: ModelVersion, weights: Payload) -> None:
        """Keep the weights of a version, behind those of earlier ones."""
        self._payloads.take_weights(weights)
        self.weights[version] = weights

    def drop(self, payload_id: PayloadId) -> None:
        """Let go of weights that the store lost; their version goes on without."""
        for version, weights in list(self.weights.items()):
            if weights.payload_id == payload_id:
                del self.weights[version]
                self._payloads.dispose_weights(weights)

    def check_invariants(self) -> None:
        """Assert M1 to M3."""
        assert (self.version is None) == (self.session_id == NO_SESSION), "M1: session and version"
        assert self.session_id not in self.ended_sessions, "M1: a session that has ended"
        assert self.version is not None or self.step_count is None, "M3: steps without a session"
        schemas_max = 0 if self.version is None else SCHEMAS_MAX
        assert len(self.schemas) <= schemas_max, "S1: schemas"
        assert len(self.weights) <= WEIGHTS_KEPT, "M2: weights kept"
        assert list(self.weights) == sorted(self.weights), "M2: order"
        assert self.version is not None or not self.weights, "M2: weights without a session"
        assert all(version <= (self.version or 0) for version in self.weights), "M2: later version"
