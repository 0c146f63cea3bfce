"""Models are whole triples, taken once, never older than before."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from breadbox.model.errors import (
    BufferNotFoundError,
    NotSupportedError,
    PayloadMissingError,
    PermissionDeniedError,
    ReplayBufferError,
    TlsError,
    UnauthenticatedError,
    UnavailableError,
)
from breadbox.model.types import ModelState
from breadbox_rollout.sending.models import Model, ModelWatcher
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


def test_a_version_without_weights_labels_no_step_that_older_weights_chose() -> None:
    """The ancestor lost the weights that came while it was busy."""
    service = FakeService()
    with watching(service) as watcher:
        service.publish("s", 1, weights(1.0))
        watcher.wait(WAIT_S_MAX)
        service.publish("s", 2)
        service.wait_until(lambda: service.known == ModelState("s", 2, None))
        model = take(watcher)
        assert (1, 1.0) == (model.model_version, value_of(model.weights))


def test_a_session_resumed_at_a_version_without_weights_is_waited_out_until_it_has_some() -> None:
    """A learner starts at 95 and then publishes: in between untrained steps were labelled 95."""
    service = FakeService()
    with watching(service) as watcher:
        service.publish("old", 95, weights(1.0))
        assert take(watcher).in_session
        service.publish("resumed", 95)
        model = take(watcher)
        assert not model.in_session
        assert "a learner to publish weights; version 95 has none" == model.waits_for
        service.publish("resumed", 96, weights(2.0))
        model = take(watcher)
        assert ("resumed", 96, 2.0) == (
            model.session_id,
            model.model_version,
            value_of(model.weights),
        )


def test_a_session_that_begins_anew_is_acted_in_with_the_policy_as_it_was_made() -> None:
    service = FakeService()
    with watching(service) as watcher:
        service.publish("s", 0)
        model = take(watcher)
        assert model.in_session
        assert (0, None) == (model.model_version, model.weights)


def test_the_end_of_a_session_is_a_model_in_which_nothing_may_be_produced() -> None:
    """The ancestor produced for the session ""."""
    service = FakeService()
    with watching(service) as watcher:
        service.publish("s", 1, weights(1.0))
        assert take(watcher).in_session
        service.end_session()
        assert not take(watcher).in_session


def test_weights_that_the_store_lost_are_asked_for_again(monkeypatch: Any) -> None:
    monkeypatch.setattr("breadbox_rollout.sending.models.RETRY_S", 0.0)

    class Lost(FakeService):
        attempts = 0

        def load_model(
            self, newer_than: ModelState | None = None
        ) -> tuple[ModelState, dict[str, Any]] | None:
            self.attempts += 1
            if self.attempts == 1:
                raise PayloadMissingError("0" * 32)
            return super().load_model(newer_than)

    service = Lost()
    with watching(service) as watcher:
        service.publish("s", 1, weights(4.0))
        assert 4.0 == value_of(take(watcher).weights)


class Away(FakeService):
    """Fails to answer so many times."""

    def __init__(self, failures: int, error: ReplayBufferError | None = None) -> None:
        super().__init__()
        self.failures = failures
        self.error = error or UnavailableError("away")

    def watch_model(
        self, known: ModelState | None = None, *, max_wait_s: float = 0.0
    ) -> ModelState | None:
        if self.failures:
            self.failures -= 1
            raise self.error
        return super().watch_model(known, max_wait_s=max_wait_s)


def test_a_service_that_is_away_is_asked_again(monkeypatch: Any) -> None:
    monkeypatch.setattr("breadbox_rollout.sending.models.RETRY_S", 0.0)
    service = Away(3)
    service.publish("s", 1, weights(1.0))
    with watching(service) as watcher:
        assert 1 == take(watcher).model_version


def test_why_there_is_no_answer_is_known_and_logged_once(
    monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("breadbox_rollout.sending.models.RETRY_S", 0.0)
    service = Away(failures=2**31)
    with watching(service) as watcher:
        eventually_sync(lambda: watcher.trouble == "away" and service.failures < 2**31 - 9)
        service.failures = 0
        service.publish("s", 1, weights(1.0))
        take(watcher)
        assert "" == watcher.trouble
    assert 1 == caplog.text.count("cannot read the current model")


def test_a_bug_that_ends_the_thread_is_raised_where_models_are_taken() -> None:
    """Else the worker would go on with its model until all it makes is stale."""

    class Buggy(FakeService):
        def load_model(self, newer_than: ModelState | None = None) -> Any:
            raise ZeroDivisionError("a bug")

    service = Buggy()
    service.publish("s", 1, weights(1.0))
    with watching(service) as watcher:
        watcher.wait(WAIT_S_MAX)
        with pytest.raises(ZeroDivisionError, match="a bug"):
            watcher.take()


@pytest.mark.parametrize(
    "error",
    [
        UnauthenticatedError("unknown token"),
        PermissionDeniedError("a reader's token"),
        NotSupportedError("an older server"),
        TlsError("of another authority"),
    ],
    ids=lambda each: type(each).__name__,
)
def test_what_waiting_does_not_change_is_raised_where_models_are_taken(
    error: ReplayBufferError,
) -> None:
    """A worker that was there before its server waited for ever with a token that it refuses."""
    service = Away(1, error)
    with watching(service) as watcher:
        watcher.wait(WAIT_S_MAX)
        with pytest.raises(type(error)):
            watcher.take()


def test_certificates_that_fitted_once_are_waited_for(monkeypatch: Any) -> None:
    monkeypatch.setattr("breadbox_rollout.sending.models.RETRY_S", 0.0)
    service = Away(0, TlsError("it has expired"))
    service.publish("s", 1, weights(1.0))
    with watching(service) as watcher:
        take(watcher)
        service.failures = 1
        service.publish("s", 2, weights(2.0))  # Answers the watch that waits; the next one fails.
        take(watcher)
        service.publish("s", 3, weights(3.0))
        assert 3 == take(watcher).model_version
    assert 0 == service.failures


def test_a_buffer_that_does_not_exist_is_waited_for_only_for_a_time(monkeypatch: Any) -> None:
    """A mistyped name kept a worker waiting for ever."""
    monkeypatch.setattr("breadbox_rollout.sending.models.RETRY_S", 0.0)
    now = iter(range(0, 1_000, 20))
    monkeypatch.setattr("breadbox_rollout.sending.models.time.monotonic", lambda: next(now))
    service = Away(1_000, BufferNotFoundError("pong"))
    with watching(service) as watcher:
        watcher.wait(WAIT_S_MAX)
        with pytest.raises(BufferNotFoundError, match="pong"):
            watcher.take()
    assert 1_000 > service.failures > 900
