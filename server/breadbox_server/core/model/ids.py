"""Names for the kinds of identifiers, so that a type checker keeps them apart."""

from typing import NewType, TypeAlias

BufferName = NewType("BufferName", str)
SessionId = NewType("SessionId", str)
WorkerId = NewType("WorkerId", str)
PayloadId: TypeAlias = str
"""Not kept apart: references of the stores have them too."""
RequestId = NewType("RequestId", str)
SubscriptionName = NewType("SubscriptionName", str)
LeaseId = NewType("LeaseId", str)
ChunkId = NewType("ChunkId", int)
CallerId = NewType("CallerId", int)
ReservationId = NewType("ReservationId", int)
ModelVersion = NewType("ModelVersion", int)
FragmentIndex = NewType("FragmentIndex", int)
