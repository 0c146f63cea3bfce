"""Which calls of a client go together: decided without calls, threads or time (H1 to H3)."""

import gc
import random
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from breadbox.model.errors import (
    BackpressureError,
    DeadlineExceededError,
    InvalidRequestError,
    ReplayBufferError,
    UnavailableError,
)
from breadbox.operations import sharing
from breadbox.operations.calls import Call
from breadbox.operations.sharing import TOGETHER_S, SharedCalls, Sharer, TogetherError
from breadbox.v1 import fragment_pb2
from breadbox.v1 import replay_buffer_service_pb2 as pb
from support import growth
from support.clock import ManualClock

ADMITTED = fragment_pb2.ADMISSION_OUTCOME_ADMITTED
STALE = fragment_pb2.ADMISSION_OUTCOME_STALE


class World:
    """Callers of one client, whose calls end when the test says so."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.shared = SharedCalls(self.clock)
        self.woken: list[Sharer] = []

    def announcement(
        self,
        *indexes: int,
        buffer: str = "b",
        session: str = "s",
        bodies: Sequence[bytes] = (),
        max_wait_s: int = 0,
    ) -> Sharer:
        """A caller with fragments of these indexes."""
        request = pb.AppendFragmentsRequest(
            buffer=buffer,
            fragments=[
                fragment_pb2.FragmentMetadata(
                    worker_id="w", session_id=session, fragment_index=each
                )
                for each in indexes
            ],
            payloads=bodies,
        )
        if max_wait_s:
            request.max_wait.seconds = max_wait_s
        made = Sharer(
            Call("AppendFragments", request, lambda answer: answer),
            lambda: self.woken.append(made),
        )
        return made

    def release(self, lease_id: str, *, buffer: str = "b") -> Sharer:
        """A caller that has used a lease."""
        request = pb.ReleaseLeaseRequest(
            buffer=buffer, lease_id=lease_id, mode=pb.RELEASE_MODE_CONSUMED
        )
        made = Sharer(
            Call("ReleaseLease", request, lambda answer: answer), lambda: self.woken.append(made)
        )
        return made

    def leading(self, *indexes: int, **fields: Any) -> Sharer:
        """A caller that came, and is sent at once."""
        made = self.announcement(*indexes, **fields)
        assert self.shared.enter(made) == 0.0
        self.shared.lead(made)
        return made

    def waiting(self, *indexes: int, **fields: Any) -> Sharer:
        """A caller that came, and waits."""
        made = self.announcement(*indexes, **fields)
        assert self.shared.enter(made) > 0.0
        return made

    def busy(self) -> tuple[Sharer, Sharer]:
        """Two callers, beside whose calls others wait."""
        return self.leading(100), self.leading(101)


def outcome_of(index: int) -> fragment_pb2.AdmissionOutcome:
    return STALE if index % 2 else ADMITTED


def judged(request: pb.AppendFragmentsRequest) -> pb.AppendFragmentsResponse:
    """What the server answers here: the outcome is that of the fragment's index."""
    results = [
        pb.AppendResult(outcome=outcome_of(each.fragment_index)) for each in request.fragments
    ]
    return pb.AppendFragmentsResponse(results=results, session_id="s", model_version=7)


def indexes(request: pb.AppendFragmentsRequest) -> list[int]:
    return [each.fragment_index for each in request.fragments]


@pytest.fixture
def world() -> World:
    return World()


def test_the_first_two_are_sent_at_once_as_they_are(world: World) -> None:
    for index in range(2):
        own = world.announcement(index, max_wait_s=5)
        assert world.shared.enter(own) == 0.0
        assert world.shared.lead(own) is own.request
        assert own.request.max_wait.seconds == 5


def test_what_comes_beside_two_calls_goes_together_when_one_has_ended(world: World) -> None:
    first, _ = world.busy()
    later = [world.waiting(index, index + 10, max_wait_s=5) for index in range(4)]
    world.shared.end(first, judged(first.request))
    assert world.woken == [later[0]]  # It leads.
    sent = world.shared.lead(later[0])
    assert indexes(sent) == [0, 10, 1, 11, 2, 12, 3, 13]
    assert sent.buffer == "b"
    assert not sent.HasField("max_wait")  # Nobody waits for another's room.
    world.shared.end(later[0], judged(sent))
    assert world.woken == later
    for each in later:
        assert [outcome_of(index) for index in indexes(each.request)] == [
            result.outcome for result in each.result().results
        ]
        assert (each.result().session_id, each.result().model_version) == ("s", 7)
        assert not each.result().HasField("retry_delay")


