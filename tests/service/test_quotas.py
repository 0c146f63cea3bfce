"""A token's quotas: one account for all buffers, callers and payloads of the token."""

from collections.abc import Sequence

import pytest
from prometheus_client import CollectorRegistry

from breadbox_server import limits
from breadbox_server.access.authorization import Caller, Role
from breadbox_server.access.authorization import Quotas as Bounds
from breadbox_server.admission import quotas
from breadbox_server.admission.quotas import Charge, Quotas
from breadbox_server.base.errors import QuotaExceededError, QuotaFullError
from breadbox_server.core.model.ids import BufferName, SessionId
from breadbox_server.core.model.inputs import Fragment
from breadbox_server.metrics.metrics import Metrics
from support.driven import BUFFER, driven
from support.manual_timers import ManualTimers
from support.metadata import make_fragment, make_payload, written_fragment

ONE, OTHER, THIRD = BufferName("one"), BufferName("other"), BufferName("third")
RUN, NEXT = SessionId("run"), SessionId("next")


class Books:
    """Quotas of a server that holds some fragments, and what they refuse."""

    def __init__(self, held: Sequence[Fragment] = ()) -> None:
        self.clock = ManualTimers()
        self.registry = CollectorRegistry()
        self.ended: set[tuple[BufferName, str]] = set()
        self.quotas = Quotas(
            *(self.clock, Metrics(self.registry), lambda: held),
            lambda name, worker: (name, worker) in self.ended,
        )

    def charge(
        self,
        caller: Caller,
        *workers: str,
        buffer: BufferName = ONE,
        session: SessionId = RUN,
        size_bytes: int = 10,
    ) -> Charge:
        """Charge an append of one fragment of each worker."""
        fragments = [
            make_fragment(worker, session_id=session, size_bytes=size_bytes) for worker in workers
        ]
        return self.quotas.charge(caller, buffer, session, fragments)

    def admit(self, caller: Caller, fragment: Fragment) -> None:
        """Charge an append of one fragment, which is admitted."""
        charge = self.quotas.charge(caller, ONE, RUN, [fragment])
        charge.admitted(fragment.payload)
        charge.end()

    def sample(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"breadbox_{name}", labels) or 0.0


def team(name: str = "team", **bounds: float) -> Caller:
    return Caller(name, Role.PRODUCER, quotas=Bounds(**bounds))  # type: ignore[arg-type]


# Workers ------------------------------------------------------------------------------------------


def test_workers_count_across_the_buffers_of_a_token() -> None:
    books, caller = Books(), team(workers_max=3)
    books.charge(caller, "a", "b", buffer=ONE)
    books.charge(caller, "c", buffer=OTHER)
    with pytest.raises(QuotaExceededError) as refused:
        books.charge(caller, "d", buffer=THIRD)
    assert ("workers_max", 3) == (refused.value.quota, refused.value.limit)
    assert 3 == books.sample("token_workers", token="team")
    assert 1 == books.sample("quota_refusals_total", token="team", quota="workers_max")


def test_a_worker_of_two_buffers_counts_in_both() -> None:
    books, caller = Books(), team(workers_max=2)
    books.charge(caller, "a", buffer=ONE)
    books.charge(caller, "a", buffer=OTHER)
    with pytest.raises(QuotaExceededError):
        books.charge(caller, "a", buffer=THIRD)


def test_a_known_worker_is_no_new_one_at_the_limit() -> None:
    books, caller = Books(), team(workers_max=2)
    books.charge(caller, "a", "b")
    books.charge(caller, "b", "a")
    with pytest.raises(QuotaExceededError):
        books.charge(caller, "a", "c")
    assert 2 == books.sample("token_workers", token="team")


def test_a_refused_append_leaves_none_of_its_workers_behind() -> None:
    books, caller = Books(), team(workers_max=2)
    books.charge(caller, "a")
    with pytest.raises(QuotaExceededError):
        books.charge(caller, "b", "c", buffer=OTHER)
    books.charge(caller, "b", buffer=OTHER)
    assert 2 == books.sample("token_workers", token="team")


