"""Stands in for Ray where the others' tests look into a controller, or start a worker.

Their controller is an actor; here it is what the client says of the rows. Workers run in place.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import transfer_queue


def remote(*arguments: Any, **_: Any) -> Any:
    """As a decorator, with and without arguments: the class, or the function with `remote`."""
    if not arguments:
        return remote
    (thing,) = arguments
    if not isinstance(thing, type):
        thing.remote = thing
    return thing


def init(*_: Any, **__: Any) -> None: ...


def shutdown() -> None: ...


def is_initialized() -> bool:
    return True


def get(value: Any, timeout: float | None = None) -> Any:
    return value


def _snapshot(partition: str) -> SimpleNamespace:
    """What a controller knows of a partition; rows by their places, which index its arrays."""
    keys = [*transfer_queue.kv_list(partition).get(partition, {})]
    client = transfer_queue.get_client()
    metas = [client.kv_retrieve_meta(key, partition) for key in keys]
    names = sorted({name for meta in metas for name in meta.field_names})
    return SimpleNamespace(
        keys_mapping={key: place for place, key in enumerate(keys)},
        global_indexes={*range(len(keys))},
        custom_meta={place: meta.custom_meta[0] for place, meta in enumerate(metas)},
        field_name_mapping={name: place for place, name in enumerate(names)},
        production_status=np.array([[n in meta.field_names for n in names] for meta in metas], int),
    )


def _clear(partition: str) -> None:
    keys = [*transfer_queue.kv_list(partition).get(partition, {})]
    transfer_queue.kv_clear(keys, partition)


def _method(function: Callable[..., Any]) -> SimpleNamespace:
    return SimpleNamespace(remote=function)


def get_actor(name: str, namespace: str = "") -> SimpleNamespace:
    return SimpleNamespace(
        list_partitions=_method(lambda: [*transfer_queue.kv_list()]),
        clear_partition=_method(_clear),
        get_partition_snapshot=_method(_snapshot),
    )
