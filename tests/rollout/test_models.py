"""Models are whole triples, taken once, never older than before."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from breadbox.errors import PayloadMissingError, UnavailableError
from breadbox.types import ModelState, PayloadReference
from breadbox_rollout.models import Model, ModelWatcher
from support.eventually import eventually_sync
from support.rollout_service import WAIT_S_MAX, FakeService


def weights(value: float) -> dict[str, Any]:
    return {"w": np.array([value], np.float32)}


def value_of(found: Mapping[str, Any] | None) -> float:
    assert found is not None
    return float(found["w"][0])


@contextmanager
def watching(service: FakeService) -> Iterator[ModelWatcher]:
    watcher = ModelWatcher(service)
    watcher.start()
    try:
        yield watcher
    finally:
        service.close()
        watcher.close()


def take(watcher: ModelWatcher) -> Model:
    watcher.wait(WAIT_S_MAX)
    model = watcher.take()
    assert model is not None
    return model


def test_a_model_has_session_version_weights_and_limit_together() -> None:
    """The ancestor set them one by one."""
    service = FakeService(staleness_max=3)
    with watching(service) as watcher:
        assert None is watcher.take()
        service.publish("s", 5, weights(1.0))
        model = take(watcher)
        assert ("s", 5, 3) == (model.session_id, model.model_version, model.staleness_max)
        assert 1.0 == value_of(model.weights)
        assert None is watcher.take()


def test_a_version_without_weights_keeps_those_that_nobody_took_yet() -> None:
    """The ancestor lost the weights that came while it was busy."""
    service = FakeService()
    with watching(service) as watcher:
        service.publish("s", 1, weights(1.0))
        watcher.wait(WAIT_S_MAX)
        service.publish("s", 2)
        eventually_sync(lambda: watcher.latest.model_version == 2)
        model = take(watcher)
        assert (2, 1.0) == (model.model_version, value_of(model.weights))


def test_the_end_of_a_session_is_a_model_in_which_nothing_may_be_produced() -> None:
    """The ancestor produced for the session ""."""
    service = FakeService()
    with watching(service) as watcher:
        service.publish("s", 1, weights(1.0))
        assert take(watcher).in_session
        service.end_session()
        assert not take(watcher).in_session


def test_weights_replaced_while_they_were_read_are_asked_for_again(monkeypatch: Any) -> None:
    monkeypatch.setattr("breadbox_rollout.models.RETRY_S", 0.0)

    class Replaced(FakeService):
        attempts = 0

        def load_weights(self, reference: PayloadReference) -> dict[str, Any]:
            self.attempts += 1
            if self.attempts == 1:
                raise PayloadMissingError(reference.payload_id)
            return super().load_weights(reference)

    service = Replaced()
    with watching(service) as watcher:
        service.publish("s", 1, weights(4.0))
        assert 4.0 == value_of(take(watcher).weights)


class Away(FakeService):
    """Fails to answer so many times."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures = failures

    def watch_model(
        self, known: ModelState | None = None, *, max_wait_s: float = 0.0
    ) -> ModelState | None:
        if self.failures:
            self.failures -= 1
            raise UnavailableError("away")
        return super().watch_model(known, max_wait_s=max_wait_s)


def test_a_service_that_is_away_is_asked_again(monkeypatch: Any) -> None:
    monkeypatch.setattr("breadbox_rollout.models.RETRY_S", 0.0)
    service = Away(3)
    service.publish("s", 1, weights(1.0))
    with watching(service) as watcher:
        assert 1 == take(watcher).model_version


def test_why_there_is_no_answer_is_known_and_logged_once(
    monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("breadbox_rollout.models.RETRY_S", 0.0)
    service = Away(failures=2**31)
    with watching(service) as watcher:
        eventually_sync(lambda: watcher.trouble == "away" and service.failures < 2**31 - 9)
        service.failures = 0
        service.publish("s", 1, weights(1.0))
        take(watcher)
        assert "" == watcher.trouble
    assert 1 == caplog.text.count("cannot learn the current model")


def test_a_bug_that_ends_the_thread_is_raised_where_models_are_taken() -> None:
    """Else the worker would go on with its model until all it makes is stale."""

    class Buggy(FakeService):
        def load_weights(self, reference: PayloadReference) -> dict[str, Any]:
            raise ZeroDivisionError("a bug")

    service = Buggy()
    service.publish("s", 1, weights(1.0))
    with watching(service) as watcher:
        watcher.wait(WAIT_S_MAX)
        with pytest.raises(ZeroDivisionError, match="a bug"):
            watcher.take()
