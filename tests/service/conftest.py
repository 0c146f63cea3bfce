"""What holds for all tests of the service."""

import pytest

from breadbox_server.admission import payloads


@pytest.fixture(autouse=True)
def deletions_are_not_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise what must not be deleted yet would only not be deleted yet."""
    monkeypatch.setattr(payloads, "GATHER_S", 0.0)
