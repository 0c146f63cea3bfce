from contextlib import closing

import numpy as np

from breadbox.errors import PayloadMissingError
from breadbox.types import PayloadReference
from breadbox_rollout.models import NO_MODEL, ModelWatcher
from support.rollout_service import FakeService


class EndsDuringLoad(FakeService):
    """Ends the session while the second version's weights are being read."""

    def load_weights(self, reference: PayloadReference) -> dict[str, object]:
        if reference.payload_id == f"{1:032x}":
            self.end_session()
            raise PayloadMissingError(reference.payload_id)
        return super().load_weights(reference)


def test_a_session_that_ends_while_its_weights_are_read_is_left() -> None:
    """Or the worker would go on in it for good, and every fragment would be refused."""
    service = EndsDuringLoad()
    watcher = ModelWatcher(service)
    watcher.start()
    with closing(watcher), closing(service):
        service.publish("s", 0, {"w": np.zeros(1)})
        watcher.wait(30.0)
        in_session = watcher.take()
        service.publish("s", 1, {"w": np.ones(1)})
        watcher.wait(30.0)
        left = watcher.take()

    assert in_session is not None
    assert in_session.in_session
    assert NO_MODEL == left
