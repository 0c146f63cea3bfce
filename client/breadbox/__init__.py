"""Breadbox: a replay-buffer service for online reinforcement learning.

```python
import breadbox

with breadbox.connect("localhost:50051") as client:
    client.append(fragment)  # rollout side
    with client.fetch(fragment_count=32, max_wait_s=30) as lease:  # learner side
        for batch in lease.batches(batch_size=8):
            ...
```

`breadbox.aio` is the same for asyncio. Names are imported when they are first used, so that a
command line that only prints its help does not pay for gRPC and numpy.
"""

TYPE_CHECKING = False  # That of `typing` would cost more than all of this module.
if TYPE_CHECKING:
    from typing import Any

    from breadbox import aio as aio
    from breadbox import errors as errors
    from breadbox.appender import Appender as Appender
    from breadbox.appender import AppenderCounts as AppenderCounts
    from breadbox.appender import AppenderOptions as AppenderOptions
    from breadbox.batches import Batch as Batch
    from breadbox.batches import Stack as Stack
    from breadbox.client import Client as Client
    from breadbox.client import connect as connect
    from breadbox.errors import ReplayBufferError as ReplayBufferError
    from breadbox.errors import WaitElapsedError as WaitElapsedError
    from breadbox.fragment import Fragment as Fragment
    from breadbox.fragment import Tree as Tree
    from breadbox.lease import Lease as Lease
    from breadbox.loading import LoaderKeywords as LoaderKeywords
    from breadbox.loading import LoaderOptions as LoaderOptions
    from breadbox.local import ServerOptions as ServerOptions
    from breadbox.local import local_server as local_server
    from breadbox.options import Tls as Tls
    from breadbox.reading import LoadedRead as LoadedRead
    from breadbox.step_writer import Autoreset as Autoreset
    from breadbox.step_writer import StepClient as StepClient
    from breadbox.step_writer import StepCounts as StepCounts
    from breadbox.step_writer import StepWriter as StepWriter
    from breadbox.step_writer import true_next_obs as true_next_obs
    from breadbox.stores import PayloadStore as PayloadStore
    from breadbox.types import AdmissionOutcome as AdmissionOutcome
    from breadbox.types import AppendReply as AppendReply
    from breadbox.types import AppendResult as AppendResult
    from breadbox.types import ArrayType as ArrayType
    from breadbox.types import BufferConfig as BufferConfig
    from breadbox.types import BufferDescription as BufferDescription
    from breadbox.types import BufferState as BufferState
    from breadbox.types import Device as Device
    from breadbox.types import EpisodeEnd as EpisodeEnd
    from breadbox.types import EpisodeReport as EpisodeReport
    from breadbox.types import FragmentMetadata as FragmentMetadata
    from breadbox.types import FragmentRead as FragmentRead
    from breadbox.types import FragmentReference as FragmentReference
    from breadbox.types import FullPolicy as FullPolicy
    from breadbox.types import LeaseExpiryPolicy as LeaseExpiryPolicy
    from breadbox.types import LeaseGrant as LeaseGrant
    from breadbox.types import MinimumChunks as MinimumChunks
    from breadbox.types import ModelState as ModelState
    from breadbox.types import PayloadReference as PayloadReference
    from breadbox.types import PrioritiesReply as PrioritiesReply
    from breadbox.types import PublishReply as PublishReply
    from breadbox.types import QuarantinedFragment as QuarantinedFragment
    from breadbox.types import ReleaseMode as ReleaseMode
    from breadbox.types import SampleToInsertRatio as SampleToInsertRatio
    from breadbox.types import SchemaPolicy as SchemaPolicy
    from breadbox.types import StoreConfig as StoreConfig
    from breadbox.types import Subscription as Subscription
    from breadbox.types import TorchDevice as TorchDevice

__version__ = "0.1.0"

_HOMES = {
    "appender": ("Appender", "AppenderCounts", "AppenderOptions"),
    "batches": ("Batch", "Stack"),
    "client": ("Client", "connect"),
    "errors": ("ReplayBufferError", "WaitElapsedError"),
    "fragment": ("Fragment", "Tree"),
    "lease": ("Lease",),
    "loading": ("LoaderKeywords", "LoaderOptions"),
    "local": ("ServerOptions", "local_server"),
    "options": ("Tls",),
    "step_writer": ("Autoreset", "StepClient", "StepCounts", "StepWriter", "true_next_obs"),
    "reading": ("LoadedRead",),
    "stores": ("PayloadStore",),
    "types": (
        "AdmissionOutcome",
        "AppendReply",
        "AppendResult",
        "ArrayType",
        "BufferConfig",
        "BufferDescription",
        "BufferState",
        "Device",
        "EpisodeEnd",
        "EpisodeReport",
        "FragmentMetadata",
        "FragmentRead",
        "FragmentReference",
        "FullPolicy",
        "LeaseExpiryPolicy",
        "LeaseGrant",
        "MinimumChunks",
        "ModelState",
        "PayloadReference",
        "PrioritiesReply",
        "PublishReply",
        "QuarantinedFragment",
        "ReleaseMode",
        "SampleToInsertRatio",
        "SchemaPolicy",
        "StoreConfig",
        "Subscription",
        "TorchDevice",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", "aio", "errors", *sorted(_HOME_OF)]  # noqa: PLE0604 - all are strings


def __getattr__(name: str) -> "Any":
    from importlib import import_module

    if name in ("aio", "errors"):
        return import_module(f"breadbox.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'breadbox' has no attribute {name!r}")
    value = getattr(import_module(f"breadbox.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
