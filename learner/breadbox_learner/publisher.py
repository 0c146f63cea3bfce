"""A learner's session: versions of the model, in order, with their weights."""

import logging
from uuid import uuid4

from breadbox import Client
from breadbox.errors import ReplayBufferError, SessionEndedError
from breadbox.policies import PolicyModule, policy_weights

_log = logging.getLogger(__name__)


class Publisher:
    """Starts a session, publishes versions in it, ends it.

    Args:
        client: Connected to the buffer.
        session_id: Session to go on with, of an interrupted run; empty: a new one.
        model_version: Last version of that run.
    """

    def __init__(self, client: Client, *, session_id: str = "", model_version: int = 0) -> None:
        self._client = client
        self.session_id = session_id or _new_session_id()
        self.model_version = model_version

    def start(self, policy: PolicyModule) -> None:
        """Make the session current and publish the policy as its next version.

        An interrupted run goes on in its own session if that is still current, so that fragments
        on the way are not lost; its version then goes on from the last published one, which may be
        ahead of the checkpoint. Where the session has ended, a new one starts at the version.

        Raises:
            ReplayBufferError: The server cannot be reached, or has no such buffer.
        """
        resumed_at = self.model_version
        try:
            state = self._client.start_session(self.session_id, model_version=resumed_at)
        except SessionEndedError:
            self.session_id = _new_session_id()
            state = self._client.start_session(self.session_id, model_version=resumed_at)
        self.model_version = max(resumed_at, state.model_version or 0)
        self.publish(policy)

    def publish(self, policy: PolicyModule) -> None:
        """Publish the policy's weights as the next version.

        Raises:
            SessionEndedError: Another learner has started a session of its own.
            BackpressureError: The store has no room for the weights.
        """
        self._client.publish(self.session_id, self.model_version + 1, policy_weights(policy))
        self.model_version += 1

    def end(self) -> None:
        """End the session. A server that is away does not hear of it, and that is only logged."""
        try:
            self._client.end_session(self.session_id)
        except ReplayBufferError as error:
            _log.warning("the session could not be ended: %s", error)


class Follower:
    """The publisher of a rank that leaves publishing to rank 0: it only counts."""

    session_id = ""

    def __init__(self, model_version: int) -> None:
        self.model_version = model_version

    def publish(self, policy: PolicyModule) -> None:
        """Count the version that rank 0 publishes."""
        self.model_version += 1


def _new_session_id() -> str:
    return uuid4().hex
