"""Use of the server by each token's holders, and the limits; rates do not survive a restart."""

from collections.abc import Callable, Iterable, Sequence
from math import ceil, inf
from typing import Final

from breadbox_server.access.authorization import Caller
from breadbox_server.base.clock import Clock
from breadbox_server.base.errors import QuotaExceededError, QuotaFullError
from breadbox_server.core.model.ids import BufferName, PayloadId, SessionId, WorkerId
from breadbox_server.core.model.inputs import Fragment, Payload
from breadbox_server.limits import EPISODES_OF_APPEND, QUOTA_BURST_S, TOKEN_WORKERS_MAX
from breadbox_server.metrics.metrics import Metrics


class Charge:
    """What one append takes of a token's quotas until it is answered, and for what it admits."""

    def __init__(
        self,
        hold: "Callable[[_Account, Payload], None] | None" = None,
        account: "_Account | None" = None,
        pending_bytes: int = 0,
    ) -> None:
        self._hold = hold
        self._account = account
        self._pending_bytes = pending_bytes

    def admitted(self, payload: Payload) -> None:
        """Charge a payload that is held from now on."""
        account = self._account
        if account is not None and self._hold is not None:
            moved_bytes = min(payload.size_bytes, self._pending_bytes)
            self._pending_bytes -= moved_bytes
            account.pending_bytes -= moved_bytes
            self._hold(account, payload)

    def end(self) -> None:
        """End the charge; what is admitted later still counts. Idempotent."""
        if self._account is not None:
            self._account.pending_bytes -= self._pending_bytes
            self._pending_bytes = 0


UNCHARGED: Final = Charge()


class _Allowance:
    """A rate limit. Unused allowance may come in a burst; a larger request takes it in advance."""

    def __init__(self, now: float) -> None:
        self._left = inf
        """Negative after a request of more than there was."""
        self._earned_at = now

    def take(self, count: int, rate: float, now: float) -> bool:
        earned = rate * (now - self._earned_at)
        self._left = min(max(1.0, rate * QUOTA_BURST_S), self._left + earned)
        self._earned_at = now
        if self._left <= 0:
            return False
        self._left -= count
        return True


class _Account:
    def __init__(self, name: str, now: float) -> None:
        self.name = name
        self.sessions: dict[BufferName, tuple[SessionId, set[WorkerId]]] = {}
        self.held_bytes = 0
        self.pending_bytes = 0
        self.is_bytes_known = False
        self.fragments = _Allowance(now)
        self.reports = _Allowance(now)
        """Its own, so that reports and fragments do not delay each other."""

    def worker_count(self) -> int:
        return sum(len(workers) for _, workers in self.sessions.values())


