"""Whether this server serves: says so to callers, health and metrics, and ends it in order."""

import logging
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Final

import grpc

from breadbox_server.base.errors import JOURNAL, OutageError, StandbyError, StartError
from breadbox_server.base.jobs import with_time_limit
from breadbox_server.driver import Driver
from breadbox_server.journal.standby import Standby
from breadbox_server.journal.storage.interface import JournalError
from breadbox_server.metrics.metrics import Metrics
from breadbox_server.rpc.health import Health
from breadbox_server.rpc.interceptors import CallInterceptor

log = logging.getLogger(__name__)

STOP_S_MAX: Final = 2.0
"""Seconds beyond the grace in which gRPC has to cut off the calls that are left."""
FLUSH_S_MAX: Final = 5.0
"""Seconds that the last deletions may take; what is left is deleted at the next start."""
MEANWHILE: Final = "until then it does not lead, and it ends if another server leads meanwhile"


@dataclass(repr=False, eq=False)
class LeadershipStatus:
    """What a server reports of itself from the moment that it answers.

    If others may lead (`has_others`), callers are sent there; else calls wait for the journal.
    """

    interceptor: CallInterceptor
    health: Health
    metrics: Metrics
    _: KW_ONLY
    has_others: bool
    _driver: Driver | None = field(default=None, init=False)

    def stand_by(self, standby: Standby) -> None:
        """Answer calls of health, and refuse all others: another server leads."""
        self.interceptor.hold(standby.refusal)
        self.health.stand_by(standby.reason, standby.is_warm)

    def begin(self, driver: Driver) -> None:
        """Lead, with a driver that is ready."""
        self._driver = driver
        self.be_certain(True)

    def be_certain(self, is_certain: bool) -> None:
        """Lead if the journal is certainly this server's; else stop: another may lead."""
        driver = self._driver
        assert driver is not None, "it has not begun"
        self.metrics.leads.set(is_certain)
        if is_certain:
            self.interceptor.serve(
                driver.outage, driver.appends.queue.precedence, driver.uses, driver.session_users
            )
            self.health.serve()
        elif self.has_others:
            log.warning("%s; %s", self._outage(), MEANWHILE)
            self.interceptor.hold(self._refusal, self._outage())
            self.health.stand_by(lambda: str(self._outage()), lambda: False)

    def end(self) -> None:
        """Lead no more, for good."""
        self.health.end()
        self.metrics.leads.set(0)

    def _refusal(self) -> StandbyError:
        assert self._driver is not None
        text = f"{self._outage()}; {MEANWHILE}"
        return StandbyError(lag_s=self._driver.turns.doubtful_s, text=text)

    def _outage(self) -> OutageError:
        assert self._driver is not None
        outage = self._driver.outage()
        if outage is not None and JOURNAL in outage.places:
            return outage
        return OutageError((JOURNAL,), self._driver.turns.doubtful_s, {})


@dataclass(repr=False, eq=False)
class Shutdown:
    """End a server in order, each step within a limit; the next start completes the rest."""

    server: grpc.aio.Server
    leading: LeadershipStatus
    grace_s: float
    on_end: Callable[[], None]
    driver: Driver | None = field(default=None, init=False)
    """Finishes what was begun; None if nothing was."""
    _has_begun: bool = field(default=False, init=False)
    _has_failed: bool = field(default=False, init=False)

    def fail(self, error: BaseException) -> None:
        """Log why the server serves no more, and begin its end; a job cannot go on."""
        if not self._has_failed:
            self._has_failed = True
            if isinstance(error, JournalError | StartError):
                log.error("ending: %s", error)
            else:
                log.error("ending, which is a bug", exc_info=error)
            self._begin()

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self.leading.end()
            self.on_end()

    async def drain(self) -> None:
        """Refuse what is new, end what runs, write down and delete what is left.

        Of a failed server nothing becomes durable any more: calls waiting for that are cut off.
        """
        driver = self.driver
        if driver is None:
            # Nobody was served: what the start has begun ends with it, and no end is watched.
            self.leading.end()
            await with_time_limit(partial(self.server.stop, 0.0), STOP_S_MAX, "ending the server")
            return
        log.info("draining")
        self._begin()
        driver.drain()
        grace_s = 0.0 if self._has_failed else self.grace_s
        await with_time_limit(
            partial(self.server.stop, grace_s), grace_s + STOP_S_MAX, "ending the calls that run"
        )
        if not self._has_failed:
            await with_time_limit(
                driver.flush, FLUSH_S_MAX, "writing down and deleting what is left"
            )
        if left := len(driver.deletions):
            log.warning("%d payloads are left for deletion", left)
        log.info("stopped")
