"""Rows of a buffer, by partition and key: their columns, their tags, and the tasks that took them.

A row is member 0 of a group that is named after both. What one put writes into a row is a part
that is named after its columns, so that a listing says which columns a row has; of a column in
several parts the last one counts. Tags are the row's numbers, which the server merges. A task takes
a row by a part of its own: the first one to attach it has the row.
"""

import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final
from urllib.parse import quote, unquote

import breadbox
from breadbox.model.errors import MemberNotFoundError, PartConflictError
from breadbox.model.types import NUMBER_BYTES_MAX, MemberDescription
from breadbox_adapters.transfer_queue.objects import json_of, value_of

COLUMN: Final = "c:"
"""How the name of a part with columns begins."""
TASK: Final = "t:"
"""How the name of the part by which a task took a row begins, and of the array in it."""
_PART_NAME_BYTES_MAX: Final = 64
_JSON: Final = "json:"
_SAFE: Final = "!\"#$&'()*+;<=>?@[]^`{|} "
"""What stays as it is in a name, besides letters, digits and `_.-~`."""


@dataclass(frozen=True, slots=True)
class Row:
    """What a listing says of a row."""

    partition: str
    key: str
    tags: dict[str, Any]
    columns: dict[str, str]
    """The part with the last value of each column."""
    tasks: frozenset[str]

    @property
    def group(self) -> str:
        """Name of the group that the row is."""
        return group_of(self.partition, self.key)

    @property
    def index(self) -> int:
        """A number made of partition and key: the same in every process, and never used again."""
        return int.from_bytes(blake2b(self.group.encode(), digest_size=8).digest()) >> 1


def group_of(partition: str, key: str) -> str:
    """Return the name of a row's group, from which `row_of` has both again."""
    return f"{prefix_of(partition)}{quote(key, safe=_SAFE + ':,')}"


def prefix_of(partition: str | None) -> str:
    """Return how the groups of a partition begin, or of all of them."""
    return "" if partition is None else f"{quote(partition, safe=_SAFE)}:"


def row_of(member: MemberDescription) -> Row:
    """Read a row from what the server lists of it."""
    partition, _, key = member.group.partition(":")
    columns = {
        unquote(name): part
        for part in member.parts
        if part.startswith(COLUMN)
        for name in part.removeprefix(COLUMN).split(",")
    }
    tags = {name: _tag(number) for name, number in member.numbers.items()}
    tasks = {unquote(part.removeprefix(TASK)) for part in member.parts if part.startswith(TASK)}
    return Row(unquote(partition), unquote(key), tags, columns, frozenset(tasks))


def numbers_of(tags: dict[str, Any], path: str) -> dict[str, Any]:
    """Return tags as numbers: those that are none as JSON text.

    Raises:
        TypeError: A value is too long for a tag, or can be no JSON.
    """
    numbers = {}
    for name, value in tags.items():
        is_like_json = isinstance(value, str) and value.startswith(_JSON)
        if is_like_json or type(value) not in (bool, int, float, str):
            value = _JSON + json_of(value, f"{path}.{name}")
        if isinstance(value, str) and len(value.encode()) > NUMBER_BYTES_MAX:
            raise TypeError(
                f"{path}.{name}: a tag has at most {NUMBER_BYTES_MAX} bytes, got {value!r}"
            )
        numbers[name] = value
    return numbers


def _tag(number: Any) -> Any:
    is_json = isinstance(number, str) and number.startswith(_JSON)
    return value_of(json.loads(number.removeprefix(_JSON))) if is_json else number


