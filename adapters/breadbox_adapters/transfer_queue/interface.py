"""The functions of `transfer_queue`, and its client, on rows of Breadbox."""

import os
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from breadbox_adapters.transfer_queue.metadata import BatchMeta, KVBatchMeta
from breadbox_adapters.transfer_queue.objects import column_of, stored
from breadbox_adapters.transfer_queue.rows import Row, Rows, group_of, numbers_of, parts_of
from breadbox_adapters.transfer_queue.runtime import both, runtime

_Parser = Callable[[Any], Any]
_KEY, _TAGS = "_key", "_tags"
"""What a BatchMeta remembers of each row: its key, and its tags when it was listed."""


def init(conf: Any = None) -> Any:
    """Connect, and make the buffer if there is none; return `conf`, of which nothing is used.

    Blocks: for up to five minutes while there is no server.
    """
    runtime.start(runtime.rows()).result()
    return conf


def close() -> None:
    """Close this process' connection. Rows stay: they are the server's."""
    runtime.start(runtime.close()).result()


def get_metrics_endpoint() -> str | None:
    """Return what `BREADBOX_METRICS` names, HOST:PORT of the server's metrics, or None."""
    return os.environ.get("BREADBOX_METRICS") or None


def _keys_of(keys: Any) -> list[str]:
    listed = [keys] if isinstance(keys, str) else keys
    if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
        raise TypeError("keys must be a text or a list of texts")
    if not listed:
        raise ValueError("keys is an empty list")
    return listed


def _count_of(fields: TensorDict) -> int:
    if not fields.batch_size:
        raise ValueError("fields have an empty batch_size: it begins with the number of rows")
    return int(fields.batch_size[0])


def _columns_of(fields: Any, count: int, parser: _Parser | None = None) -> dict[str, list[Any]]:
    """Return the values of each column, one for each row."""
    columns: dict[str, Any] = {}
    for name in fields.keys():  # noqa: SIM118 - a TensorDict iterates over rows
        value = fields.get(name)
        if isinstance(value, NonTensorStack):
            value = value.tolist()
        elif isinstance(value, NonTensorData):
            data = value.data
            value = (
                [*data]
                if isinstance(data, (np.ndarray, list)) and len(data) == count
                else [data] * count
            )
        elif isinstance(value, torch.Tensor) and value.is_nested:
            value = [*value.unbind()]
        elif not isinstance(value, (torch.Tensor, list, np.ndarray)):
            raise TypeError(f"{name}: {type(value).__name__} is no column")
        if len(value) != count:
            raise ValueError(f"{name} has {len(value)} rows, not {count}")
        columns[name] = value
    if parser is not None:
        parser(columns)
    return {name: [*value] for name, value in columns.items()}


def _common(rows: Sequence[Row]) -> list[str]:
    """Return the columns that all of the rows have, in order of the first one's."""
    shared = set[str].intersection(*({*row.columns} for row in rows)) if rows else set()
    return [name for name in rows[0].columns if name in shared] if rows else []


async def _write(
    names: Sequence[tuple[str, str]],
    columns: dict[str, list[Any]],
    tags: Sequence[dict[str, Any] | None],
) -> Rows:
    """Write values and tags into rows, by partition and key."""
    parts = [
        part
        for place, (partition, key) in enumerate(names)
        for part in parts_of(
            group_of(partition, key),
            {name: stored(values[place], f"{key}.{name}") for name, values in columns.items()},
            numbers_of(tags[place] or {}, key),
        )
    ]
    rows = await runtime.rows()
    await rows.client.attach(parts, replace=True)
    return rows


async def _kv_batch_put(
    keys: list[str],
    partition_id: str,
    fields: TensorDict | None = None,
    tags: list[dict[str, Any]] | None = None,
    data_parser: _Parser | None = None,
) -> KVBatchMeta:
    """Write columns and tags of rows; rows that are not there are made, tags are merged.

    Raises:
        ValueError: There is nothing to write, a key is there twice, or lengths do not match.
        TypeError: A value can be stored neither as a tensor nor as JSON.
    """
    if fields is None and tags is None:
        raise ValueError("neither fields nor tags are given")
    asked = KVBatchMeta(_keys_of(keys), [{}] * len(keys))
    if fields is not None and (count := _count_of(fields)) != len(keys):
        raise ValueError(f"keys of length {len(keys)} do not match fields of {count}")
    if tags is not None and len(tags) != len(keys):
        raise ValueError(f"keys of length {len(keys)} do not match length of tags {len(tags)}")
    columns = {} if fields is None else _columns_of(fields, len(keys), data_parser)
    names = [(partition_id, key) for key in asked.keys]
    written = await _write(names, columns, tags or asked.tags)
    rows = [*(await written.listed(partition_id, asked.keys)).values()]
    return KVBatchMeta(
        [row.key for row in rows], [row.tags for row in rows], partition_id, _common(rows)
    )


