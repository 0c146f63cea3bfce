from contextlib import closing
from typing import Any

import numpy as np

from breadbox.model.types import ModelState
from breadbox_rollout.sending.models import NO_MODEL, ModelWatcher
from support.rollout_service import FakeService


class EndsDuringLoad(FakeService):
    """Ends the session while the second version's weights are being read."""

    def load_model(
        self, newer_than: ModelState | None = None
    ) -> tuple[ModelState, dict[str, Any]] | None:
        if newer_than is not None and newer_than.model_version == 0:
            self.end_session()
        return super().load_model(newer_than)


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
