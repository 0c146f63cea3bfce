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

from breadbox_adapters.minestudio.conversion import fragment_id_of as fragment_id_of
from breadbox_adapters.minestudio.conversion import from_fragment as from_fragment
from breadbox_adapters.minestudio.conversion import reference_of as reference_of
from breadbox_adapters.minestudio.conversion import to_fragment as to_fragment
from breadbox_adapters.minestudio.datatypes import FragmentDataDict as FragmentDataDict
from breadbox_adapters.minestudio.datatypes import FragmentIndex as FragmentIndex
from breadbox_adapters.minestudio.datatypes import FragmentMetadata as FragmentMetadata
from breadbox_adapters.minestudio.datatypes import SampleFragment as SampleFragment
from breadbox_adapters.minestudio.datatypes import StepRecord as StepRecord
from breadbox_adapters.minestudio.datatypes import auto_cat as auto_cat
from breadbox_adapters.minestudio.datatypes import auto_getitem as auto_getitem
from breadbox_adapters.minestudio.datatypes import auto_pad as auto_pad
from breadbox_adapters.minestudio.datatypes import auto_slice as auto_slice
from breadbox_adapters.minestudio.datatypes import auto_stack as auto_stack
from breadbox_adapters.minestudio.datatypes import auto_to_numpy as auto_to_numpy
from breadbox_adapters.minestudio.datatypes import auto_to_torch as auto_to_torch
from breadbox_adapters.minestudio.datatypes import recursive_detach as recursive_detach
from breadbox_adapters.minestudio.interface import ReplayBufferInterface as ReplayBufferInterface
from breadbox_adapters.minestudio.interface import limits_of as limits_of
from breadbox_adapters.minestudio.training import FragmentLoader as FragmentLoader
from breadbox_adapters.minestudio.training import GAEWorker as GAEWorker
from breadbox_adapters.minestudio.training import LoaderPool as LoaderPool
from breadbox_adapters.minestudio.training import batchify_next_obs as batchify_next_obs
from breadbox_adapters.minestudio.training import create_loader_pool as create_loader_pool
from breadbox_adapters.minestudio.training import data_iter as data_iter
from breadbox_adapters.minestudio.training import (
    get_last_fragment_indexes as get_last_fragment_indexes,
)
from breadbox_adapters.minestudio.training import prepare_batch as prepare_batch