def test_a_new_session_of_a_buffer_forgets_its_workers_and_no_other_buffers() -> None:
    books, caller = Books(), team(workers_max=3)
    books.charge(caller, "a", "b", buffer=ONE)
    books.charge(caller, "c", buffer=OTHER)
    books.charge(caller, "x", "y", buffer=ONE, session=NEXT)
    with pytest.raises(QuotaExceededError):
        books.charge(caller, "z", buffer=ONE, session=NEXT)


def test_fragments_of_another_session_count_for_no_worker() -> None:
    books, caller = Books(), team(workers_max=1)
    books.quotas.charge(caller, ONE, RUN, [make_fragment("late", session_id="before")])
    books.charge(caller, "a")
    assert 1 == books.sample("token_workers", token="team")


def test_groups_that_have_ended_do_not_count() -> None:
    """Else a token's generators would be refused for good after so many prompts."""
    books, caller = Books(), team(workers_max=3)
    books.charge(caller, "a", "b")
    books.charge(caller, "c", buffer=OTHER)
    books.ended = {(ONE, "a"), (OTHER, "c")}
    books.charge(caller, "d", "e")
    assert 3 == books.sample("token_workers", token="team")
    with pytest.raises(QuotaExceededError):
        books.charge(caller, "f")
    books.ended |= {(ONE, "b")}
    books.charge(caller, "f")


def test_tokens_do_not_count_for_each_other() -> None:
    books = Books()
    books.charge(team("a", workers_max=1), "w")
    books.charge(team("b", workers_max=1), "v")
    assert [1, 1] == [books.sample("token_workers", token=name) for name in "ab"]


def test_a_token_without_a_limit_has_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "TOKEN_WORKERS_MAX", 2)
    assert limits.TOKEN_WORKERS_MAX > 2
    books, caller = Books(), team()
    books.charge(caller, "a", buffer=ONE)
    books.charge(caller, "b", buffer=OTHER)
    with pytest.raises(QuotaExceededError):
        books.charge(caller, "c", buffer=OTHER)


# Bytes --------------------------------------------------------------------------------------------


def test_bytes_in_progress_count_until_the_append_ends() -> None:
    books, caller = Books(), team(bytes_held_max=100)
    charge = books.charge(caller, "a", size_bytes=60)
    with pytest.raises(QuotaFullError) as refused:
        books.charge(caller, "b", size_bytes=41, buffer=OTHER)
    assert ("bytes_held_max", 100) == (refused.value.quota, refused.value.limit)
    charge.end()
    charge.end()
    books.charge(caller, "b", size_bytes=100, buffer=OTHER)


def test_admitted_bytes_count_once_and_until_nothing_refers_to_them() -> None:
    books, caller = Books(), team(bytes_held_max=100)
    fragment = make_fragment(size_bytes=60)
    books.admit(caller, fragment)
    assert 60 == books.sample("token_bytes", token="team")
    with pytest.raises(QuotaFullError):
        books.charge(caller, "a", size_bytes=41, buffer=OTHER)
    books.charge(caller, "a", size_bytes=40, buffer=OTHER).end()
    books.quotas.let_go([fragment.payload, make_payload()])
    assert 0 == books.sample("token_bytes", token="team")
    books.charge(caller, "a", size_bytes=100)


def test_a_payload_that_is_admitted_again_is_held_once() -> None:
    books, caller = Books(), team(bytes_held_max=100)
    fragment = make_fragment(size_bytes=40)
    books.admit(caller, fragment)
    books.admit(caller, fragment)
    books.quotas.let_go([fragment.payload])
    assert 0 == books.sample("token_bytes", token="team")


def test_what_can_never_fit_is_no_matter_of_waiting() -> None:
    books, caller = Books(), team(bytes_held_max=100)
    with pytest.raises(QuotaExceededError) as refused:
        books.charge(caller, "a", "b", size_bytes=51)
    assert "bytes_held_max" == refused.value.quota
    assert 1 == books.sample("quota_refusals_total", token="team", quota="bytes_held_max")