async def _kv_put(
    key: str,
    partition_id: str,
    fields: TensorDict | dict[str, Any] | None = None,
    tag: dict[str, Any] | None = None,
    data_parser: _Parser | None = None,
) -> KVBatchMeta:
    """Write columns and tags of one row: a dict has its values, a TensorDict a batch of one.

    Raises:
        ValueError: There is nothing to write, or a value is a batch.
        TypeError: A value can be stored neither as a tensor nor as JSON.
    """
    if isinstance(fields, dict):
        batch = {}
        for name, value in fields.items():
            is_tensor = isinstance(value, torch.Tensor)
            if is_tensor and value.is_nested:
                raise ValueError(f"{name} is a batch: use kv_batch_put")
            batch[name] = value.unsqueeze(0) if is_tensor else NonTensorStack(value)
        fields = TensorDict(batch, batch_size=[1])
    elif fields is not None and not isinstance(fields, TensorDict):
        raise ValueError("fields must be a dict or a TensorDict")
    tags = None if tag is None else [tag]
    return await _kv_batch_put([key], partition_id, fields, tags, data_parser)


async def _kv_batch_get(
    keys: list[str] | str, partition_id: str, select_fields: list[str] | str | None = None
) -> TensorDict:
    """Return the columns that all of the rows have, or those of them that are selected.

    Raises:
        ValueError: A row is not found, or the rows have no column in common.
    """
    asked = _keys_of(keys)
    listed = await (await runtime.rows()).listed(partition_id, asked)
    found = _asked(listed, [(partition_id, key) for key in asked])
    ready = _common(found)
    if not ready:
        raise ValueError(f"the rows have no column that is ready in all of them: {asked[:5]}")
    selected = [select_fields] if isinstance(select_fields, str) else select_fields
    return await _read(found, ready if selected is None else [n for n in selected if n in ready])


def _asked(found: dict[str, Row], names: Sequence[tuple[str, str]]) -> list[Row]:
    if missing := [name for name in names if group_of(*name) not in found]:
        raise ValueError(f"keys or partition were not found: {missing[:5]}")
    return [found[group_of(*name)] for name in names]


async def _read(rows: Sequence[Row], columns: Sequence[str]) -> TensorDict:
    if not columns:
        return TensorDict({}, batch_size=0)
    values = await (await runtime.rows()).read(rows, columns)
    joined = {name: column_of([each[name] for each in values]) for name in columns}
    return TensorDict(joined, batch_size=len(rows))


async def _kv_batch_get_by_meta(
    meta: KVBatchMeta, select_fields: list[str] | str | None = None
) -> TensorDict:
    """Return the columns that a put returned, or those of them that are selected.

    Raises:
        ValueError: As `kv_batch_get`; or a selected column is not one of `meta.fields`.
    """
    if meta.partition_id is None:
        raise ValueError("meta has no partition_id")
    selected = [select_fields] if isinstance(select_fields, str) else select_fields
    if selected is not None and not {*selected} <= {*(meta.fields or ())}:
        raise ValueError(f"select_fields {selected} not found in the fields {meta.fields}")
    return await _kv_batch_get(meta.keys, meta.partition_id, selected or meta.fields)


async def _kv_list(partition_id: str | None = None) -> dict[str, dict[str, Any]]:
    """Return the tags of each row by partition and key, both sorted; of one partition or all."""
    found: dict[str, dict[str, Any]] = {}
    for row in (await (await runtime.rows()).listed(partition_id)).values():
        found.setdefault(row.partition, {})[row.key] = row.tags
    return found


async def _kv_clear(keys: list[str] | str, partition_id: str) -> None:
    """Drop rows; keys that are not there are ignored."""
    asked = [keys] if isinstance(keys, str) else keys
    client = (await runtime.rows()).client
    await client.drop_members([(group_of(partition_id, key), 0) for key in asked])


kv_put, async_kv_put = both(_kv_put)
kv_batch_put, async_kv_batch_put = both(_kv_batch_put)
kv_batch_get, async_kv_batch_get = both(_kv_batch_get)
kv_batch_get_by_meta, async_kv_batch_get_by_meta = both(_kv_batch_get_by_meta)
kv_list, async_kv_list = both(_kv_list)
kv_clear, async_kv_clear = both(_kv_clear)


def _meta_of(rows: Sequence[Row], columns: Sequence[str], is_ready: bool = True) -> BatchMeta:
    return BatchMeta(
        [row.index for row in rows],
        [row.partition for row in rows],
        {name: {} for name in columns},
        np.full(len(rows), is_ready, np.int8),
        custom_meta=[row.tags for row in rows],
        _custom_backend_meta=[{_KEY: row.key, _TAGS: row.tags} for row in rows],
    )


def _names_of(metadata: BatchMeta) -> list[tuple[str, str]]:
    keys = [each[_KEY] for each in metadata.backend_meta]
    return [*zip(metadata.partition_ids, keys, strict=True)]


