"""What holds for all tests of the service."""

from collections.abc import Iterator
from typing import Any

import pytest

from breadbox_server.admission import payloads
from breadbox_server.driver import Driver
from support.at_rest import left_over


@pytest.fixture(autouse=True)
def deletions_are_not_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise what must not be deleted yet would only not be deleted yet."""
    monkeypatch.setattr(payloads, "GATHER_S", 0.0)


@pytest.fixture(autouse=True)
def servers_end_at_rest(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Driver]]:
    """Every count of callers, queue and hold of a test's servers is back at 0 in the end."""
    drivers: list[Driver] = []
    make = Driver.__init__

    def noted(self: Driver, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        drivers.append(self)

    monkeypatch.setattr(Driver, "__init__", noted)
    yield drivers
    assert [{} for _ in drivers] == [left_over(each) for each in drivers]