def parts_of(
    group: str, arrays: dict[str, Any], numbers: dict[str, Any]
) -> Iterator[breadbox.Part]:
    """Yield the parts of one put into a row: as few as their names have room for."""
    names: list[str] = []
    arrays_of: list[dict[str, Any]] = []
    for column in sorted(arrays):
        quoted = quote(column, safe=_SAFE)
        if names and len(f"{names[-1]},{quoted}") <= _PART_NAME_BYTES_MAX:
            names[-1] += f",{quoted}"
        else:
            names.append(f"{COLUMN}{quoted}")
            arrays_of.append({})
        arrays_of[-1][column] = arrays[column]
    for name, together in zip(names, arrays_of, strict=True):
        yield breadbox.Part(group=group, name=name, arrays=together, numbers=numbers)
        numbers = {}
    if not names:
        yield breadbox.Part(group=group, numbers=numbers)


class Rows:
    """The rows of one buffer. Every method raises the client's errors, besides its own."""

    def __init__(self, client: "breadbox.aio.Client") -> None:
        self.client = client

    async def listed(
        self, partition: str | None, keys: Sequence[str] | None = None
    ) -> dict[str, Row]:
        """Return rows by their groups: of a partition, sorted, or of keys, as asked for."""
        if keys is None:
            found = await self.client.members(prefix_of(partition))
        else:
            named = [(group_of(partition or "", key), 0) for key in keys]
            found = await self.client.members(keys=named)
        return {each.group: row_of(each) for each in found}

    async def read(self, rows: Sequence[Row], columns: Sequence[str]) -> list[dict[str, Any]]:
        """Return the stored values of columns that all rows have.

        Raises:
            ValueError: A row is gone, or lacks a column.
        """
        alike: dict[tuple[str, ...], list[int]] = {}
        for place, row in enumerate(rows):
            if lacking := {*columns} - {*row.columns}:
                raise ValueError(f"{sorted(lacking)} of {row.key!r} are not ready")
            wanted = {row.columns[name] for name in columns}
            alike.setdefault(tuple(sorted(wanted)), []).append(place)
        found: list[dict[str, Any]] = [{} for _ in rows]
        for parts, places in alike.items():
            keys = [(rows[each].group, 0) for each in places]
            try:
                read = await self.client.read_members(keys, parts)
            except MemberNotFoundError as error:
                raise ValueError(f"rows were not found: {error}") from error
            for place, arrays in zip(places, read, strict=True):
                found[place] = arrays
        return found

    async def take(self, rows: Sequence[Row], task: str) -> list[Row]:
        """Take rows for a task, and return those that no other process was faster to take."""
        taker = uuid.uuid4().bytes
        name = f"{TASK}{quote(task, safe=_SAFE)}"
        groups = [row.group for row in rows]
        try:
            await self.client.attach(
                [breadbox.Part(group=each, name=name, arrays={name: taker}) for each in groups]
            )
        except PartConflictError:
            takers = await self.read_left(groups, [name])
            mine = {each for each, has in takers.items() if has[name].tobytes() == taker}
            rows = [row for row in rows if row.group in mine]
        return await self._without_cleared(rows)

    async def read_left(
        self, groups: Sequence[str], parts: Sequence[str] | None = None
    ) -> dict[str, dict[str, Any]]:
        """Return the values of parts, or of all, by groups; without rows that are cleared."""
        while groups:
            try:
                read = await self.client.read_members([(each, 0) for each in groups], parts)
            except MemberNotFoundError:
                there = await self.client.members(keys=[(each, 0) for each in groups])
                groups = [each.group for each in there if {*(parts or ())} <= {*each.parts}]
            else:
                return dict(zip(groups, read, strict=True))
        return {}

    async def _without_cleared(self, rows: Sequence[Row]) -> list[Row]:
        """Drop what a part made of rows that were cleared before it came; return the others."""
        members = await self.client.members(keys=[(row.group, 0) for row in rows])
        kept = {each.group for each in members if row_of(each).columns or each.numbers}
        lost = [row.group for row in rows if row.group not in kept and (row.columns or row.tags)]
        if lost:
            await self.client.drop_members([(group, 0) for group in lost])
        return [row for row in rows if row.group not in lost]
