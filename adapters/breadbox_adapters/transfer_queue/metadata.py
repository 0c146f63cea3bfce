"""Names of rows: `KVBatchMeta` has their keys, `BatchMeta` their numbers."""

import copy
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict


class _Batch:
    """What batches of rows have in common; `_LISTS` names the attributes with a value of each."""

    _LISTS: ClassVar[tuple[str, ...]]

    def __len__(self) -> int:
        return len(getattr(self, self._LISTS[0]))

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self)

    def _at(self, places: Sequence[int]) -> Self:
        lists = {name: [getattr(self, name)[each] for each in places] for name in self._LISTS}
        made: Self = replace(self, **copy.deepcopy(lists))  # type: ignore[type-var]
        return made

    def chunk(self, chunks: int) -> list[Self]:
        """Cut into as many batches, of sizes that differ by one at most, larger ones first."""
        base, more = divmod(len(self), chunks)
        ends = itertools.accumulate(base + (index < more) for index in range(chunks))
        return [self._at(range(*each)) for each in itertools.pairwise([0, *ends])]


@dataclass
class KVBatchMeta(_Batch):
    """Rows of one partition, by their keys.

    Raises:
        ValueError: Keys or fields are there twice, or there are not as many tags as keys.
    """

    _LISTS = ("keys", "tags")

    keys: list[str] = field(default_factory=list)
    tags: list[dict[str, Any]] = field(default_factory=list)
    """A dict for each key; the object has its own copy of them."""
    partition_id: str | None = None
    fields: list[str] | None = None
    """Columns that all of the rows have."""
    extra_info: dict[str, Any] | None = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.tags):
            raise ValueError(f"{len(self.keys)} keys, but {len(self.tags)} tags")
        for name in ("keys", "fields"):
            values = getattr(self, name) or ()
            if len(set(values)) != len(values):
                raise ValueError(f"duplicated {name}")
        self.tags, self.extra_info = copy.deepcopy((self.tags, self.extra_info))

    def reorder(self, indexes: list[int]) -> None:
        """Put the rows in this order, in place; a ValueError if that leaves one out."""
        if sorted(indexes) != [*range(len(self))]:
            raise ValueError(f"must name each of {len(self)} rows once, got {indexes}")
        taken = self._at(indexes)
        self.keys, self.tags = taken.keys, taken.tags

    @classmethod
    def concat(cls, data: list["KVBatchMeta"]) -> "KVBatchMeta":
        """Join batches of one partition; empty ones are left out.

        Raises:
            ValueError: Partitions, fields, or values of one key of `extra_info` differ.
        """
        parts = [each for each in data if each]
        return cls(
            [key for each in parts for key in each.keys],
            [tag for each in parts for tag in each.tags],
            _common((each.partition_id for each in parts), "partitions"),
            _common((each.fields and sorted(each.fields) for each in parts), "fields"),
            _joined_info(parts) or None,
        )