class Quotas:
    """The accounts of all tokens. Not thread-safe."""

    def __init__(
        self,
        clock: Clock,
        metrics: Metrics,
        held: Callable[[], Iterable[Fragment]],
        has_ended: Callable[[BufferName, WorkerId], bool],
    ) -> None:
        self._clock = clock
        self._metrics = metrics
        self._held = held
        self._has_ended = has_ended
        """True if a worker is a group that is not open: it does not count."""
        self._accounts: dict[str, _Account] = {}
        self._owners: dict[PayloadId, tuple[_Account, int]] = {}

    def charge(
        self, caller: Caller, buffer: BufferName, session: SessionId, fragments: Sequence[Fragment]
    ) -> Charge:
        """Charge an append until the charge is ended; raise QuotaFullError if a retry can help.

        Raises QuotaExceededError otherwise; nothing happens without tokens.
        """
        if not caller.name:
            return UNCHARGED
        account = self._account_of(caller)
        try:
            self._check_workers(account, caller, buffer, session, fragments)
            pending_bytes = self._check_bytes(account, caller, fragments)
            self._check_rate(account.fragments, caller, len(fragments))
        except (QuotaFullError, QuotaExceededError) as error:
            self._metrics.quota_refusals.labels(caller.name, error.quota).inc()
            raise
        if pending_bytes is None:
            return UNCHARGED
        account.pending_bytes += pending_bytes
        return Charge(self._charge_with, account, pending_bytes)

    def check_written(self, caller: Caller, unannounced_bytes: int, more_bytes: int) -> None:
        """Check that a caller may write more payloads, which count as held; raises as `charge`."""
        limit = caller.quotas.bytes_held_max
        if not caller.name or limit is None:
            return
        account = self._account_of(caller)
        try:
            self._check_held(account, caller, limit, more_bytes, unannounced_bytes)
        except (QuotaFullError, QuotaExceededError) as error:
            self._metrics.quota_refusals.labels(caller.name, error.quota).inc()
            raise

    def charge_report(self, caller: Caller, episode_count: int) -> None:
        """Charge a report of episodes at the rate of appends; many episodes count as several."""
        if not caller.name:
            return
        count = ceil(episode_count / EPISODES_OF_APPEND)
        try:
            self._check_rate(self._account_of(caller).reports, caller, count)
        except QuotaFullError as error:
            self._metrics.quota_refusals.labels(caller.name, error.quota).inc()
            raise

    def let_go(self, payloads: Iterable[Payload]) -> None:
        """Charge nobody for payloads that no buffer refers to any more."""
        if not self._owners:
            return
        for payload in payloads:
            owner = self._owners.pop(payload.payload_id, None)
            if owner is not None:
                account, size_bytes = owner
                account.held_bytes -= size_bytes
                self._metrics.token_bytes.labels(account.name).set(account.held_bytes)

    def _charge_with(self, account: _Account, payload: Payload) -> None:
        if payload.size_bytes and payload.payload_id not in self._owners:
            self._owners[payload.payload_id] = (account, payload.size_bytes)
            account.held_bytes += payload.size_bytes
            self._metrics.token_bytes.labels(account.name).set(account.held_bytes)

    def _check_workers(
        self,
        account: _Account,
        caller: Caller,
        buffer: BufferName,
        session: SessionId,
        fragments: Sequence[Fragment],
    ) -> None:
        known_session, workers = account.sessions.get(buffer, ("", set()))
        if known_session != session:
            workers = set()
        new = {
            each.worker_id
            for each in fragments
            if each.session_id == session and each.worker_id not in workers
        }
        if not new:
            return
        limit = caller.quotas.workers_max or TOKEN_WORKERS_MAX

        def count() -> int:
            # Other buffers' sessions may have ended meanwhile, and count until their next append.
            elsewhere = account.worker_count() - len(account.sessions.get(buffer, ("", ()))[1])
            return elsewhere + len(workers) + len(new)

        if count() > limit:
            for name, (_, known) in account.sessions.items():
                known.difference_update([each for each in known if self._has_ended(name, each)])
            if count() > limit:
                raise QuotaExceededError(caller.name, "workers_max", limit)
        workers |= new
        account.sessions[buffer] = (session, workers)
        self._metrics.token_workers.labels(caller.name).set(account.worker_count())

    def _check_bytes(
        self, account: _Account, caller: Caller, fragments: Sequence[Fragment]
    ) -> int | None:
        limit = caller.quotas.bytes_held_max
        if limit is None:
            return None
        size_bytes = sum(each.payload.size_bytes for each in fragments)
        self._check_held(account, caller, limit, size_bytes)
        return size_bytes

    def _check_held(
        self,
        account: _Account,
        caller: Caller,
        limit: int,
        more_bytes: int,
        unannounced_bytes: int = 0,
    ) -> None:
        if not account.is_bytes_known:
            account.is_bytes_known = True
            if caller.workers is not None:
                for fragment in self._held():
                    if caller.may_append_as(fragment.worker_id):
                        self._charge_with(account, fragment.payload)
        if more_bytes > limit:
            more = f" with the {more_bytes} of this call alone"
            raise QuotaExceededError(caller.name, "bytes_held_max", limit, more)
        taken_bytes = account.held_bytes + account.pending_bytes + unannounced_bytes
        if taken_bytes + more_bytes > limit:
            raise QuotaFullError(caller.name, "bytes_held_max", limit)

    def _check_rate(self, allowance: _Allowance, caller: Caller, count: int) -> None:
        rate = caller.quotas.appends_per_s_max
        if rate is not None and not allowance.take(count, rate, self._clock.now()):
            raise QuotaFullError(caller.name, "appends_per_s_max", rate)

    def _account_of(self, caller: Caller) -> _Account:
        account = self._accounts.get(caller.name)
        if account is None:
            account = self._accounts[caller.name] = _Account(caller.name, self._clock.now())
        return account