def test_beside_a_call_of_several_another_waits(world: World) -> None:
    first, second = world.busy()
    later = [world.waiting(index) for index in range(3)]
    world.shared.end(first, judged(first.request))
    world.shared.lead(later[0])
    world.shared.end(second, judged(second.request))
    world.waiting(9)


def test_a_version_that_the_server_does_not_know_stays_unknown(world: World) -> None:
    first, _ = world.busy()
    later = [world.waiting(0), world.waiting(1)]
    world.shared.end(first, judged(first.request))
    answer = judged(world.shared.lead(later[0]))
    answer.ClearField("model_version")
    world.shared.end(later[0], answer)
    assert [each.result().HasField("model_version") for each in later] == [False, False]


def test_one_that_was_told_to_wait_comes_again_at_once_to_wait_for_room_by_itself(
    world: World,
) -> None:
    first, _ = world.busy()
    later = [world.waiting(0), world.waiting(1)]
    world.shared.end(first, judged(first.request))
    answer = judged(world.shared.lead(later[0]))
    answer.retry_delay.seconds = 3
    world.shared.end(later[0], answer)
    for each in later:
        assert each.result().HasField("retry_delay")
        assert each.result().retry_delay.seconds == 0


def test_inline_payloads_stay_with_their_fragments(world: World) -> None:
    first, _ = world.busy()
    later = [
        world.waiting(0, 1),
        world.waiting(2, 3, bodies=[b"two", b""]),
        world.waiting(4, bodies=[b"four"]),
    ]
    world.shared.end(first, judged(first.request))
    assert list(world.shared.lead(later[0]).payloads) == [b"", b"", b"two", b"", b"four"]


def test_what_is_in_the_store_stays_without_inline_payloads(world: World) -> None:
    first, _ = world.busy()
    later = [world.waiting(0), world.waiting(1)]
    world.shared.end(first, judged(first.request))
    assert list(world.shared.lead(later[0]).payloads) == []


@pytest.mark.parametrize("other", [{"buffer": "c"}, {"session": "t"}])
def test_other_buffers_and_sessions_neither_wait_nor_go_along(
    world: World, other: dict[str, str]
) -> None:
    first, _ = world.busy()
    own = [world.waiting(0), world.waiting(1)]
    others = [world.leading(5, **other), world.leading(6, **other)]
    apart = world.waiting(7, **other)
    world.shared.end(first, judged(first.request))
    assert indexes(world.shared.lead(own[0])) == [0, 1]
    assert apart not in world.woken
    world.shared.end(others[0], judged(others[0].request))
    assert world.woken == [own[0], apart]


def test_nobody_waits_for_a_call_that_is_silent(world: World) -> None:
    world.leading(100)
    world.clock.advance(TOGETHER_S / 2)
    world.leading(101)
    early = world.announcement(0)
    assert world.shared.enter(early) == pytest.approx(TOGETHER_S)
    world.clock.advance(TOGETHER_S * 0.75)
    late = world.announcement(1)
    assert world.shared.enter(late) == pytest.approx(TOGETHER_S / 4)
    world.clock.advance(TOGETHER_S / 4)
    assert world.shared.leave(early)  # It has waited long enough, and takes the others along.
    assert indexes(world.shared.lead(early)) == [0, 1]
    world.clock.advance(TOGETHER_S)
    world.leading(2)  # At once.


def test_one_that_leaves_is_not_sent_and_is_not_woken(world: World) -> None:
    first, second = world.busy()
    gone, stays = world.waiting(0), world.waiting(1)
    assert world.shared.leave(gone)
    world.shared.end(first, judged(first.request))
    assert indexes(world.shared.lead(stays)) == [1]
    assert not world.shared.leave(stays)
    world.shared.end(stays, judged(stays.request))
    world.shared.end(second, judged(second.request))
    assert world.woken == [stays]


def test_a_call_takes_so_many_and_the_rest_goes_with_the_next(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "TOGETHER_COUNT_MAX", 3)
    first, second = world.busy()
    later = [world.waiting(index) for index in range(5)]
    world.shared.end(first, judged(first.request))
    sent = world.shared.lead(later[0])
    assert indexes(sent) == [0, 1, 2]
    world.shared.end(second, judged(second.request))
    world.shared.end(later[0], judged(sent))
    assert indexes(world.shared.lead(later[3])) == [3, 4]


