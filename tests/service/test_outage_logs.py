"""An outage takes a few lines of the log, however often what it stops is tried again."""

import asyncio
import logging

import pytest
from prometheus_client import CollectorRegistry

from breadbox.model.errors import StoreUnavailableError
from breadbox.shared.outages import OUTAGE_PERIOD_S, OutageLog
from breadbox_server.admission import payloads as store_side
from breadbox_server.admission.payloads import DeletionQueue
from breadbox_server.core.model.ids import PayloadId
from breadbox_server.core.model.inputs import Payload
from breadbox_server.metrics.metrics import Metrics
from support.clock import ManualClock
from support.eventually import eventually
from support.fake_custodian import FakeCustodian

AWAY = StoreUnavailableError("nobody answers")


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> logging.Logger:
    caplog.set_level("INFO")
    return logging.getLogger("breadbox_server.outage")


def test_an_outage_is_told_at_once_then_twice_a_minute_and_when_it_is_over(
    log: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock(now=1000.0)
    outage = OutageLog(log, "writing", now=clock)
    for _ in range(140):  # 70 s, twice a second
        outage.failed(AWAY)
        clock.advance(0.5)
    outage.succeeded()
    outage.succeeded()
    assert [
        (logging.WARNING, "writing failed, trying again: nobody answers"),
        (logging.WARNING, "writing has failed for 30 s: nobody answers"),
        (logging.WARNING, "writing has failed for 60 s: nobody answers"),
        (logging.WARNING, "writing works again after 70.0 s"),
    ] == [(record.levelno, record.getMessage()) for record in caplog.records]
    assert 30.0 == OUTAGE_PERIOD_S


def test_a_second_outage_is_told_like_the_first(
    log: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    outage = OutageLog(log, "writing", now=ManualClock())
    for _ in range(2):
        outage.failed(AWAY)
        outage.succeeded()
    assert 2 == caplog.text.count("writing failed, trying again: nobody answers")
    assert 2 == caplog.text.count("writing works again after 0.0 s")


async def test_deletions_that_fail_many_times_are_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store_side, "RETRY_DELAY_S", 0.0)
    caplog.set_level("INFO")
    custodian, metrics = FakeCustodian(), Metrics(CollectorRegistry())
    custodian.is_down = True
    queue = DeletionQueue(custodian, metrics=metrics, limit=10)

    def failures() -> float:
        labels = {"operation": "delete"}
        return metrics.registry.get_sample_value("breadbox_store_errors_total", labels) or 0.0

    async with asyncio.TaskGroup() as group:
        running = group.create_task(queue.run())
        queue.put([Payload(PayloadId("a" * 32), 1)])
        await eventually(lambda: failures() > 20)
        custodian.is_down = False
        await queue.wait_empty()
        running.cancel()
    assert 1 == caplog.text.count("deleting payloads failed, trying again")
    assert 1 == caplog.text.count("deleting payloads works again")
    assert 2 == len(caplog.records)
