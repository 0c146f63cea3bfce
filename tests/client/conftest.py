"""Fixtures: a scripted server on a real channel, and both clients behind one face."""

from collections.abc import AsyncIterator, Iterator

import pytest

from support.callers import KINDS, Caller, make_caller
from support.fake_service import FakeService, serving


@pytest.fixture
def fake() -> FakeService:
    return FakeService()


@pytest.fixture
def address(fake: FakeService) -> Iterator[str]:
    with serving(fake) as address:
        yield address


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def caller(kind: str, address: str) -> AsyncIterator[Caller]:
    async with make_caller(kind, address, deadline_s=5.0, reconnect_s=10.0) as made:
        yield made
