"""What goes wrong: every delay, loss and outage, all drawn from the seed.

Everything that draws has a generator of its own, named after it, so that one more draw in one place
does not reshuffle the whole simulation.
"""

import asyncio
import contextvars
import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, TypeVar

from breadbox.model.errors import StoreUnavailableError

ResultT = TypeVar("ResultT")

ANSWER_S = 5.0
"""How long journal and store may take for one answer: what a server allows Redis by default."""


class World(StrEnum):
    """What goes wrong beside the common weather: kills, partitions, losses, errors, delays.

    In each, nothing acknowledged is lost, nothing is granted stale or more often than `uses_max`,
    every call that ends at its deadline ends, and at the end nothing is left behind.
    """

    WEATHER = "weather"
    """Nothing else."""
    RIVALS = "rivals"
    """Servers on one journal: each may be stopped between any two steps, and go on after others
    claimed. Who was replaced deletes nothing, and ends soon after it woke."""
    YOUNGER = "younger"
    """Journal, payload store, or both come back as they were a while ago. A server that lives loses
    nothing but payloads, and soon grants none of those; one that was down has all that was
    acknowledged when the copy was made. What was lost so is counted."""
    DISK = "disk"
    """Payloads and journal share a disk that fills, also by a stranger. Whatever payloads took,
    what makes room goes on; once the stranger has left, everything goes on."""
    RIVALS_YOUNGER = "rivals+younger"
    """Both at once: a journal comes back as it was before a server was replaced, which may wake
    then. Nothing is lost that the server knew which claimed last, is awake, and speaks up."""
    SILENCE = "silence"
    """Journal and store take requests and do not answer, for seconds to a minute. Calls end by
    their deadlines, and once there are answers everything goes on."""
    SELECTION = "selection"
    """Chunks are drawn, and leave, by any order; somebody sets priorities and deletes chunks, late
    and twice. No chunk ever has a priority that was meant for another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """How bad the world is. Probabilities are per message or per call."""

    world: World = World.WEATHER
    delay_s: float = 0.02
    """Mean of the time that anything takes on its way."""
    slow_probability: float = 0.05
    """Of taking fifty times as long."""
    drop_probability: float = 0.03
    duplicate_probability: float = 0.03
    store_error_probability: float = 0.03
    journal_error_probability: float = 0.03
    crash_count: int = 3
    """Times that the server is killed and started again."""
    partition_count: int = 2
    """Times that one client can reach nobody for a while."""
    loss_count: int = 0
    """Times that the store forgets some payloads."""
    world_count: int = 0
    """Times that happens what makes this world another."""


class Fates:
    """Draws what happens to what, by name."""

    def __init__(self, seed: int, plan: FaultPlan) -> None:
        self._seed = seed
        self.plan = plan
        self.is_healed = False
        """Set at the end: from then on nothing goes wrong any more."""
        self.silent: set[str] = set()
        """What takes requests and does not answer: "journal", "store"."""
        self._heard_since = 0.0
        self.restarts = {"journal": 0, "store": 0}
        """How often each has come back; what was on its way to it was lost with the connections."""
        self.violations: list[AssertionError] = []
        """What did not hold where nobody who simulates could hear of it."""

    def end_silence(self, now: float) -> None:
        """From now on everything answers."""
        self.silent.clear()
        self._heard_since = now

    def heard_since(self, now: float) -> float:
        """Since when everything has answered; now where something does not."""
        return now if self.silent else self._heard_since

    def rng(self, name: str) -> random.Random:
        return random.Random(f"{self._seed}/{name}")

    def happens(self, rng: random.Random, probability: float) -> bool:
        return rng.random() < probability and not self.is_healed

    def delay_s(self, rng: random.Random) -> float:
        delay_s = rng.expovariate(1 / self.plan.delay_s)
        return delay_s * 50 if self.happens(rng, self.plan.slow_probability) else delay_s

    async def store_trip(self, rng: random.Random) -> None:
        """Go to the store; may fail before it is reached.

        Raises:
            StoreUnavailableError: It was not reached.
        """
        is_silent = "store" in self.silent
        await asyncio.sleep(ANSWER_S if is_silent else self.delay_s(rng))
        if is_silent or self.happens(rng, self.plan.store_error_probability):
            raise StoreUnavailableError("the simulated store is away")


class Link:
    """A connection of one process to journal or store.

    A command that was sent arrives whatever becomes of its sender meanwhile, as those do that are
    in a socket already: it may stop, or be killed.

    Args:
        fates: Draw delays and failures.
        to: "journal" or "store".
        name: Of the generator.
        error_probability: Of a failure, each way.
        error: Made for each.
    """

    def __init__(
        self,
        fates: Fates,
        to: str,
        name: str,
        error_probability: float,
        error: Callable[[str], Exception],
    ) -> None:
        self._fates = fates
        self._to = to
        self._rng = fates.rng(name)
        self._error_probability = error_probability
        self._error = error
        self._outside = contextvars.Context()
        """Of no process: what is on its way does not stop with one."""
        self.is_cut = False
        """The process was killed: what it does from now on reaches nothing."""

    async def ask(self, work: Callable[[], ResultT]) -> ResultT:
        """Have something done at the other end; gives, or raises, what comes of it there.

        Who hears nothing for `ANSWER_S` gives up, as the server does, and it may be done all the
        same, even later than what is asked next.
        """
        loop = asyncio.get_running_loop()
        if self.is_cut:
            await asyncio.Event().wait()
        answer: asyncio.Future[ResultT] = loop.create_future()
        arrive = partial(self._arrive, work, answer, self._fates.restarts[self._to])
        delay_s = self._fates.delay_s(self._rng)
        loop.call_later(delay_s, arrive, context=self._outside)
        give_up = partial(_settle, answer, None, self._error(f"the {self._to} is silent"))
        timer = loop.call_later(ANSWER_S, give_up, context=self._outside)
        try:
            return await answer
        finally:
            timer.cancel()

    def _arrive(
        self, work: Callable[[], Any], answer: "asyncio.Future[Any]", restarts: int
    ) -> None:
        result: Any = None
        error: Exception | None = None
        is_silent = self._to in self._fates.silent
        if is_silent and self._rng.random() < 0.5:
            return  # Half of what nobody answers is not done either.
        if self._fails() or restarts != self._fates.restarts[self._to]:
            error = self._error(f"the simulated {self._to} is away")
        else:
            try:
                result = work()
            except AssertionError as violation:
                self._fates.violations.append(violation)
                error = violation
            except Exception as raised:  # noqa: BLE001  it is the answer
                error = raised
            else:
                if self._fails():
                    error = self._error(f"the simulated {self._to}'s answer was lost")
        if not is_silent:
            deliver = partial(_settle, answer, result, error)
            delay_s = self._fates.delay_s(self._rng)
            loop = asyncio.get_running_loop()
            loop.call_later(delay_s, deliver, context=self._outside)

    def _fails(self) -> bool:
        return self._fates.happens(self._rng, self._error_probability)


def _settle(answer: "asyncio.Future[Any]", result: Any, error: Exception | None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(result)
    else:
        answer.set_exception(error)
