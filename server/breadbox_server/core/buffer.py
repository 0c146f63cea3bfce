"""One named buffer."""

from collections.abc import Callable

from breadbox_server.core import inputs
from breadbox_server.core.config import BufferConfig
from breadbox_server.core.description import AppendCredit, BufferDescription
from breadbox_server.core.errors import DomainError
from breadbox_server.core.events import Event
from breadbox_server.core.ids import BufferName, CallerId, RequestId
from breadbox_server.core.inputs import Appended, Fragment, GrantedFragment, ModelState, Published


class ReplayBuffer:
    """One named buffer as a synchronous, deterministic state machine."""

    def __init__(
        self,
        name: BufferName,
        config: BufferConfig,
        *,
        draw_seed: int,
        events: list[Event],
        next_caller_id: Callable[[], CallerId],
    ) -> None:
        self.config = config
        self.model = ModelState(inputs.SessionId(""), None, None)

    def start_session(self, input: inputs.StartSession, *, now: float) -> ModelState:
        raise NotImplementedError

    def end_session(self, input: inputs.EndSession, *, now: float) -> None:
        raise NotImplementedError

    def publish(self, input: inputs.PublishModel, *, now: float) -> Published:
        raise NotImplementedError

    def append(self, input: inputs.AppendFragment, *, now: float) -> Appended:
        raise NotImplementedError

    def fetch(self, input: inputs.Fetch, *, now: float) -> CallerId:
        raise NotImplementedError

    def cancel_fetch(self, input: inputs.CancelFetch, *, now: float) -> None:
        raise NotImplementedError

    def renew_lease(self, input: inputs.RenewLease, *, now: float) -> float:
        raise NotImplementedError

    def release_lease(self, input: inputs.ReleaseLease, *, now: float) -> None:
        raise NotImplementedError

    def undo_grant(self, input: inputs.UndeliveredGrant, *, now: float) -> None:
        raise NotImplementedError

    def drop_payloads(self, input: inputs.DropPayloads, *, now: float) -> int:
        raise NotImplementedError

    def update(self, input: inputs.UpdateBuffer, *, now: float) -> None:
        raise NotImplementedError

    def close(self, error: DomainError, *, now: float) -> None:
        raise NotImplementedError

    def refuse_waiters(self, error: DomainError, *, now: float) -> None:
        raise NotImplementedError

    def handle_timer(self, *, now: float) -> None:
        raise NotImplementedError

    def next_timer(self) -> float | None:
        raise NotImplementedError

    def describe(self, *, now: float) -> BufferDescription:
        raise NotImplementedError

    def prepared(self, request_id: RequestId) -> tuple[GrantedFragment, ...]:
        raise NotImplementedError

    def append_credit(self) -> AppendCredit:
        raise NotImplementedError

    def judge(self, fragment: Fragment, *, now: float) -> Appended | None:
        raise NotImplementedError

    def check_invariants(self) -> None:
        raise NotImplementedError
