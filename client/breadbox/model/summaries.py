"""Show objects with arrays in one line or as a table: paths, dtypes and shapes, no numbers."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from breadbox.model.trees import leaves as leaves_of

LEAVES_MAX = 40
"""Most leaves that are listed; more end with an ellipsis."""


class Summarized:
    """Shows itself with `_facts` and `_arrays`: in one line, or as a table in notebooks."""

    __slots__ = ()

    def _facts(self) -> Sequence[str]:
        raise NotImplementedError

    def _arrays(self) -> Mapping[str, Any]:
        raise NotImplementedError

    def __repr__(self) -> str:
        """Show what it is, and its arrays with dtypes and shapes, in one line."""
        return summary(type(self).__name__, self._facts(), self._arrays())

    def _repr_html_(self) -> str:
        return summary_html(type(self).__name__, self._facts(), self._arrays())


def summary(name: str, facts: Sequence[str], trees: Mapping[str, Any]) -> str:
    """Return `name(fact, path: dtype[shape], ...)`, without absent trees."""
    leaves = [*islice(leaves_of(trees), LEAVES_MAX + 1)]
    shown = ((path, _leaf_texts(leaf)) for path, leaf in leaves[:LEAVES_MAX])
    parts = [*facts, *(f"{path}: {''.join(texts)}" for path, texts in shown)]
    if len(leaves) > LEAVES_MAX:
        parts.append("...")
    return f"{name}({', '.join(parts)})"


def summary_html(name: str, facts: Sequence[str], trees: Mapping[str, Any]) -> str:
    """Return what `summary` does as a table of path, dtype and shape, for notebooks."""
    rows = ((path, *_leaf_texts(leaf)) for path, leaf in leaves_of(trees))
    shown = ((path, dtype, shape + place) for path, dtype, shape, place in rows)
    return html_table(f"{name}: {', '.join(facts)}", ("path", "dtype", "shape"), shown)


def html_table(title: str, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table of at most `LEAVES_MAX` rows; escape foreign text."""
    from html import escape  # Imported here, because its table of names is slow to load.

    shown = [*islice(rows, LEAVES_MAX + 1)]
    if len(shown) > LEAVES_MAX:
        shown[LEAVES_MAX:] = [["..."] + [""] * (len(heads) - 1)]
    lines = [("th", heads), *(("td", row) for row in shown)]
    body = "".join(
        f"<tr>{''.join(f'<{tag}>{escape(str(cell))}</{tag}>' for cell in cells)}</tr>"
        for tag, cells in lines
    )
    return f"<table><caption>{escape(title)}</caption>{body}</table>"


def _leaf_texts(leaf: Any) -> tuple[str, str, str]:
    """Return dtype, shape and device (unless the CPU), or the type of another object."""
    dtype, shape = getattr(leaf, "dtype", None), getattr(leaf, "shape", None)
    if dtype is None or shape is None:
        return type(leaf).__name__, "", ""
    device = str(getattr(leaf, "device", "cpu"))
    place = "" if device == "cpu" else f" on {device}"
    return str(dtype).removeprefix("torch."), str([*shape]), place
