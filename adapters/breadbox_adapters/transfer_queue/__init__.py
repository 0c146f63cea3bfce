"""TransferQueue's functions, on a server of Breadbox: rows and tags outlive every process.

With `PYTHONPATH=$(breadbox transfer-queue-path)` a module `transfer_queue` is this one. The server
and the buffer come from `BREADBOX_SERVER` and `BREADBOX_BUFFER`. docs/agents.md says what is
different from TransferQueue.
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
