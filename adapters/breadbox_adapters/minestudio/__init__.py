"""MineStudio's replay buffer, data types and data functions, on top of Breadbox.

MineStudio 1.1.6's rollout manager, workers and trainers run on a Breadbox server once
`minestudio/online/rollout/replay_buffer/__init__.py` imports `ReplayBufferInterface` from here
instead of from its own `interface`. Code of your own may import every name of its `online.utils`,
`online.utils.rollout.datatypes`, `online.utils.train.data` and `.gae` from here. That needs neither
Ray nor MineStudio, and MineStudio's objects and these may be mixed.

The environment names the server (`BREADBOX_SERVER`, `BREADBOX_BUFFER` and others; see
`breadbox.environment`), because Ray's workers get no arguments. docs/minestudio.md lists what is
different.
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
