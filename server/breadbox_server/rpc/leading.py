"""Whether this server leads, and who is told of it: callers, health and metrics."""

import logging
from typing import Final

from breadbox_server.base.errors import JOURNAL, OutageError, StandbyError
from breadbox_server.driver import Driver
from breadbox_server.journal.standby import Standby
from breadbox_server.metrics.metrics import Metrics
from breadbox_server.rpc.health import Health
from breadbox_server.rpc.interceptors import CallInterceptor

log = logging.getLogger(__name__)

MEANWHILE: Final = "until then it does not lead, and it ends if another server leads meanwhile"


class Leading:
    """What a server says of itself from the moment that it answers.

    Args:
        interceptor: Lets calls in, or refuses them.
        health: Says whether the server serves.
        metrics: Show whether it leads.
        has_others: Whether another server may lead in its place, to which callers are sent then.
            Where there is none, calls wait for the journal as they do in any outage.
    """

    def __init__(
        self, interceptor: CallInterceptor, health: Health, metrics: Metrics, *, has_others: bool
    ) -> None:
        self._interceptor = interceptor
        self._health = health
        self._metrics = metrics
        self._has_others = has_others
        self._driver: Driver | None = None

    def stand_by(self, standby: Standby) -> None:
        """Answer those who ask for health, and tell all others that another server leads."""
        self._interceptor.hold(standby.refusal)
        self._health.stand_by(standby.reason, standby.is_warm)

    def begin(self, driver: Driver) -> None:
        """Lead, with a driver that is ready."""
        self._driver = driver
        self.be_certain(True)

    def be_certain(self, is_certain: bool) -> None:
        """Take note that it is certain that the journal is this server's, or is so no more.

        A server that is not does not lead, whatever else works: another one may by now.
        """
        driver = self._driver
        assert driver is not None, "it has not begun"
        self._metrics.leads.set(is_certain)
        if is_certain:
            self._interceptor.serve(driver.outage)
            self._health.serve()
        elif self._has_others:
            log.warning("%s; %s", self._outage(), MEANWHILE)
            self._interceptor.hold(self._refusal, self._outage())
            self._health.stand_by(lambda: str(self._outage()), lambda: False)

    def end(self) -> None:
        """Lead no more, for good."""
        self._health.end()
        self._metrics.leads.set(0)

    def _refusal(self) -> StandbyError:
        assert self._driver is not None
        text = f"{self._outage()}; {MEANWHILE}"
        return StandbyError(lag_s=self._driver.turns.doubtful_s, text=text)

    def _outage(self) -> OutageError:
        assert self._driver is not None
        told = self._driver.outage()
        if told is not None and JOURNAL in told.places:
            return told
        return OutageError((JOURNAL,), self._driver.turns.doubtful_s, {})
