"""What goes wrong: every delay, loss and outage, all drawn from the seed.

Everything that draws has a generator of its own, named after it, so that one more draw in one place
does not reshuffle the whole simulation.
"""

import asyncio
import random
from dataclasses import dataclass

from breadbox.errors import StoreUnavailableError


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """How bad the world is. Probabilities are per message or per call."""

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


class Fates:
    """Draws what happens to what, by name."""

    def __init__(self, seed: int, plan: FaultPlan) -> None:
        self._seed = seed
        self.plan = plan
        self.is_healed = False
        """Set at the end: from then on nothing goes wrong any more."""

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
        await asyncio.sleep(self.delay_s(rng))
        if self.happens(rng, self.plan.store_error_probability):
            raise StoreUnavailableError("the simulated store is away")
