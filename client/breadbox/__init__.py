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

What one calls is here; types for annotations are in `breadbox.types`, errors in `breadbox.errors`.

`breadbox.aio` is the same for asyncio. Names are imported when they are first used, so that a
command line that only prints its help does not pay for gRPC and numpy.
"""

import os

# Before 1.80 grpcio looks only every 5 s at a connection that is made while no call runs, so a
# client that calls now and then found a restarted server as late. Read when grpc is imported.
os.environ.setdefault("GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS", "200")

TYPE_CHECKING = False  # That of `typing` would cost more than all of this module.
if TYPE_CHECKING:
    from typing import Any

    from breadbox import aio as aio
    from breadbox import errors as errors
    from breadbox import types as types
    from breadbox.client import Client as Client
    from breadbox.client import connect as connect
    from breadbox.local import ServerOptions as ServerOptions
    from breadbox.local import local_server as local_server
    from breadbox.model.errors import ReplayBufferError as ReplayBufferError
    from breadbox.model.errors import WaitElapsedError as WaitElapsedError
    from breadbox.model.fragment import Fragment as Fragment
    from breadbox.model.fragment import Part as Part
    from breadbox.model.fragment import Sequence as Sequence
    from breadbox.model.fragment import fragment_of as fragment_of
    from breadbox.model.options import Tls as Tls
    from breadbox.model.types import AdmissionOutcome as AdmissionOutcome
    from breadbox.model.types import AssemblyPolicy as AssemblyPolicy
    from breadbox.model.types import BufferConfig as BufferConfig
    from breadbox.model.types import EpisodeEnd as EpisodeEnd
    from breadbox.model.types import EpisodeReport as EpisodeReport
    from breadbox.model.types import FragmentMetadata as FragmentMetadata
    from breadbox.model.types import FullPolicy as FullPolicy
    from breadbox.model.types import LeaseExpiryPolicy as LeaseExpiryPolicy
    from breadbox.model.types import MinimumChunks as MinimumChunks
    from breadbox.model.types import ReleaseMode as ReleaseMode
    from breadbox.model.types import SampleToInsertRatio as SampleToInsertRatio
    from breadbox.model.types import SchemaPolicy as SchemaPolicy
    from breadbox.model.types import StalePolicy as StalePolicy
    from breadbox.writing.appender import Appender as Appender
    from breadbox.writing.appender import AppenderOptions as AppenderOptions
    from breadbox.writing.step_writer import StepWriter as StepWriter
    from breadbox.writing.step_writer import true_next_obs as true_next_obs

__version__ = "0.1.0"

_HOMES = {
    "writing.appender": "Appender AppenderOptions",
    "client": "Client connect",
    "model.errors": "ReplayBufferError WaitElapsedError",
    "model.fragment": "Fragment Part Sequence fragment_of",
    "local": "ServerOptions local_server",
    "model.options": "Tls",
    "writing.step_writer": "StepWriter true_next_obs",
    "model.types": """
        AdmissionOutcome AssemblyPolicy BufferConfig EpisodeEnd EpisodeReport FragmentMetadata
        FullPolicy LeaseExpiryPolicy MinimumChunks ReleaseMode SampleToInsertRatio SchemaPolicy
        StalePolicy
    """,
}
_MODULES = ("aio", "errors", "types")
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
_MOVED = """
    AppendReply AppendResult AppenderCounts ArrayType Autoreset Batch BufferDescription BufferState
    ChunkEvent Device FragmentRead FragmentReference Lease LeaseGrant LoadedRead LoaderKeywords
    LoaderOptions ModelState PayloadReference PayloadStore PrioritiesReply PublishReply
    QuarantinedFragment Stack StepClient StepCounts StoreConfig Subscription TorchDevice Tree
"""
"""Names that are in `breadbox.types` since 0.1."""

__all__ = ["__version__", *_MODULES, *sorted(_HOME_OF)]  # noqa: PLE0604 - all are strings


def __getattr__(name: str) -> "Any":
    from importlib import import_module

    if name in _MODULES:
        return import_module(f"breadbox.{name}")
    if name in _MOVED.split():
        from warnings import warn

        text = f"breadbox.{name} is breadbox.types.{name}; the old name goes with the next version"
        warn(text, DeprecationWarning, stacklevel=2)
        return getattr(import_module("breadbox.types"), name)
    if name not in _HOME_OF:
        raise AttributeError(f"module 'breadbox' has no attribute {name!r}")
    value = getattr(import_module(f"breadbox.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
