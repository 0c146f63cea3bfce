"""Values of training that may change in a line over a run, written as text."""

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, PlainSerializer

_UNITS = ("updates", "steps")


@dataclass(frozen=True, slots=True)
class Schedule:
    """A value that goes in a line from `start` to `end`, and stays there; without `end` constant.

    It arrives after `updates`, or after `steps` of the environments, whichever comes first; 0 is
    none. With neither it takes the whole run, see `over`.
    """

    start: float
    end: float | None = None
    updates: int = 0
    steps: int = 0

    def __str__(self) -> str:
        spans = [f"@{getattr(self, unit)}{unit}" for unit in _UNITS if getattr(self, unit)]
        ends = [str(each).removesuffix(".0") for each in (self.start, self.end) if each is not None]
        return "".join([":".join(ends), *spans[:1]])

    def over(self, updates: int, steps: int) -> "Schedule":
        """Return the same for a run of so many updates, or environment steps; 0: no such limit.

        Raises ValueError if it takes the whole run, and the run has neither limit.
        """
        if self.end is None or self.updates or self.steps:
            return self
        if not (updates or steps):
            raise ValueError(
                f"{self} takes the whole run, and the run has no end: set updates_max or "
                f"environment_steps_max, or write {self}@300updates or {self}@1e6steps"
            )
        return replace(self, updates=updates, steps=steps)

    def at(self, updates: int, steps: int) -> float:
        """Return the value after so many updates, and steps of the environments.

        Raises ValueError if it takes the whole run, and `over` did not say how long that is.
        """
        if self.over(0, 0).end is None:
            return self.start
        assert self.end is not None
        spans = ((updates, self.updates), (steps, self.steps))
        share = max(min(1.0, done / span) for done, span in spans if span)
        return self.start + (self.end - self.start) * share


def _parsed(given: Any) -> Any:
    if isinstance(given, Schedule):
        return given
    values, has_span, span = str(given).partition("@")
    numbers, unit = values.split(":"), next(filter(span.endswith, _UNITS), "")
    try:
        start, end = (*map(float, numbers), None)[:2] if len(numbers) < 3 else (None, None)
        length = float(span.removesuffix(unit)) if has_span else 0.0
    except ValueError:
        start = None
    if start is None or (has_span and not (unit and end is not None)):
        raise ValueError(
            "must be a number, or START:END over the whole run, START:END@300updates or "
            f"START:END@1e6steps, got {str(given)!r}"
        )
    if not all(map(math.isfinite, (start, end or 0.0, length))):
        raise ValueError(f"must be a finite number, got {str(given)!r}")
    if min(start, end or 0.0) < 0:
        raise ValueError(f"must be greater than or equal to 0, got {str(given)!r}")
    if has_span and not (length >= 1 and length.is_integer()):
        raise ValueError(f"must span a whole number of {unit} from 1 on, got {str(given)!r}")
    return Schedule(start, end, **({unit: int(length)} if unit else {}))


def _not_zero(schedule: Schedule) -> Schedule:
    if not (schedule.start or schedule.end):
        raise ValueError(f"must be greater than 0, got {str(schedule)!r}")
    return schedule


ScheduleText = Annotated[
    Schedule,
    BeforeValidator(_parsed),
    PlainSerializer(lambda value: value.start if value.end is None else str(value)),
]
"""A number of at least 0 or its schedule, which options, variables and files write as text."""
PositiveSchedule = Annotated[ScheduleText, AfterValidator(_not_zero)]
"""One that is not 0 all the time."""
