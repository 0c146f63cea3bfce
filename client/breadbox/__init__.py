"""Breadbox: a replay-buffer service for online reinforcement learning.

```python
import breadbox

with breadbox.connect("localhost:50051") as client:
    with breadbox.Appender(client) as appender:  # rollout side
        appender.append(fragment)
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
    from breadbox.client import Client as Client
    from breadbox.client import connect as connect
    from breadbox.lease import Lease as Lease
    from breadbox.local import ServerOptions as ServerOptions
    from breadbox.local import local_server as local_server
    from breadbox.model import errors as errors
    from breadbox.model.errors import ReplayBufferError as ReplayBufferError
    from breadbox.model.errors import WaitElapsedError as WaitElapsedError
    from breadbox.model.fragment import Fragment as Fragment
    from breadbox.model.fragment import Tree as Tree
    from breadbox.model.options import Tls as Tls
    from breadbox.model.types import AdmissionOutcome as AdmissionOutcome
    from breadbox.model.types import AppendReply as AppendReply
    from breadbox.model.types import AppendResult as AppendResult
    from breadbox.model.types import ArrayType as ArrayType
    from breadbox.model.types import BufferConfig as BufferConfig
    from breadbox.model.types import BufferDescription as BufferDescription
    from breadbox.model.types import BufferState as BufferState
    from breadbox.model.types import ChunkEvent as ChunkEvent
    from breadbox.model.types import Device as Device
    from breadbox.model.types import EpisodeEnd as EpisodeEnd
    from breadbox.model.types import EpisodeReport as EpisodeReport
    from breadbox.model.types import FragmentMetadata as FragmentMetadata
    from breadbox.model.types import FragmentRead as FragmentRead
    from breadbox.model.types import FragmentReference as FragmentReference
    from breadbox.model.types import FullPolicy as FullPolicy
    from breadbox.model.types import LeaseExpiryPolicy as LeaseExpiryPolicy
    from breadbox.model.types import LeaseGrant as LeaseGrant
    from breadbox.model.types import MinimumChunks as MinimumChunks
    from breadbox.model.types import ModelState as ModelState
    from breadbox.model.types import PayloadReference as PayloadReference
    from breadbox.model.types import PrioritiesReply as PrioritiesReply
    from breadbox.model.types import PublishReply as PublishReply
    from breadbox.model.types import QuarantinedFragment as QuarantinedFragment
    from breadbox.model.types import ReleaseMode as ReleaseMode
    from breadbox.model.types import SampleToInsertRatio as SampleToInsertRatio
    from breadbox.model.types import SchemaPolicy as SchemaPolicy
    from breadbox.model.types import StoreConfig as StoreConfig
    from breadbox.model.types import Subscription as Subscription
    from breadbox.model.types import TorchDevice as TorchDevice
    from breadbox.operations.cursor_reads import LoadedRead as LoadedRead
    from breadbox.reading.batches import Batch as Batch
    from breadbox.reading.batches import Stack as Stack
    from breadbox.reading.loading import LoaderKeywords as LoaderKeywords
    from breadbox.reading.loading import LoaderOptions as LoaderOptions
    from breadbox.stores import PayloadStore as PayloadStore
    from breadbox.writing.appender import Appender as Appender
    from breadbox.writing.appender import AppenderCounts as AppenderCounts
    from breadbox.writing.appender import AppenderOptions as AppenderOptions
    from breadbox.writing.autoreset import Autoreset as Autoreset
    from breadbox.writing.step_writer import StepClient as StepClient
    from breadbox.writing.step_writer import StepCounts as StepCounts
    from breadbox.writing.step_writer import StepWriter as StepWriter
    from breadbox.writing.step_writer import true_next_obs as true_next_obs

__version__ = "0.1.0"

_HOMES = {
    "writing.appender": "Appender AppenderCounts AppenderOptions",
    "reading.batches": "Batch Stack",
    "client": "Client connect",
    "model.errors": "ReplayBufferError WaitElapsedError",
    "model.fragment": "Fragment Tree",
    "lease": "Lease",
    "reading.loading": "LoaderKeywords LoaderOptions",
    "local": "ServerOptions local_server",
    "model.options": "Tls",
    "writing.autoreset": "Autoreset",
    "writing.step_writer": "StepClient StepCounts StepWriter true_next_obs",
    "operations.cursor_reads": "LoadedRead",
    "stores": "PayloadStore",
    "model.types": """
        AdmissionOutcome AppendReply AppendResult ArrayType BufferConfig BufferDescription
        BufferState ChunkEvent Device EpisodeEnd EpisodeReport FragmentMetadata FragmentRead
        FragmentReference FullPolicy LeaseExpiryPolicy LeaseGrant MinimumChunks ModelState
        PayloadReference PrioritiesReply PublishReply QuarantinedFragment ReleaseMode
        SampleToInsertRatio SchemaPolicy StoreConfig Subscription TorchDevice
    """,
}
_MODULES = {"aio": "breadbox.aio", "errors": "breadbox.model.errors"}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = ["__version__", "aio", "errors", *sorted(_HOME_OF)]  # noqa: PLE0604 - all are strings


def __getattr__(name: str) -> "Any":
    from importlib import import_module

    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in _HOME_OF:
        raise AttributeError(f"module 'breadbox' has no attribute {name!r}")
    value = getattr(import_module(f"breadbox.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