class TransferQueueClient:
    """The functions of `transfer_queue` that name rows by numbers.

    A number is made of partition and key, so that it is the same in every process.
    """

    async def _get_meta(
        self,
        data_fields: list[str],
        batch_size: int,
        partition_id: str,
        mode: str = "fetch",
        task_name: str | None = None,
        sampling_config: dict[str, Any] | None = None,
    ) -> BatchMeta:
        """Take rows that have these columns and that the task never took; never waits.

        Returns as many as asked for, or none where there are fewer; fewer if another process took
        some at the same time. `sampling_config` is not used.

        Raises:
            ValueError: The mode is not "fetch", or no task is named.
        """
        if mode != "fetch" or not task_name:
            raise ValueError(f"only mode 'fetch' with a task_name is there, got {mode!r}")
        rows, wanted = await runtime.rows(), {*data_fields}
        ready = [
            row
            for row in (await rows.listed(partition_id)).values()
            if wanted <= {*row.columns} and task_name not in row.tasks
        ]
        if len(ready) < batch_size:
            return BatchMeta.empty()
        return _meta_of(await rows.take(ready[:batch_size], task_name), data_fields)

    async def _put(
        self,
        data: TensorDict,
        metadata: BatchMeta | None = None,
        partition_id: str | None = None,
        data_parser: _Parser | None = None,
    ) -> BatchMeta:
        """Write columns, and the tags that changed in `metadata`, into its rows, or into new ones.

        Raises:
            ValueError: There are no rows, and no partition; or lengths do not match.
        """
        if metadata is None:
            if partition_id is None:
                raise ValueError("neither metadata nor partition_id is given")
            keys = [uuid.uuid4().hex for _ in range(_count_of(data))]
            made = [Row(partition_id, key, {}, {}, frozenset()) for key in keys]
            metadata = _meta_of(made, (), is_ready=False)
        names = _names_of(metadata)
        if not names:
            raise ValueError("metadata is empty")
        before = [each[_TAGS] for each in metadata.backend_meta]
        tags = [
            {name: tag for name, tag in now.items() if name not in old or old[name] != tag}
            for now, old in zip(metadata.custom_meta, before, strict=True)
        ]
        await _write(names, _columns_of(data, len(names), data_parser), tags)
        return metadata.add_fields(data)

    async def _get_data(self, metadata: BatchMeta) -> TensorDict:
        """Return the columns of a batch; without rows or columns an empty one.

        Raises:
            ValueError: A row is not found.
        """
        if not metadata.size or not metadata.field_names:
            return TensorDict({}, batch_size=0)
        found: dict[str, Row] = {}
        for each in metadata.chunk_by_partition():
            keys = [key for _, key in _names_of(each)]
            found |= await (await runtime.rows()).listed(each.partition_ids[0], keys)
        return await _read(_asked(found, _names_of(metadata)), metadata.field_names)

    async def _kv_retrieve_meta(
        self, keys: list[str] | str, partition_id: str, create: bool = False
    ) -> BatchMeta:
        """Return the rows of these keys; those that are not there are made, or left out."""
        asked = _keys_of(keys)
        if create:
            await _write([(partition_id, key) for key in asked], {}, [None] * len(asked))
        rows = [*(await (await runtime.rows()).listed(partition_id, asked)).values()]
        columns = _common(rows)
        return _meta_of(rows, columns, is_ready=bool(columns))

    async def _kv_retrieve_keys(
        self, global_indexes: list[int] | int, partition_id: str
    ) -> list[str]:
        """Return the keys of rows by their numbers.

        Raises:
            RuntimeError: A number belongs to no row of the partition.
        """
        asked = [global_indexes] if isinstance(global_indexes, int) else global_indexes
        rows = await (await runtime.rows()).listed(partition_id)
        known = {row.index: row.key for row in rows.values()}
        if missing := [index for index in asked if index not in known]:
            raise RuntimeError(f"global_indexes {missing[:5]} have no corresponding keys")
        return [known[index] for index in asked]

    async def _check_consumption_status(self, task_name: str, partition_id: str) -> bool:
        """Return whether the partition has rows, and the task took all of them."""
        rows = await (await runtime.rows()).listed(partition_id)
        return bool(rows) and all(task_name in row.tasks for row in rows.values())

    get_meta, async_get_meta = both(_get_meta)
    put, async_put = both(_put)
    get_data, async_get_data = both(_get_data)
    kv_retrieve_meta, async_kv_retrieve_meta = both(_kv_retrieve_meta)
    kv_retrieve_keys, async_kv_retrieve_keys = both(_kv_retrieve_keys)
    check_consumption_status, async_check_consumption_status = both(_check_consumption_status)


_CLIENT = TransferQueueClient()


def get_client() -> TransferQueueClient:
    """Return the client of this process."""
    return _CLIENT
