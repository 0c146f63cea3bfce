"""TransferQueue's functions, on a server of Breadbox: rows and tags outlive every process.

```sh
export PYTHONPATH=$(breadbox transfer-queue-path) BREADBOX_SERVER=buffer:50051 BREADBOX_BUFFER=run-7
```

puts a module `transfer_queue` on the path that is this one, for verl, NeMo-RL and ROLL as they are.
What is different from TransferQueue, and why:

- Rows are the server's, and stay when processes end: name the buffer after the run. `close` closes a
  connection. `init` uses nothing of its configuration.
- Rows of a partition come sorted by their keys, not in the order in which they were put.
- A row's number is made of its key. `get_meta` never waits, and takes rows in order of their keys.
- A get of several keys of which some are gone raises, where TransferQueue returns fewer rows.
- Values that are no tensors are JSON, never pickles; what JSON cannot say is a TypeError.
- A row has at most 16 tags, each of 64 bytes; those that are no number, flag or text are JSON.
- Samplers, storage backends and data loaders are not here; `data_parser` runs in the caller.
"""

from breadbox_adapters import extra

with extra("transfer_queue"):
    import tensordict as _tensordict  # noqa: F401

from breadbox_adapters.transfer_queue.checkpoints import load_checkpoint, save_checkpoint
from breadbox_adapters.transfer_queue.interface import (
    TransferQueueClient,
    async_kv_batch_get,
    async_kv_batch_get_by_meta,
    async_kv_batch_put,
    async_kv_clear,
    async_kv_list,
    async_kv_put,
    close,
    get_client,
    get_metrics_endpoint,
    init,
    kv_batch_get,
    kv_batch_get_by_meta,
    kv_batch_put,
    kv_clear,
    kv_list,
    kv_put,
)
from breadbox_adapters.transfer_queue.metadata import BatchMeta, KVBatchMeta

__all__ = [
    "BatchMeta",
    "KVBatchMeta",
    "TransferQueueClient",
    "async_kv_batch_get",
    "async_kv_batch_get_by_meta",
    "async_kv_batch_put",
    "async_kv_clear",
    "async_kv_list",
    "async_kv_put",
    "close",
    "get_client",
    "get_metrics_endpoint",
    "init",
    "kv_batch_get",
    "kv_batch_get_by_meta",
    "kv_batch_put",
    "kv_clear",
    "kv_list",
    "kv_put",
    "load_checkpoint",
    "save_checkpoint",
]
