"""Histograms and summaries that take many values at once.

`prometheus_client.Histogram` walks its buckets and takes a lock for each observation, which for a
fetch of 32 chunks was a quarter of the server's time. Staleness and uses are small whole numbers,
so it is enough to count each value, which costs one dictionary update, and to make buckets of the
counts at each scrape.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector


class TallyHistogram(Collector):
    """A histogram by buffer. Fed from one thread; scraped from any.

    Args:
        name: Of the metric.
        text: Its help.
        buckets: Upper bounds, included, ascending; one for all values is added.
        registry: Where it is shown.
    """

    def __init__(
        self, name: str, text: str, buckets: Sequence[int], *, registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._text = text
        self._buckets = tuple(buckets)
        self._tallies: dict[str, Counter[int]] = {}
        registry.register(self)

    def count(self, buffer: str, values: Iterable[int]) -> None:
        """Count values of a buffer."""
        tally = self._tallies.get(buffer)
        if tally is None:
            tally = self._tallies[buffer] = Counter()
        tally.update(values)

    def forget(self, buffer: str) -> None:
        """Drop the series of a deleted buffer."""
        self._tallies.pop(buffer, None)

    def describe(self) -> Iterator[Metric]:
        """Name the metric without its samples."""
        yield self._family()

    def collect(self) -> Iterator[Metric]:
        """Make buckets of what was counted."""
        family = self._family()
        for buffer, tally in list(self._tallies.items()):
            counts = dict(tally)
            bounds = [
                (str(float(bound)), sum(n for value, n in counts.items() if value <= bound))
                for bound in self._buckets
            ]
            total = sum(counts.values())
            family.add_metric(
                [buffer],
                [*bounds, ("+Inf", total)],
                sum_value=sum(value * n for value, n in counts.items()),
            )
        yield family

    def _family(self) -> HistogramMetricFamily:
        return HistogramMetricFamily(self._name, self._text, labels=["buffer"])


class TallySummary(Collector):
    """Count and sum by task. Fed from one thread; scraped from any.

    Args:
        name: Of the metric.
        text: Its help.
        registry: Where it is shown.
    """

    def __init__(self, name: str, text: str, *, registry: CollectorRegistry) -> None:
        self._name = name
        self._text = text
        self._tallies: dict[str, tuple[int, float]] = {}
        registry.register(self)

    def add(self, task: str, count: int, total: float) -> None:
        """Count so many values of a task that come to `total`."""
        known_count, known_total = self._tallies.get(task, (0, 0.0))
        self._tallies[task] = (known_count + count, known_total + total)

    def forget(self, task: str) -> None:
        """Drop the series of a task."""
        self._tallies.pop(task, None)

    def describe(self) -> Iterator[Metric]:
        """Name the metric without its samples."""
        yield self._family()

    def collect(self) -> Iterator[Metric]:
        """Show what was counted."""
        family = self._family()
        for task, (count, total) in list(self._tallies.items()):
            family.add_metric([task], count, total)
        yield family

    def _family(self) -> SummaryMetricFamily:
        return SummaryMetricFamily(self._name, self._text, labels=["task"])
