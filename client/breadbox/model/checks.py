"""Arguments of a wrong type, refused with their names."""

from collections.abc import Collection
from typing import Any

import numpy as np

from breadbox.model.errors import InvalidRequestError


def checked_columns(columns: Any) -> tuple[str, ...] | None:
    """Return the paths of columns, or raise InvalidRequestError if they are no list of texts."""
    if columns is None:
        return None
    if (
        isinstance(columns, Collection)
        and not isinstance(columns, str | bytes)
        and all([isinstance(each, str) for each in columns])
    ):
        return tuple(columns)
    hint = f'["{columns}"]' if isinstance(columns, str) else '["obs.image"]'
    raise InvalidRequestError("columns", f"must be a list such as {hint}, got {columns!r:.100}")


def check_whole(name: str, value: object, least: int, most: int | None = None) -> None:
    """Raise InvalidRequestError if an argument is not an integer in its range."""
    if not isinstance(value, int | np.integer):
        raise InvalidRequestError(name, f"must be a whole number, got {value!r}")
    if most is None and value < least:
        raise InvalidRequestError(name, f"must be at least {least}, got {value}")
    if most is not None:
        check_number(name, value, least, most)


def check_number(name: str, value: object, least: float, most: float) -> None:
    """Raise InvalidRequestError if an argument is not a number in its range."""
    if not isinstance(value, int | float | np.number) or not least <= value <= most:
        raise InvalidRequestError(name, f"must be from {least} to {most}, got {value!r}")
