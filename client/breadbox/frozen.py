"""Makes objects of frozen dataclasses where there are many of them."""

from collections.abc import Callable
from dataclasses import fields, make_dataclass
from typing import Any, TypeVar

T = TypeVar("T")


def maker(kind: type[T]) -> Callable[..., T]:
    """Something that makes objects of a frozen dataclass with slots, at a third of the time.

    A frozen class sets each field by a call. So a twin is made that is not frozen, has the same
    slots, and changes its class once its fields are set. It takes all fields, by position.

    Args:
        kind: The class; its `__post_init__`, if it has one, is not called.
    """

    def become(made: Any) -> None:
        made.__class__ = kind

    each = [(field.name, field.type) for field in fields(kind)]  # type: ignore[arg-type]  # it is one
    return make_dataclass(
        f"_{kind.__name__}", each, slots=True, namespace={"__post_init__": become}
    )
