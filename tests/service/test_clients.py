import pytest

from breadbox_server.access.authorization import SERVICE, Role
from breadbox_server.metrics import clients
from breadbox_server.metrics.clients import ClientCensus, role_of_call
from support.clock import ManualClock


@pytest.mark.parametrize(
    ("method", "role"),
    [
        ("AppendFragments", Role.PRODUCER),
        ("ReportEpisodes", Role.PRODUCER),
        ("FetchFragments", Role.LEARNER),
        ("PublishModel", Role.LEARNER),
        ("DeleteBuffer", Role.ADMIN),
        ("GetBuffer", None),
        ("WatchModel", None),
        ("NoSuchMethod", None),
    ],
)
def test_a_call_tells_what_its_caller_is_here_for(method: str, role: Role | None) -> None:
    assert role is role_of_call(SERVICE + method, Role.ADMIN)


def test_a_viewer_counts_as_a_viewer_whatever_it_reads() -> None:
    methods = ("ReadFragments", "GetBuffer", "ReleaseLease")

    assert [Role.VIEWER] * 3 == [role_of_call(SERVICE + each, Role.VIEWER) for each in methods]


def test_a_connection_counts_once_for_each_of_its_roles() -> None:
    census = ClientCensus(ManualClock())
    for _ in range(3):
        census.seen("ipv4:10.0.0.1:1", Role.PRODUCER)
    census.seen("ipv4:10.0.0.1:1", Role.LEARNER)
    census.seen("ipv4:10.0.0.2:1", Role.PRODUCER)

    assert [2, 1, 0, 0] == [census.count(role) for role in Role]


def test_a_silent_connection_is_counted_for_a_minute() -> None:
    clock = ManualClock()
    census = ClientCensus(clock)
    census.seen("a", Role.PRODUCER)
    clock.advance(60.0)
    assert 1 == census.count(Role.PRODUCER)
    clock.advance(0.1)
    assert 0 == census.count(Role.PRODUCER)


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "PEERS_MAX", 10)
    census = ClientCensus(ManualClock())
    for number in range(100):
        census.seen(f"peer {number}", Role.PRODUCER)

    assert 10 == census.count(Role.PRODUCER)


def test_silent_connections_are_forgotten_as_others_come() -> None:
    clock = ManualClock()
    census = ClientCensus(clock)
    for number in range(100):
        census.seen(f"old {number}", Role.PRODUCER)
    clock.advance(61.0)
    for number in range(100):
        census.seen(f"new {number}", Role.LEARNER)

    assert 100 == len(census._seen_at)  # noqa: SLF001 - its memory shows nowhere
