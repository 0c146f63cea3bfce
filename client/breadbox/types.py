"""Types that calls of the library return or take, for annotations; what one calls is in `breadbox`.

```python
from breadbox.types import Batch


def loss_of(batch: Batch) -> float: ...
```
"""

from breadbox.lease import Lease as Lease
from breadbox.lease import Ticket as Ticket
from breadbox.model.fragment import Tree as Tree
from breadbox.model.types import AppendReply as AppendReply
from breadbox.model.types import AppendResult as AppendResult
from breadbox.model.types import ArrayType as ArrayType
from breadbox.model.types import BufferDescription as BufferDescription
from breadbox.model.types import BufferState as BufferState
from breadbox.model.types import ChunkEvent as ChunkEvent
from breadbox.model.types import Device as Device
from breadbox.model.types import FragmentRead as FragmentRead
from breadbox.model.types import FragmentReference as FragmentReference
from breadbox.model.types import GroupEnd as GroupEnd
from breadbox.model.types import GroupEndReason as GroupEndReason
from breadbox.model.types import LeaseGrant as LeaseGrant
from breadbox.model.types import MemberDescription as MemberDescription
from breadbox.model.types import ModelState as ModelState
from breadbox.model.types import OpenGroup as OpenGroup
from breadbox.model.types import PayloadReference as PayloadReference
from breadbox.model.types import PrioritiesReply as PrioritiesReply
from breadbox.model.types import PublishReply as PublishReply
from breadbox.model.types import QuarantinedFragment as QuarantinedFragment
from breadbox.model.types import StoreConfig as StoreConfig
from breadbox.model.types import Subscription as Subscription
from breadbox.model.types import TicketGrant as TicketGrant
from breadbox.model.types import TicketRenewal as TicketRenewal
from breadbox.model.types import TorchDevice as TorchDevice
from breadbox.model.types import WorkerSteps as WorkerSteps
from breadbox.operations.cursor_reads import LoadedRead as LoadedRead
from breadbox.reading.batches import Batch as Batch
from breadbox.reading.batches import Stack as Stack
from breadbox.reading.loading import LoaderKeywords as LoaderKeywords
from breadbox.reading.loading import LoaderOptions as LoaderOptions
from breadbox.reading.packed import PackedBatch as PackedBatch
from breadbox.reading.packed import PaddedBatch as PaddedBatch
from breadbox.service import Service as Service
from breadbox.stores import PayloadStore as PayloadStore
from breadbox.writing.appender import AppenderCounts as AppenderCounts
from breadbox.writing.autoreset import Autoreset as Autoreset
from breadbox.writing.step_writer import StepClient as StepClient
from breadbox.writing.step_writer import StepCounts as StepCounts