@dataclass(eq=False)
class BatchMeta(_Batch):
    """Rows of any partitions, by their numbers, with the columns that all of them have.

    Raises:
        ValueError: Lists are not of one length.
    """

    _LISTS = (
        *("global_indexes", "partition_ids", "production_status", "custom_meta"),
        "_custom_backend_meta",
    )

    global_indexes: list[int]
    """The number of each row; made of its partition and key."""
    partition_ids: list[str]
    field_schema: dict[str, dict[str, Any]] = None  # type: ignore[assignment]
    """By column; without type and shape unless the rows were put by this object."""
    production_status: NDArray[np.int8] = None  # type: ignore[assignment]
    """int8[row]: 1 if a row has all of the columns."""
    extra_info: dict[str, Any] = None  # type: ignore[assignment]
    custom_meta: list[dict[str, Any]] = None  # type: ignore[assignment]
    """The tags of each row."""
    _custom_backend_meta: list[dict[str, Any]] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        count = len(self.global_indexes)
        self.global_indexes, self.partition_ids = [*self.global_indexes], [*self.partition_ids]
        self.field_schema = {name: {**each} for name, each in (self.field_schema or {}).items()}
        self.extra_info = {**(self.extra_info or {})}
        status = np.zeros(count) if self.production_status is None else self.production_status
        self.production_status = np.array(status, np.int8)
        self.custom_meta = [{**each} for each in self.custom_meta or [{}] * count]
        self._custom_backend_meta = [{**each} for each in self._custom_backend_meta or [{}] * count]
        for name in self._LISTS:
            if len(getattr(self, name)) != count:
                raise ValueError(f"{count} global_indexes, but {len(getattr(self, name))} {name}")

    @property
    def field_names(self) -> list[str]:
        """The columns, sorted."""
        return sorted(self.field_schema)

    @property
    def is_ready(self) -> bool:
        """Whether there are rows, and all of them have the columns."""
        return bool(len(self) and self.production_status.all())

    def update_custom_meta(self, custom_meta: list[dict[str, Any]]) -> None:
        """Merge tags into those of each row; a ValueError if there are not as many as rows."""
        if len(custom_meta) != len(self):
            raise ValueError(f"{len(self)} rows, but custom_meta of {len(custom_meta)}")
        for mine, new in zip(self.custom_meta, custom_meta, strict=True):
            mine.update(new)

    @property
    def backend_meta(self) -> list[dict[str, Any]]:
        """What the client remembers of each row."""
        return self._custom_backend_meta

    def chunk_by_partition(self) -> list["BatchMeta"]:
        """Cut into one batch for each partition."""
        places: dict[str, list[int]] = {}
        for place, partition in enumerate(self.partition_ids):
            places.setdefault(partition, []).append(place)
        return [self._at(each) for each in places.values()]

    def add_fields(self, tensor_dict: TensorDict, set_all_ready: bool = True) -> "BatchMeta":
        """Add the columns of a batch of the same rows, in place, and return this object."""
        if tensor_dict.batch_size[0] != len(self):
            raise ValueError(f"{len(self)} rows, but a batch of {tensor_dict.batch_size[0]}")
        for name in tensor_dict.keys():  # noqa: SIM118 - it iterates over rows
            value = tensor_dict.get(name)
            is_tensor = isinstance(value, torch.Tensor)
            dtype = value.dtype if is_tensor else None
            self.field_schema[name] = {"dtype": dtype, "is_non_tensor": not is_tensor}
        if set_all_ready:
            self.production_status[:] = 1
        return self

    def select_fields(self, field_names: list[str]) -> "BatchMeta":
        """Return the same rows with those of these columns that they have."""
        schema = {
            name: self.field_schema[name] for name in field_names if name in self.field_schema
        }
        return replace(copy.deepcopy(self), field_schema=schema)

    @classmethod
    def concat(cls, data: list["BatchMeta"], validate: bool = True) -> "BatchMeta":
        """Join batches; empty ones are left out.

        Raises:
            ValueError: Their columns differ, or values of one key of `extra_info`.
        """
        parts = [each for each in data if each]
        if validate:
            _common((each.field_names for each in parts), "field_names")
        chain = itertools.chain.from_iterable
        lists: dict[str, Any] = {
            name: [*chain(getattr(each, name) for each in parts)] for name in cls._LISTS
        }
        schema = copy.deepcopy(parts[0].field_schema) if parts else {}
        return cls(**lists, field_schema=schema, extra_info=_joined_info(parts))

    @classmethod
    def empty(cls, extra_info: dict[str, Any] | None = None) -> "BatchMeta":
        """Return a batch without rows."""
        return cls([], [], extra_info=extra_info or {})


def _common(values: Iterable[Any], what: str) -> Any:
    found = [*values]
    if any(each != found[0] for each in found):
        raise ValueError(f"{what} do not match: {found}")
    return found[0] if found else None


def _joined_info(parts: Iterable[KVBatchMeta | BatchMeta]) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for key, value in itertools.chain.from_iterable(
        (each.extra_info or {}).items() for each in parts
    ):
        known = joined.setdefault(key, value)
        same = torch.equal if isinstance(known, torch.Tensor) else np.array_equal
        if known is not value and (type(known) is not type(value) or not same(known, value)):
            raise ValueError(f"extra_info has conflicting values of {key!r}")
    return joined