def test_what_a_server_held_before_counts_for_the_tokens_workers_alone() -> None:
    held = [make_fragment("a-1", size_bytes=60), make_fragment("b-1", size_bytes=500)]
    books = Books(held)
    caller = Caller("team", Role.PRODUCER, workers=("a-*",), quotas=Bounds(bytes_held_max=100))
    with pytest.raises(QuotaFullError):
        books.charge(caller, "a-1", size_bytes=41)
    assert 60 == books.sample("token_bytes", token="team")
    anybody = Books(held)
    anybody.charge(team(bytes_held_max=100), "a-1", size_bytes=100)


def test_what_is_written_and_not_announced_counts_as_held() -> None:
    books, caller = Books(), team(bytes_held_max=100)
    books.admit(caller, make_fragment(size_bytes=30))
    books.quotas.check_written(caller, 30, 40)
    with pytest.raises(QuotaFullError):
        books.quotas.check_written(caller, 30, 41)
    with pytest.raises(QuotaExceededError):
        books.quotas.check_written(caller, 0, 101)
    assert 2 == books.sample("quota_refusals_total", token="team", quota="bytes_held_max")
    books.quotas.check_written(team("unbounded"), 1 << 40, 1 << 40)


# Rates --------------------------------------------------------------------------------------------


def test_a_rate_is_one_for_all_buffers_and_earned_by_time() -> None:
    books, caller = Books(), team(appends_per_s_max=1.0)
    burst = int(limits.QUOTA_BURST_S)
    for number in range(burst):
        books.charge(caller, "a", buffer=(ONE, OTHER)[number % 2])
    with pytest.raises(QuotaFullError) as refused:
        books.charge(caller, "a", buffer=THIRD)
    assert ("appends_per_s_max", 1.0) == (refused.value.quota, refused.value.limit)
    books.clock.advance(1.0)
    books.charge(caller, "a", buffer=THIRD)
    with pytest.raises(QuotaFullError):
        books.charge(caller, "a", buffer=ONE)


def test_a_large_append_takes_its_rate_in_advance() -> None:
    books, caller = Books(), team(appends_per_s_max=1.0)
    burst = int(limits.QUOTA_BURST_S)
    books.charge(caller, *(f"w{number}" for number in range(burst + 3)))
    books.clock.advance(3.0)
    with pytest.raises(QuotaFullError):
        books.charge(caller, "w0")
    books.clock.advance(0.5)
    books.charge(caller, "w0")


def test_reports_have_a_rate_of_their_own() -> None:
    books, caller = Books(), team(appends_per_s_max=1.0)
    burst = int(limits.QUOTA_BURST_S)
    many = limits.EPISODES_OF_APPEND * burst
    books.quotas.charge_report(caller, many)
    with pytest.raises(QuotaFullError):
        books.quotas.charge_report(caller, 1)
    assert 1 == books.sample("quota_refusals_total", token="team", quota="appends_per_s_max")
    books.charge(caller, "a")
    books.quotas.charge_report(Caller("", Role.ADMIN), many)


def test_without_tokens_nothing_is_charged() -> None:
    books = Books()
    charge = books.charge(Caller("", Role.ADMIN), "a")
    charge.admitted(make_payload())
    charge.end()


async def test_an_append_that_is_refused_ends_its_charge() -> None:
    """Also one whose payload is missing: its bytes are free for the next."""
    async with driven() as it:
        caller = team(bytes_held_max=100)
        for _ in range(3):
            absent = make_fragment("w", session_id="run", size_bytes=100)
            results, _ = await it.driver.appends.append(BUFFER, [absent], caller)
            assert [None] == results
        there = written_fragment(it.custodian, 0, "run")
        await it.driver.appends.append(BUFFER, [there], caller)
        assert 100 == it.sample("token_bytes", token="team")
