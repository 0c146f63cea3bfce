"""Decide which call may proceed: Reverb's `reverb.rate_limiters`, with Reverb's checks."""

import math
import warnings
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RateLimiter:
    """The general form: samples wait below `min_diff`, inserts above `max_diff`.

    Both bound `inserts * samples_per_insert - samples`, once `min_size_to_sample` items are there.
    Before that, inserts never wait and samples always do.
    """

    samples_per_insert: float
    min_size_to_sample: int
    min_diff: float
    max_diff: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.samples_per_insert) and self.samples_per_insert > 0):
            raise ValueError(f"samples_per_insert must be > 0, got {self.samples_per_insert}")
        if self.min_size_to_sample < 1:
            raise ValueError(f"min_size_to_sample must be >= 1, got {self.min_size_to_sample}")

    @property
    def is_ratio(self) -> bool:
        """True if it bounds the ratio of samples to inserts, False if it only waits for a size."""
        return math.isfinite(self.min_diff) or math.isfinite(self.max_diff)


class MinSize(RateLimiter):
    """Samples wait until `min_size_to_sample` items are in the table; inserts never wait."""

    __slots__ = ()

    def __init__(self, min_size_to_sample: int) -> None:
        super().__init__(1.0, min_size_to_sample, -math.inf, math.inf)


class SampleToInsertRatio(RateLimiter):
    """Keep samples close to `samples_per_insert` times the inserts.

    `error_buffer` is how far samples may be ahead of the ratio, or behind it, counted in samples,
    once `min_size_to_sample` items are there. It may also be the two bounds of `inserts *
    samples_per_insert - samples`. Less than `2 * max(1, samples_per_insert)` apart is refused.
    """

    __slots__ = ()

    def __init__(
        self,
        samples_per_insert: float,
        min_size_to_sample: int,
        error_buffer: float | tuple[float, float],
    ) -> None:
        offset = samples_per_insert * min_size_to_sample
        if isinstance(error_buffer, int | float):
            low, high = offset - error_buffer, offset + error_buffer
        else:
            low, high = error_buffer
        super().__init__(samples_per_insert, min_size_to_sample, low, high)
        needed = 2 * max(1.0, samples_per_insert)
        if not high - low >= needed:
            raise ValueError(
                f"the size of error_buffer must be at least {needed:g}, "
                "2 * max(1.0, samples_per_insert), so that inserts and samples cannot lock each "
                f"other out; got {error_buffer!r}"
            )
        if low > offset:
            raise ValueError(
                f"the lower bound of error_buffer, {low:g}, must be at most {offset:g}, "
                "samples_per_insert * min_size_to_sample: nothing could ever be sampled"
            )
        if high < offset:
            warnings.warn(
                f"the upper bound of error_buffer, {high:g}, is below {offset:g}, "
                "samples_per_insert * min_size_to_sample: a thread that both inserts and samples "
                "will wait for itself",
                stacklevel=2,
            )


class Queue(RateLimiter):
    """Inserts wait while `size` items have not been sampled; for items that are sampled once."""

    __slots__ = ()

    def __init__(self, size: int) -> None:
        super().__init__(1.0, 1, 0.0, float(size))


class Stack(Queue):
    """Like `Queue`, for a table that returns its newest item first."""

    __slots__ = ()
