"""A store without room is told in its own words: in the log, and as what producers wait for."""

from pathlib import Path
from typing import Any

import pytest

from breadbox.model.errors import StoreFullError
from breadbox.model.presets import STORE_FULL_ADVICE
from breadbox.stores.base import StoreUsage
from breadbox.v1 import fragment_pb2
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox_server.admission.payloads import REFUSED_S
from support.eventually import eventually
from support.fake_custodian import FakeCustodian
from support.served import Served, served
from support.token_files import bearer, write_tokens

FULL = "No space left on device"
SHOWN = f"the payload store has no room for a write: {FULL}"


async def report(it: Served, words: str = FULL, token: str | None = None) -> None:
    request = pb.GetStoreConfigRequest(write_refusal=words)
    await it.stub.GetStoreConfig(request, metadata=bearer(token))


async def hold(it: Served, token: str | None = None) -> str:
    reply = await it.stub.GetBuffer(pb.GetBufferRequest(), metadata=bearer(token))
    return str(reply.buffer.state.hold)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for each in caplog.records if (text := each.getMessage()).startswith("storing")]


async def test_a_clients_refused_write_is_shown_while_it_is_repeated_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with served() as it:
        for _ in range(4):
            await report(it)
            it.clock.advance(5.0)
            assert SHOWN == await hold(it)
        it.clock.advance(REFUSED_S)
        assert "" == await hold(it)
        await eventually(lambda: len(lines(caplog)) == 2)

    assert f"storing payloads failed, trying again: {FULL}. {STORE_FULL_ADVICE}" == lines(caplog)[0]
    assert lines(caplog)[1].startswith("storing payloads works again after")


async def test_a_write_that_the_store_takes_ends_what_is_shown() -> None:
    async with served() as it:
        await it.start()
        await report(it)
        assert SHOWN == await hold(it)
        await it.fill(1)
        assert "" == await hold(it)


async def test_only_callers_that_write_are_believed(tmp_path: Path) -> None:
    roles = ("viewer", "producer")
    viewer, producer = write_tokens(tmp_path / "tokens", *[f"{each} {each}" for each in roles])
    async with served(tokens=tmp_path / "tokens") as it:
        await report(it, token=viewer)
        assert "" == await hold(it, viewer)
        await report(it, token=producer)
        assert SHOWN == await hold(it, viewer)


async def test_reported_words_are_cut_and_cannot_forge_a_line() -> None:
    async with served() as it:
        await report(it, "full\nERROR forged" + 1000 * "x")
        shown = await hold(it)
    assert "\n" not in shown
    assert len(shown) < 400


class FullStore(FakeCustodian):
    words = FULL

    async def keep(self, payloads: Any) -> None:
        raise StoreFullError(self.words)


async def test_what_the_server_itself_finds_no_room_for_is_shown_in_the_stores_words() -> None:
    async with served(custodian=FullStore()) as it:
        await it.start()
        await it.append(it.riding(0), payloads=[b"small"])
        assert SHOWN == await hold(it)


class SilentlyFullStore(FullStore):
    words = ""


async def test_a_payload_that_found_no_room_is_not_admitted_though_the_store_gives_no_words() -> (
    None
):
    async with served(custodian=SilentlyFullStore()) as it:
        await it.start()
        reply = await it.append(it.riding(0), payloads=[b"small"])
    assert [fragment_pb2.ADMISSION_OUTCOME_BYTES_FULL] == [each.outcome for each in reply.results]


class AtItsLimit(FakeCustodian):
    used_bytes = 90

    async def usage(self) -> StoreUsage:
        return StoreUsage(self.used_bytes, 90, 100)


async def test_a_store_at_its_limit_is_logged_until_it_has_room(
    caplog: pytest.LogCaptureFixture,
) -> None:
    custodian = AtItsLimit()
    async with served(custodian=custodian) as it:
        await eventually(lambda: len(lines(caplog)) == 1)
        custodian.used_bytes = 10
        it.clock.advance(REFUSED_S + 1)
        await eventually(lambda: len(lines(caplog)) == 2)

    told = "the payload store has no room: 90 bytes are taken of 90"
    assert f"storing payloads failed, trying again: {told}. {STORE_FULL_ADVICE}" == lines(caplog)[0]


class Asked(FakeCustodian):
    asked_count = 0

    async def usage(self) -> StoreUsage:
        self.asked_count += 1
        return StoreUsage(0, 0, 0)


async def test_a_store_that_says_it_has_room_does_not_end_what_a_refused_write_has_shown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    custodian = Asked()
    async with served(custodian=custodian) as it:
        await report(it)
        before = custodian.asked_count
        await eventually(lambda: custodian.asked_count >= before + 2)
        assert SHOWN == await hold(it)
    assert [f"storing payloads failed, trying again: {FULL}. {STORE_FULL_ADVICE}"] == lines(caplog)
