"""Values of the core as JSON that people can read, by the names of their fields."""

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import Any


def readable(value: Any) -> Any:
    """Plain data; fields that have their default are left out, so that new ones change nothing."""
    if dataclasses.is_dataclass(value):
        return {
            field.name: readable(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if getattr(value, field.name) != _default(field)
        }
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        defaults = getattr(value, "_field_defaults", {})
        return {
            name: readable(each)
            for name, each in value._asdict().items()
            if name not in defaults or each != defaults[name]
        }
    if isinstance(value, Mapping):
        return {name: readable(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [readable(each) for each in value]
    if isinstance(value, Enum):
        return value.value
    return value.hex() if isinstance(value, bytes) else value


def _default(field: "dataclasses.Field[Any]") -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