def test_a_call_takes_so_many_bytes_and_a_large_one_goes_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "TOGETHER_BYTES_MAX", 1000)
    first, _ = world.busy()
    large = world.waiting(0, bodies=[b"x" * 2000])
    small = [world.waiting(index, bodies=[b"x" * 400]) for index in range(1, 5)]
    world.shared.end(first, judged(first.request))
    assert indexes(world.shared.lead(large)) == [0]
    world.shared.end(large, judged(large.request))
    assert indexes(world.shared.lead(small[0])) == [1, 2]


def together(world: World) -> tuple[Sharer, Sharer]:
    """Two callers in one call."""
    first, _ = world.busy()
    leader, other = world.waiting(0), world.waiting(1)
    world.shared.end(first, judged(first.request))
    world.shared.lead(leader)
    return leader, other


@pytest.mark.parametrize(
    "error",
    [
        UnavailableError("the server is away"),
        DeadlineExceededError("the server was silent"),
        BackpressureError("too much waits", 2.5),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_that_each_retries_is_raised_to_each_as_its_own(
    world: World, error: ReplayBufferError
) -> None:
    error.__cause__ = ValueError("of gRPC")
    leader, other = together(world)
    world.shared.end(leader, error)
    caught = []
    for each in (leader, other):
        with pytest.raises(type(error), match=str(error)) as raised:
            each.result()
        caught.append(raised.value)
    assert caught[0] is not caught[1]  # Notes and tracebacks of one are not those of another.
    assert caught[0].__dict__ == caught[1].__dict__
    assert [each.__cause__ for each in caught] == [error.__cause__] * 2


@pytest.mark.parametrize(
    "outcome",
    [
        InvalidRequestError("fragments[1].step_count", "is 0"),
        None,
        pb.AppendFragmentsResponse(results=[pb.AppendResult(outcome=ADMITTED)]),
    ],
    ids=["refused", "unheard", "too short"],
)
def test_after_what_may_concern_one_alone_each_sends_its_own(world: World, outcome: Any) -> None:
    leader, other = together(world)
    world.shared.end(leader, outcome)
    for each in (leader, other):
        with pytest.raises(TogetherError):
            each.result()


def test_one_alone_gets_its_refusal(world: World) -> None:
    own = world.leading(0)
    refusal = InvalidRequestError("fragments[0].step_count", "is 0")
    world.shared.end(own, refusal)
    with pytest.raises(InvalidRequestError) as raised:
        own.result()
    assert raised.value is refusal


def test_what_one_that_goes_away_was_to_lead_each_of_the_others_sends_alone(world: World) -> None:
    first, second = world.busy()
    gone, other = world.waiting(0), world.waiting(1)
    world.shared.end(first, judged(first.request))
    assert world.woken == [gone]
    world.shared.end(gone, None)
    world.shared.end(gone, None)
    assert world.woken == [gone, other]
    with pytest.raises(TogetherError):
        other.result()
    world.shared.end(second, judged(second.request))
    world.busy()


def test_one_that_goes_away_waits_no_longer(world: World) -> None:
    first, _ = world.busy()
    gone, stays = world.waiting(0), world.waiting(1)
    world.shared.end(gone, None)
    world.shared.end(first, judged(first.request))
    assert world.woken == [stays]
    assert indexes(world.shared.lead(stays)) == [1]


def test_what_was_sent_is_free_at_once_also_where_nothing_looks_for_cycles(world: World) -> None:
    request = world.announcement(0).request
    gc.disable()
    try:
        own = Sharer(Call("AppendFragments", request, lambda answer: answer), lambda: None)
        assert world.shared.enter(own) == 0.0
        world.shared.end(own, judged(world.shared.lead(own)))
        freed = weakref.ref(own)
        del own
        assert freed() is None
    finally:
        gc.enable()


def releases(world: World) -> list[Sharer]:
    """Three callers whose leases end by one call, the first of them as its leader."""
    first, second = world.release("first"), world.release("second")
    for each in (first, second):
        assert world.shared.enter(each) == 0.0
        world.shared.lead(each)
    later = [world.release(name) for name in ("a", "b", "c")]
    assert all(world.shared.enter(each) > 0.0 for each in later)
    world.shared.end(first, pb.ReleaseLeaseResponse(ended_count=1))
    assert world.woken == later[:1]
    return later


def test_leases_end_together_and_each_of_their_callers_hears_of_it(world: World) -> None:
    later = releases(world)
    sent = world.shared.lead(later[0])
    assert [sent.lease_id, *sent.further_lease_ids] == ["a", "b", "c"]
    assert (sent.buffer, sent.mode) == ("b", pb.RELEASE_MODE_CONSUMED)
    answer = pb.ReleaseLeaseResponse(ended_count=3)
    world.shared.end(later[0], answer)
    assert [each.result() for each in later] == [answer] * 3


@pytest.mark.parametrize("ended_count", [0, 2, 4])
def test_where_a_server_did_not_end_all_of_them_each_ends_its_own(
    world: World, ended_count: int
) -> None:
    later = releases(world)
    world.shared.lead(later[0])
    world.shared.end(later[0], pb.ReleaseLeaseResponse(ended_count=ended_count))
    for each in later:
        with pytest.raises(TogetherError):
            each.result()


def test_a_server_that_knows_of_no_further_leases_ends_one_alone(world: World) -> None:
    own = world.release("a")
    assert world.shared.enter(own) == 0.0
    assert world.shared.lead(own) is own.request
    world.shared.end(own, pb.ReleaseLeaseResponse())
    assert own.result() == pb.ReleaseLeaseResponse()


def test_leases_of_another_buffer_and_appends_neither_wait_nor_go_along(world: World) -> None:
    later = releases(world)
    other = world.release("other", buffer="c")
    assert world.shared.enter(other) == 0.0
    world.leading(0, session="")
    sent = world.shared.lead(later[0])
    assert list(sent.further_lease_ids) == ["b", "c"]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_and_ends_in_whatever_order_all_are_sent_once_and_hear_of_their_own(
    seed: int,
) -> None:
    print(f"seed {seed}")  # noqa: T201 - shown where it fails
    rng = random.Random(seed)
    world = World()
    under_way: dict[Sharer, pb.AppendFragmentsRequest] = {}
    waits: dict[Sharer, float] = {}
    came: list[Sharer] = []
    sent: list[int] = []
    left: set[int] = set()

    def send(sharer: Sharer) -> None:
        request = world.shared.lead(sharer)
        sent.extend(indexes(request))
        under_way[sharer] = request
        for each in sharer.company:
            waits.pop(each, None)

    def end(sharer: Sharer) -> None:
        world.woken.clear()
        world.shared.end(sharer, judged(under_way.pop(sharer)))
        for each in world.woken:
            if each.answer is None:
                send(each)

    for number in range(600):
        match rng.choice(("come", "come", "end", "leave", "pass")):
            case "come":
                buffer = rng.choice(("b", "b", "c"))
                own = world.announcement(2 * number, 2 * number + 1, buffer=buffer)
                came.append(own)
                if wait_s := world.shared.enter(own):
                    assert wait_s <= TOGETHER_S + 1e-9
                    waits[own] = world.clock() + wait_s
                else:
                    send(own)
            case "end" if under_way:
                end(rng.choice(list(under_way)))
            case "leave" if waits:
                gone = rng.choice(list(waits))
                assert world.shared.leave(gone)
                left.update(indexes(gone.request))
                del waits[gone]
            case _:
                world.clock.advance(TOGETHER_S / 5)
        for each in [each for each, until in waits.items() if until <= world.clock() + 1e-9]:
            if each in waits and world.shared.leave(each):
                send(each)
    while under_way:
        end(next(iter(under_way)))
    assert waits == {}
    expected = {index for each in came for index in indexes(each.request)} - left
    assert sorted(sent) == sorted(expected)
    for each in came:
        if not left.intersection(indexes(each.request)):
            outcomes = [result.outcome for result in each.result().results]
            assert outcomes == [ADMITTED, STALE]


@growth.marked
def test_each_caller_takes_as_long_beside_those_of_many_buffers_as_of_few() -> None:
    def ending(buffer_count: int) -> Callable[[], object]:
        world, buffers = World(), [str(number) for number in range(buffer_count)]
        first, *_ = [[world.leading(i, buffer=each) for each in buffers] for i in range(2)]
        for each in buffers:
            world.waiting(2, buffer=each)
        answer = judged(first[0].request)

        def end() -> None:
            for each in first:
                world.shared.end(each, answer)

        return end

    growth.check(ending, 4096)
