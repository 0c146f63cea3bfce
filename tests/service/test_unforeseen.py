"""What nothing foresaw is an outage, or a pause of a job: it is logged, and ends no server."""

import asyncio
import logging

import grpc
import pytest

from breadbox.model.errors import StoreFullError, StoreUnavailableError
from breadbox.shared.throttle import Throttle
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox_server.base import unforeseen
from breadbox_server.base.unforeseen import run_on, unforeseen_as
from breadbox_server.journal.storage.interface import JournalUnavailableError
from support.eventually import eventually
from support.fake_custodian import FakeCustodian
from support.served import CALL_S, reason_of, served

HANDLER = RuntimeError("unable to perform operation; the handler is closed")


class Broken(FakeCustodian):
    """Raises what no store should, wherever it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.error: Exception | None = None

    def _check_up(self) -> None:
        super()._check_up()
        if self.error is not None:
            raise self.error


@pytest.fixture(autouse=True)
def told_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unforeseen, "_told", Throttle(lambda: 0.0))
    monkeypatch.setattr(unforeseen, "PAUSE_S", 0.01)


@pytest.mark.parametrize("error", [HANDLER, KeyError("maxmemory"), AttributeError("_writer")])
async def test_a_server_outlives_whatever_its_store_raises(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    custodian = Broken()
    async with served(custodian=custodian) as world:
        await world.start()
        await world.fill(1)
        custodian.error = error
        with pytest.raises(grpc.RpcError) as caught:
            await world.append(world.metadata(1))
        assert "STORE_UNAVAILABLE" == reason_of(caught.value)
        # Every job that asks the store has done so, and asks again.
        await eventually(lambda: "store: usage" in caplog.text, "a look at the store's usage")
        await eventually(lambda: "comparing buffers and store" in caplog.text, "a comparison")
        custodian.error = None
        await world.fill(1, first=1)
        reply = await world.stub.GetBuffer(pb.GetBufferRequest(name="default"), timeout=CALL_S)
        assert "default" == reply.buffer.name
    assert "ending" not in caplog.text
    traced = [each for each in caplog.records if each.exc_info and each.exc_info[1] is error]
    assert {logging.ERROR} == {each.levelno for each in traced}


def test_what_is_known_or_ends_a_server_stays_what_it_is() -> None:
    for error in (StoreFullError("full"), StoreUnavailableError("away")):
        with (
            pytest.raises(type(error)),
            unforeseen_as(JournalUnavailableError, (type(error),), "a call"),
        ):
            raise error
    with (
        pytest.raises(JournalUnavailableError, match="a call failed: RuntimeError"),
        unforeseen_as(JournalUnavailableError, (StoreFullError,), "a call"),
    ):
        raise HANDLER


async def test_a_job_that_fails_begins_anew_with_growing_pauses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pauses: list[float] = []
    runs = 0

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)

    async def job() -> None:
        nonlocal runs
        runs += 1
        if runs <= 4:
            raise OSError(24, "Too many open files")

    monkeypatch.setattr(asyncio, "sleep", sleep)
    await run_on(job, "looking")
    assert (5, [0.01, 0.02, 0.04, 0.08]) == (runs, pauses)
    # One line, not one an attempt.
    assert 1 == caplog.text.count("looking failed unforeseen, which is a bug")
