"""Calls of one client that come while others are under way go together in the next.

A call costs client and server many times what an append or a release does, so threads or tasks that
append, or end leases, one by one at the same time share theirs. One that comes while nothing is
under way is sent at once.

Invariants:
    H1  A request is in at most one call of this kind, and its caller is answered once.
    H2  Nobody waits for a call of others that has been under way for `TOGETHER_S`.
    H3  What is asked of one caller (to wait for room, to send it otherwise, to give up) is asked of
        no other: a call of several waits for no room, and each of a refused one sends its own.
"""

import threading
from collections.abc import Callable, Mapping
from copy import copy
from itertools import islice
from typing import Any, Final

from google.protobuf.duration_pb2 import Duration

from breadbox.model.errors import ReplayBufferError
from breadbox.operations.calls import Call
from breadbox.operations.retry import hint_s
from breadbox.v1 import replay_buffer_service_pb2 as pb

TOGETHER_S: Final = 0.05
"""Seconds after which a call under way is waited for no longer: many times what one takes, and
little beside a wait for room."""
TOGETHER_COUNT_MAX: Final = 64
"""Most requests of one call."""
TOGETHER_BYTES_MAX: Final = 256 * 2**10
"""Bytes of a call beyond which it takes no further request."""


class TogetherError(ReplayBufferError):
    """A call of several callers was refused, or ended unheard: each repeats its own.

    Never leaves a client.
    """


class _Appends:
    """Appends of one session."""

    beside_max = 2
    """Callers of one call under way, beyond which another waits for company, as beside two."""

    @staticmethod
    def destination(request: pb.AppendFragmentsRequest) -> str:
        return request.fragments[0].session_id

    @staticmethod
    def together(requests: list[pb.AppendFragmentsRequest]) -> pb.AppendFragmentsRequest:
        together = pb.AppendFragmentsRequest(buffer=requests[0].buffer)
        is_any_inline = any(each.payloads for each in requests)
        for each in requests:
            together.fragments.extend(each.fragments)
            if is_any_inline:
                together.payloads.extend(each.payloads or [b""] * len(each.fragments))
        return together

    @staticmethod
    def parts(
        requests: list[pb.AppendFragmentsRequest], whole: pb.AppendFragmentsResponse
    ) -> list[pb.AppendFragmentsResponse]:
        counts = [len(each.fragments) for each in requests]
        if len(whole.results) != sum(counts):
            return []
        results = iter(whole.results)
        return [
            pb.AppendFragmentsResponse(
                results=islice(results, count),
                session_id=whole.session_id,
                model_version=whole.model_version if whole.HasField("model_version") else None,
                # At once: by itself it may wait for room.
                retry_delay=Duration() if whole.HasField("retry_delay") else None,
            )
            for count in counts
        ]


class _Releases:
    """Ends of leases that were used in full."""

    beside_max = 1

    @staticmethod
    def destination(request: pb.ReleaseLeaseRequest) -> str:
        del request
        return ""

    @staticmethod
    def together(requests: list[pb.ReleaseLeaseRequest]) -> pb.ReleaseLeaseRequest:
        first, *further = requests
        return pb.ReleaseLeaseRequest(
            buffer=first.buffer,
            lease_id=first.lease_id,
            mode=first.mode,
            further_lease_ids=[each.lease_id for each in further],
        )

    @staticmethod
    def parts(
        requests: list[pb.ReleaseLeaseRequest], whole: pb.ReleaseLeaseResponse
    ) -> list[pb.ReleaseLeaseResponse]:
        return [whole] * whole.ended_count


_KINDS: Final[Mapping[str, type[_Appends] | type[_Releases]]] = {
    "AppendFragments": _Appends,
    "ReleaseLease": _Releases,
}
"""How calls that may be shared go together, by name."""


class Sharer:
    """One caller's request, until it is answered."""

    def __init__(self, call: Call[Any], wake: Callable[[], None]) -> None:
        """Call *wake*, in any thread, once the request is answered, or is to lead."""
        request: Any = call.request
        self.request = request
        self.kind = _KINDS[call.method]
        self.destination = (call.method, request.buffer, self.kind.destination(request))
        """What requests share that go together."""
        self.size_bytes = request.ByteSize()
        self.wake = wake
        self.began_at = 0.0
        """Time at which the call began that it leads."""
        self.company: list[Sharer] = []
        """The requests in the call that this one leads, itself first. Empty before and after it:
        no cycle, so that its memory is free at once."""
        self.answer: Any = None
        """The server's response, or an error, or None before."""

    def result(self) -> Any:
        """Return the response; raise what is an error."""
        if isinstance(self.answer, ReplayBufferError):
            raise self.answer
        return self.answer


