"""Choose which item is drawn, and which one leaves at capacity: Reverb's `reverb.selectors`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Selector:
    """An order in which items are drawn or removed; the functions below make one."""

    name: str
    """The buffer's sampler."""
    priority_exponent: float = 1.0
    """For `prioritised`: weights are priorities to this power."""

    @property
    def is_prioritised(self) -> bool:
        """True if it draws in proportion to weights."""
        return self.name == "prioritised"


def Fifo() -> Selector:  # noqa: N802 - Reverb's name, of a class.
    """Oldest item first."""
    return Selector("oldest_first")


def Lifo() -> Selector:  # noqa: N802
    """Newest item first."""
    return Selector("newest_first")


def Uniform() -> Selector:  # noqa: N802
    """Each item with the same probability."""
    return Selector("uniform")


def MaxHeap() -> Selector:  # noqa: N802
    """Highest priority first; of equals the one that was inserted or updated first."""
    return Selector("highest_priority")


def MinHeap() -> Selector:  # noqa: N802
    """Lowest priority first; of equals the one that was inserted or updated first."""
    return Selector("lowest_priority")


def Prioritized(priority_exponent: float) -> Selector:  # noqa: N802
    """Each item in proportion to its priority to the power of `priority_exponent`, 0 to 8."""
    if not 0 <= priority_exponent <= 8:
        raise ValueError(f"priority_exponent must be from 0 to 8, got {priority_exponent}")
    return Selector("prioritised", float(priority_exponent))
