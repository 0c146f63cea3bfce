"""Which item is drawn, and which one goes at capacity: Reverb's `reverb.selectors`.

Each serves as a table's sampler and as its remover, and becomes a sampler of the buffer that the
table is.
"""

from dataclasses import dataclass
from typing import Final

__all__ = ["Fifo", "Lifo", "MaxHeap", "MinHeap", "Prioritized", "Selector", "Uniform"]

_PRIORITISED: Final = "prioritised"


@dataclass(frozen=True, slots=True)
class Selector:
    """One of the orders below."""

    name: str
    """Of the buffer's sampler."""
    priority_exponent: float = 1.0
    """For `prioritised`: weights are priorities to this power."""

    @property
    def is_prioritised(self) -> bool:
        """Whether it draws by weights."""
        return self.name == _PRIORITISED


def Fifo() -> Selector:  # noqa: N802 - a class, as far as scripts for Reverb know.
    """Oldest item first."""
    return _FIFO


def Lifo() -> Selector:  # noqa: N802
    """Newest item first."""
    return _LIFO


def Uniform() -> Selector:  # noqa: N802
    """Each item with the same probability."""
    return _UNIFORM


def MaxHeap() -> Selector:  # noqa: N802
    """Highest priority first; of equals the one that was inserted or updated first."""
    return _MAX_HEAP


def MinHeap() -> Selector:  # noqa: N802
    """Lowest priority first; of equals the one that was inserted or updated first."""
    return _MIN_HEAP


def Prioritized(priority_exponent: float) -> Selector:  # noqa: N802
    """Each item in proportion to its priority to the power of `priority_exponent`.

    Raises:
        ValueError: The exponent is not from 0 to 8.
    """
    if not 0 <= priority_exponent <= 8:
        raise ValueError(f"priority_exponent must be from 0 to 8, got {priority_exponent}")
    return Selector(_PRIORITISED, float(priority_exponent))


_FIFO: Final = Selector("oldest_first")
_LIFO: Final = Selector("newest_first")
_UNIFORM: Final = Selector("uniform")
_MAX_HEAP: Final = Selector("highest_priority")
_MIN_HEAP: Final = Selector("lowest_priority")
