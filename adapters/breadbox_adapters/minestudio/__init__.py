"""MineStudio's replay buffer, data types and data functions, on top of Breadbox.

MineStudio 1.1.6's rollout manager, workers and trainers run on a Breadbox server once
`minestudio/online/rollout/replay_buffer/__init__.py` imports `ReplayBufferInterface` from here
instead of from its own `interface`. Code of your own may import every name of its `online.utils`,
`online.utils.rollout.datatypes`, `online.utils.train.data` and `.gae` from here. Neither Ray nor
MineStudio is needed for that, and MineStudio's objects and these may be mixed: an index of either
finds what is kept under the other.

The server is named by the environment (`BREADBOX_SERVER`, `BREADBOX_BUFFER`, `BREADBOX_TOKEN`,
`BREADBOX_TLS` and `BREADBOX_TLS_CA`, `_CERT`, `_KEY`; see `breadbox.environment`), since Ray's
workers are given no arguments.

What is different, and why:

- A fetched batch stays readable until the next fetch *of the same interface* is granted, under a
  lease that is renewed in the background, instead of until the next fetch by anybody.
- MineStudio does not tell a terminal state from a time limit. `next_done` is stored as terminated.
- Nothing is pickled. What is made of arrays, tensors, numbers, texts, bytes, and of dicts, lists,
  tuples and sets of these comes back as it was; named tuples and dicts of other kinds come back as
  plain ones, and objects of classes of your own are refused.
- Fragments from before the first model version (session "", version -1), which MineStudio stores
  and deletes at the first version, are not sent; `dropped_count` counts them with those that the
  server refused as stale or of another session.
- A fragment of a version that the buffer has not heard of waits for it, for half a minute; then it
  is stored as one of the current version.
- A model version that moves back is refused; MineStudio accepts it.
- `replay_buffer/avg_reuse` and `avg_staleness` are logged only when a chunk left the buffer, where
  MineStudio logs NaN.
"""

from breadbox_adapters.minestudio.conversion import (
    fragment_id_of,
    from_fragment,
    reference_of,
    to_fragment,
)
from breadbox_adapters.minestudio.datatypes import (
    FragmentDataDict,
    FragmentIndex,
    FragmentMetadata,
    SampleFragment,
    StepRecord,
    auto_cat,
    auto_getitem,
    auto_pad,
    auto_slice,
    auto_stack,
    auto_to_numpy,
    auto_to_torch,
    recursive_detach,
)
from breadbox_adapters.minestudio.interface import ReplayBufferInterface, limits_of
from breadbox_adapters.minestudio.training import (
    FragmentLoader,
    GAEWorker,
    LoaderPool,
    batchify_next_obs,
    create_loader_pool,
    data_iter,
    get_last_fragment_indexes,
    prepare_batch,
)

__all__ = [
    "FragmentDataDict",
    "FragmentIndex",
    "FragmentLoader",
    "FragmentMetadata",
    "GAEWorker",
    "LoaderPool",
    "ReplayBufferInterface",
    "SampleFragment",
    "StepRecord",
    "auto_cat",
    "auto_getitem",
    "auto_pad",
    "auto_slice",
    "auto_stack",
    "auto_to_numpy",
    "auto_to_torch",
    "batchify_next_obs",
    "create_loader_pool",
    "data_iter",
    "fragment_id_of",
    "from_fragment",
    "get_last_fragment_indexes",
    "limits_of",
    "prepare_batch",
    "recursive_detach",
    "reference_of",
    "to_fragment",
]
