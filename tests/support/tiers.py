"""Which of many alike `make test` runs, and which only `make test-long`."""

from collections.abc import Iterable
from typing import Any

import pytest

LONG = pytest.mark.long


def long_but(count: int, values: Iterable[Any]) -> list[Any]:
    """For `parametrize`: all of these, of which `make test` runs the first `count`."""
    return [
        value if number < count else pytest.param(value, marks=LONG)
        for number, value in enumerate(values)
    ]
