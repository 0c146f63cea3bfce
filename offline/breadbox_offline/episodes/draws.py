"""Where the random numbers of the episode buffer come from."""

import json
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Draws(Protocol):
    """A source of draws; tests script one."""

    def steps(self, count: int, held_count: int) -> NDArray[np.int64]:
        """`count` positions below `held_count`, with replacement."""
        ...

    def lengths(self, count: int, low: int, high: int) -> NDArray[np.int64]:
        """`count` whole numbers from `low` to below `high`."""
        ...

    def order(self, held_count: int) -> NDArray[np.int64]:
        """Every position below `held_count` once, shuffled."""
        ...

    def get_state(self) -> str:
        """The state as text, so that `set_state` continues the same sequence."""
        ...

    def set_state(self, state: str) -> None:
        """Continue where `get_state` was called."""
        ...


class RandomDraws:
    """Uniform draws of a seeded generator."""

    def __init__(self, seed: int | None = None) -> None:
        self._generator = np.random.default_rng(seed)

    def steps(self, count: int, held_count: int) -> NDArray[np.int64]:
        """`count` positions below `held_count`, with replacement."""
        return self._generator.integers(0, held_count, size=count)

    def lengths(self, count: int, low: int, high: int) -> NDArray[np.int64]:
        """`count` whole numbers from `low` to below `high`."""
        return self._generator.integers(low, high, size=count)

    def order(self, held_count: int) -> NDArray[np.int64]:
        """Every position below `held_count` once, shuffled."""
        return self._generator.permutation(held_count)

    def get_state(self) -> str:
        """The generator's state; JSON, because its numbers have 128 bits."""
        return json.dumps(self._generator.bit_generator.state)

    def set_state(self, state: str) -> None:
        """Continue where `get_state` was called."""
        held: Any = json.loads(state)
        self._generator.bit_generator.state = held
