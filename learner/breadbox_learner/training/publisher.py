"""A learner's session: versions of the model, in order, with their weights."""

import logging

from breadbox import Client
from breadbox.model.errors import ReplayBufferError, SessionEndedError
from breadbox_policies import PolicyModule, policy_weights

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
        self.session_id = session_id
        self.model_version = model_version

    def start(self, policy: PolicyModule) -> None:
        """Make the session current and publish the policy as its next version.

        An interrupted run goes on in its own session if that is still current, so that fragments
        on the way are not lost; its version then goes on from the last published one, which may be
        ahead of the checkpoint. Where the session has ended, a new one starts at the version.

        Raises:
            ReplayBufferError: The server cannot be reached, or has no such buffer.
        """
        try:
            self._start(policy)
        except SessionEndedError:
            self.session_id = ""
            self._start(policy)

    def _start(self, policy: PolicyModule) -> None:
        state = self._client.start_session(
            self.session_id or None, model_version=self.model_version
        )
        self.session_id = state.session_id
        self.model_version = max(self.model_version, state.model_version or 0)
        self.publish(policy)

    def keep(self, policy: PolicyModule) -> None:
        """Make sure that the session is still current; cheap enough for once a second of waiting.

        A server that came back without its memory is given the session again.

        Raises:
            SessionEndedError: Another learner has started a session of its own.
        """
        state = self._client.watch_model()
        current = "" if state is None else state.session_id
        if current == self.session_id:
            return
        if current:
            raise SessionEndedError(self.session_id, current)
        _log.warning("the server has lost session %s; starting it again", self.session_id)
        self._start(policy)

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

    def __init__(self, session_id: str, model_version: int) -> None:
        self.session_id = session_id
        self.model_version = model_version

    def publish(self, policy: PolicyModule) -> None:
        """Count the version that rank 0 publishes."""
        self.model_version += 1

    def keep(self, policy: PolicyModule) -> None:
        """Do nothing: rank 0 looks after the session."""