class SharedCalls:
    """Which requests wait for a call of others, and which go together. Thread-safe.

    One that comes is sent at once beside a call of few callers: then the server has work while a
    client prepares more, and judges both at once. What comes beside more waits for its turn.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._under_way: dict[tuple[str, str, str], list[Sharer]] = {}
        """The leaders of calls under way, in the order of their beginning, by destination."""
        self._waiting: dict[tuple[str, str, str], dict[Sharer, None]] = {}
        """Those that wait, in the order in which they came, by destination."""

    def enter(self, sharer: Sharer) -> float:
        """Return 0.0 if this one leads a call now, else for how long it waits to be woken."""
        with self._lock:
            under_way = self._under_way.get(sharer.destination, [])
            if _is_enough(under_way):
                left_s = under_way[-1].began_at + TOGETHER_S - self._now()
                if left_s > 0:
                    self._waiting.setdefault(sharer.destination, {})[sharer] = None
                    return left_s
            self._begin(sharer)
            return 0.0

    def leave(self, sharer: Sharer) -> bool:
        """Take one out that waits no longer; False if it is in a call, or leads one."""
        with self._lock:
            return self._take_out(sharer)

    def lead(self, sharer: Sharer) -> Any:
        """Return what one sends that leads; with it goes what waits and has its destination."""
        with self._lock:
            if sharer in self._under_way.get(sharer.destination, ()):
                self._take_company(sharer)  # What came since it was woken.
            else:
                self._begin(sharer)  # It has waited long enough.
        return sharer.request if len(sharer.company) == 1 else _together(sharer.company)

    def end(self, leader: Sharer, outcome: Any) -> None:
        """Answer all of a call, by the response or the error, or None if neither came. Idempotent.

        One that leads none, and goes away, waits no longer.
        """
        destination = leader.destination
        with self._lock:
            self._take_out(leader)
            if leader not in self._under_way.get(destination, ()):
                return
        company = leader.company
        for each, answer in zip(company, _answers(company, outcome), strict=True):
            each.answer = answer
        woken = company[1:]
        with self._lock:
            leader.company = []
            under_way = self._under_way[destination]
            under_way.remove(leader)
            if not under_way:
                del self._under_way[destination]
            if not _is_enough(under_way):
                waiting = iter(self._waiting.get(destination, ()))
                if (following := next(waiting, None)) is not None:
                    self._take_out(following)
                    self._begin(following)
                    woken.append(following)
        for each in woken:
            each.wake()

    def _begin(self, sharer: Sharer) -> None:
        self._under_way.setdefault(sharer.destination, []).append(sharer)
        sharer.company = [sharer]
        sharer.began_at = self._now()
        self._take_company(sharer)

    def _take_company(self, leader: Sharer) -> None:
        company = leader.company
        left_bytes = TOGETHER_BYTES_MAX - sum(each.size_bytes for each in company)
        came = len(company)
        for each in self._waiting.get(leader.destination, ()):
            left_bytes -= each.size_bytes
            if left_bytes < 0 or len(company) == TOGETHER_COUNT_MAX:
                break
            company.append(each)
        for each in company[came:]:
            self._take_out(each)

    def _take_out(self, sharer: Sharer) -> bool:
        """Have one wait no longer; False if it did not."""
        waiting = self._waiting.get(sharer.destination, {})
        if sharer not in waiting:
            return False
        del waiting[sharer]
        if not waiting:
            del self._waiting[sharer.destination]
        return True


def _is_enough(under_way: list[Sharer]) -> bool:
    match under_way:
        case []:
            return False
        case [one]:
            return len(one.company) > one.kind.beside_max
    return True


def _together(company: list[Sharer]) -> Any:
    return company[0].kind.together([each.request for each in company])


def _answers(company: list[Sharer], outcome: Any) -> list[Any]:
    """Return each one's part of a response, or an error that each retries; else each repeats."""
    if len(company) == 1 and outcome is not None:
        return [outcome]
    if isinstance(outcome, ReplayBufferError):
        if hint_s(outcome) is not None:
            return [outcome, *(_alike(outcome) for _ in company[1:])]
    elif outcome is not None:
        parts = company[0].kind.parts([each.request for each in company], outcome)
        if len(parts) == len(company):
            return parts
    return [TogetherError("is sent again, alone") for _ in company]


def _alike(error: ReplayBufferError) -> ReplayBufferError:
    """Return an error of the same class, text and fields, with a traceback of its own."""
    another = copy(error)
    another.__cause__ = error.__cause__
    return another
