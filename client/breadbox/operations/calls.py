"""Build the calls of both clients. `METHODS` says for every RPC why repeating it is safe."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar
from uuid import uuid4

from google.protobuf.message import Message

from breadbox.model import types
from breadbox.model.fragment import Sendable
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox.v1 import schema_pb2
from breadbox.wire import conversion as wire
from breadbox.wire.schemas import NO_ORIGIN, SCHEMAS_TOLD_MAX

if TYPE_CHECKING:
    from breadbox.payload import Written

Reply = TypeVar("Reply")

INLINE_REPLY_BYTES_MAX: Final = 4 * 2**20
"""Most bytes of inline payloads in a reply: the server sends no more."""
UNREADABLE_MAX: Final = 4096
"""Most payloads that a release may name: the server accepts no more."""
PRIORITIES_MAX: Final = 2048
"""Most priorities that a call may set, and chunks it may delete: the server accepts no more."""

METHODS: dict[str, str] = {
    "StartSession": "starting the session that is current changes nothing",
    "EndSession": "ending a session that is not current changes nothing",
    "PublishModel": "the version that is current, published again, changes nothing",
    "WatchModel": "reads",
    "GroupEnds": "reads",
    "TakeTickets": "the same request_id gets the same tickets",
    "RenewTicket": "the ticket then lives from the later renewal",
    "GiveBackTicket": "what was given back stays so",
    "Members": "reads",
    "ReadMembers": "reads; a lease expires if its reply was lost",
    "ClaimMembers": "a claim expires if its reply was lost",
    "DropMembers": "what is dropped stays so",
    "AppendFragments": "a fragment's identity is judged once; again it is a DUPLICATE",
    "FetchFragments": "the same request_id gets the same grant",
    "GetPreparedFragments": "reads",
    "ReadFragments": "reads; a lease expires if its reply was lost",
    "CreateSubscription": "one of the same name and kind is left as it is",
    "AcknowledgeChunks": "the cursor moves forward only",
    "DeleteSubscription": "that it is gone when it is repeated is the success of the first",
    "RenewLease": "the lease then lives from the later renewal",
    "ReleaseLease": "a lease that was released stays released",
    "UpdatePriorities": "sets priorities, does not add to them; what is deleted stays so",
    "CreateBuffer": "a buffer with the very same limits is left as it is",
    "UpdateBuffer": "sets limits, does not add to them",
    "DeleteBuffer": "that it is gone when it is repeated is the success of the first",
    "ListBuffers": "reads",
    "GetBuffer": "reads",
    "GetStoreConfig": "reads",
    "ReportEpisodes": "",
}
"""Reason why an RPC may be sent again when no answer came, by RPC; empty if it is sent once, as is
a report of episodes, which adds to sums."""


@dataclass(frozen=True, slots=True)
class Call(Generic[Reply]):
    """A request that is ready to be sent."""

    method: str
    """Key of `METHODS`."""
    request: Message
    decode: Callable[[Any], Reply]
    """Converts the response message to the caller's result."""
    wait_s: float = 0.0
    """Seconds for which the server may block on purpose; the deadline is that much later."""

    @property
    def repeatable(self) -> bool:
        """True if it may be sent again although it may have arrived."""
        return bool(METHODS[self.method])


def _nothing(response: Any) -> None:
    del response


def _call(
    kind: type[Message], decode: Callable[[Any], Reply], *, wait_s: float = 0.0, **fields: Any
) -> Call[Reply]:
    method = kind.DESCRIPTOR.name.removesuffix("Request")
    return Call(method, wire.build(kind, **fields), decode, wait_s)


def start_session(
    buffer: str, session_id: str | None, model_version: int | None, *, take_over: bool
) -> Call[types.ModelState]:
    """Start a session; without an id, a random one."""
    session_id = uuid4().hex if session_id is None else session_id
    return _call(
        pb.StartSessionRequest,
        wire.model_from_wire,
        buffer=buffer,
        session_id=session_id,
        model_version=model_version,
        take_over=take_over,
    )


def end_session(buffer: str, session_id: str) -> Call[None]:
    """End a session."""
    return _call(pb.EndSessionRequest, _nothing, buffer=buffer, session_id=session_id)


def publish_model(
    buffer: str, session_id: str, model_version: int, weights: types.PayloadReference | None
) -> Call[types.PublishReply]:
    """Move the model version forward."""
    return _call(
        pb.PublishModelRequest,
        lambda response: types.PublishReply(response.model_version, response.evicted_chunk_count),
        buffer=buffer,
        session_id=session_id,
        model_version=model_version,
        weights=wire.to_wire(wire.PAYLOAD, weights) if weights else None,
    )


def watch_model(
    buffer: str, known: types.ModelState | None, max_wait_s: float
) -> Call[types.ModelState | None]:
    """Wait for other than the known session, version or weights; the answer is None without one."""
    return _call(
        pb.WatchModelRequest,
        lambda response: wire.model_from_wire(response) if response.changed else None,
        wait_s=max_wait_s,
        buffer=buffer,
        known_session_id=known.session_id if known else None,
        known_model_version=known.model_version if known else None,
        known_weights=known.weights is not None if known else None,
        max_wait=wire.duration("max_wait_s", max_wait_s),
    )


def group_ends(buffer: str, after: int, max_wait_s: float) -> Call[list[types.GroupEnd]]:
    """Wait for groups to end after the end of a number."""
    return _call(
        pb.GroupEndsRequest,
        wire.group_ends_from_wire,
        wait_s=max_wait_s,
        buffer=buffer,
        after_number=after,
        max_wait=wire.duration("max_wait_s", max_wait_s),
    )


def take_tickets(
    buffer: str, request_id: str, count: int, lease_s: float, max_wait_s: float
) -> Call[types.TicketGrant | str]:
    """Take tickets; the answer is the reason if the wait has elapsed."""
    return _call(
        pb.TakeTicketsRequest,
        wire.tickets_from_wire,
        wait_s=max_wait_s,
        buffer=buffer,
        request_id=request_id,
        ticket_count=count,
        lease_duration=wire.duration("lease_s", lease_s),
        max_wait=wire.duration("max_wait_s", max_wait_s),
    )


def renew_ticket(buffer: str, group: str, lease_s: float | None) -> Call[types.TicketRenewal]:
    """Renew a ticket."""
    return _call(
        pb.RenewTicketRequest,
        lambda response: types.TicketRenewal(
            wire.seconds(response.remaining_duration), response.session_id, response.model_version
        ),
        buffer=buffer,
        group=group,
        lease_duration=wire.duration("lease_s", lease_s),
    )


def give_back_ticket(buffer: str, group: str, member: int | None) -> Call[None]:
    """Give a group back, or one member of it."""
    return _call(pb.GiveBackTicketRequest, _nothing, buffer=buffer, group=group, member=member)


def list_members(
    buffer: str, prefix: str, after: tuple[str, int] | None, keys: Sequence[tuple[str, int]] = ()
) -> Call[tuple[list[types.MemberDescription], tuple[str, int] | None]]:
    """List a page of members; the answer has the key to go on after, or None."""

    def page(
        response: Any,
    ) -> tuple[list[types.MemberDescription], tuple[str, int] | None]:
        more = response.HasField("next_after")
        key = (response.next_after.group, response.next_after.member) if more else None
        return wire.members_from_wire(response), key

    return _call(
        pb.MembersRequest,
        page,
        buffer=buffer,
        prefix=prefix,
        after=None if after is None else wire.member_keys([after])[0],
        keys=wire.member_keys(keys),
    )


def read_members(
    buffer: str,
    keys: Sequence[tuple[str, int]],
    parts: Sequence[str],
    inline_bytes_max: int = INLINE_REPLY_BYTES_MAX,
) -> Call[types.MembersRead]:
    """Read the parts of members under a lease."""
    return _call(
        pb.ReadMembersRequest,
        wire.members_read_from_wire,
        buffer=buffer,
        keys=wire.member_keys(keys),
        parts=parts,
        inline_bytes_max=inline_bytes_max,
    )


def claim_members(
    buffer: str,
    lacking: str,
    count: int,
    max_wait_s: float,
    lease_s: float | None,
    inline_bytes_max: int = INLINE_REPLY_BYTES_MAX,
) -> Call[types.LeaseGrant | str]:
    """Claim members that lack a part; the answer is the reason if the wait has elapsed."""
    return _call(
        pb.ClaimMembersRequest,
        lambda response: (
            wire.grant_of(response.grant, "")
            if response.HasField("grant")
            else response.waiting_reason
        ),
        wait_s=max_wait_s,
        buffer=buffer,
        lacking=lacking,
        member_count=count,
        max_wait=wire.duration("max_wait_s", max_wait_s),
        lease_duration=wire.duration("lease_s", lease_s),
        inline_bytes_max=inline_bytes_max,
    )


def drop_members(buffer: str, keys: Sequence[tuple[str, int]]) -> Call[int]:
    """Drop rows; the answer is how many were there."""
    return _call(
        pb.DropMembersRequest,
        lambda response: response.dropped_count,
        buffer=buffer,
        keys=wire.member_keys(keys),
    )


def append_fragments(
    buffer: str, fragments: Sequence[types.FragmentMetadata]
) -> Call[types.AppendReply]:
    """Announce fragments with written payloads."""
    return _call(
        pb.AppendFragmentsRequest,
        wire.append_reply_from_wire,
        buffer=buffer,
        fragments=[wire.to_wire(wire.METADATA, metadata) for metadata in fragments],
    )


def announce_fragments(
    buffer: str,
    fragments: Sequence[Sendable],
    written: "Sequence[Written]",
    *,
    sends_schemas: bool = False,
    origin: Mapping[str, str] = NO_ORIGIN,
    max_wait_s: float = 0.0,
    replaces: bool = False,
) -> Call[types.AppendReply]:
    """Announce fragments with written or inline payloads; as `append_fragments`."""
    schemas = {}
    if sends_schemas:
        schemas = {
            each.schema.hash: each.schema.message
            for each in written
            if each.schema and each.schema.message
        }
    if origin:
        schemas = {
            code: schema_pb2.Schema(arrays=each.arrays, origin=origin)
            for code, each in schemas.items()
        }
    bodies = [each.body for each in written]
    return _call(
        pb.AppendFragmentsRequest,
        wire.append_reply_from_wire,
        buffer=buffer,
        fragments=[
            wire.announcement(
                *(fragment, each.payload, each.schema.hash if each.schema else 0), replaces=replaces
            )
            for fragment, each in zip(fragments, written, strict=True)
        ],
        schemas=list(schemas.values())[:SCHEMAS_TOLD_MAX],
        max_wait=wire.duration("max_wait_s", max_wait_s) if max_wait_s else None,
        payloads=bodies if any(bodies) else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchRequest:
    """The arguments of a fetch."""

    fragment_count: int
    """Number of fragments for all ranks together."""
    max_wait_s: float | None = 0.0
    """Seconds to wait, or None for as long as it takes."""
    rank: int = 0
    world_size: int = 1
    request_id: str | None = None
    """Name of the fetch, or None for a random one."""
    lease_s: float | None = None
    """Seconds until the lease expires, or None for the buffer's `lease_s`."""


def fetch_fragments(
    buffer: str,
    fetch: FetchRequest,
    request_id: str,
    max_wait_s: float,
    inline_bytes_max: int = INLINE_REPLY_BYTES_MAX,
) -> Call[types.LeaseGrant | str]:
    """Fetch under a lease; the answer is the grant, or why there was none within the wait."""
    return _call(
        pb.FetchFragmentsRequest,
        lambda response: wire.grant_from_wire(response, request_id),
        wait_s=max_wait_s,
        buffer=buffer,
        request_id=request_id,
        fragment_count=fetch.fragment_count,
        max_wait=wire.duration("max_wait_s", max_wait_s),
        rank=fetch.rank,
        world_size=fetch.world_size,
        lease_duration=wire.duration("lease_s", fetch.lease_s),
        inline_bytes_max=inline_bytes_max,
    )


def get_prepared_fragments(
    buffer: str, request_id: str
) -> Call[tuple[types.FragmentReference, ...]]:
    """Read the fragments granted to all ranks of a request."""
    return _call(
        pb.GetPreparedFragmentsRequest,
        lambda response: wire.references_from_wire(response.fragments),
        buffer=buffer,
        request_id=request_id,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRequest:
    """The arguments of a read by cursor."""

    after_chunk_id: int | None = None
    """Chunk to begin after, or None for the oldest chunk that is held."""
    chunk_count_max: int = 64
    max_wait_s: float = 0.0
    lease_s: float | None = None
    """Seconds until the lease expires, or None for the buffer's `lease_s`."""
    known_session_id: str | None = None
    """Session that the reader knows, or None. Another session ends the wait only if it is set."""
    subscription: str | None = None
    """Subscription to read, or None if the reader keeps the cursor."""
    is_look: bool = False
    """True if the read is no use of the buffer by `BufferState.idle_s`."""


def read_fragments(
    buffer: str,
    read: ReadRequest,
    max_wait_s: float,
    inline_bytes_max: int = INLINE_REPLY_BYTES_MAX,
) -> Call[types.FragmentRead]:
    """Read chunks after a cursor under a lease, without using them."""
    return _call(
        pb.ReadFragmentsRequest,
        wire.read_from_wire,
        wait_s=max_wait_s,
        buffer=buffer,
        after_chunk_id=read.after_chunk_id,
        chunk_count_max=read.chunk_count_max,
        max_wait=wire.duration("max_wait_s", max_wait_s),
        lease_duration=wire.duration("lease_s", read.lease_s),
        known_session_id=read.known_session_id,
        subscription=read.subscription,
        inline_bytes_max=inline_bytes_max,
        is_look=read.is_look,
    )


def create_subscription(
    buffer: str, name: str, *, retaining: bool, after_chunk_id: int | None
) -> Call[types.Subscription]:
    """Create a named cursor."""
    return _call(
        pb.CreateSubscriptionRequest,
        lambda response: wire.subscription_from_wire(response.subscription),
        buffer=buffer,
        name=name,
        retaining=retaining,
        after_chunk_id=after_chunk_id,
    )


def acknowledge_chunks(buffer: str, subscription: str, chunk_id: int) -> Call[None]:
    """Move a named cursor forward."""
    return _call(
        pb.AcknowledgeChunksRequest,
        _nothing,
        buffer=buffer,
        subscription=subscription,
        chunk_id=chunk_id,
    )


def delete_subscription(buffer: str, name: str) -> Call[None]:
    """Delete a named cursor."""
    return _call(pb.DeleteSubscriptionRequest, _nothing, buffer=buffer, name=name)


def renew_lease(buffer: str, lease_id: str, lease_s: float | None) -> Call[float]:
    """Renew a lease; the answer is the seconds it has left."""
    return _call(
        pb.RenewLeaseRequest,
        lambda response: wire.seconds(response.lease.remaining_duration),
        buffer=buffer,
        lease_id=lease_id,
        lease_duration=wire.duration("lease_s", lease_s),
    )


def release_lease(
    buffer: str, lease_id: str, mode: types.ReleaseMode, unreadable: Sequence[str] = ()
) -> Call[None]:
    """End a lease, naming payloads that could not be read."""
    return _call(
        pb.ReleaseLeaseRequest,
        _nothing,
        buffer=buffer,
        lease_id=lease_id,
        mode=wire.release_mode_to_wire(mode),
        unreadable_payload_ids=unreadable[:UNREADABLE_MAX],
    )


def update_priorities(
    buffer: str, updates: Sequence[tuple[int, float]], delete: Sequence[int]
) -> Call[types.PrioritiesReply]:
    """Set priorities of chunks, and evict others."""
    return _call(
        pb.UpdatePrioritiesRequest,
        lambda response: types.PrioritiesReply(
            response.updated_count, response.deleted_count, response.unknown_count
        ),
        buffer=buffer,
        updates=[
            wire.build(pb.PriorityUpdate, chunk_id=chunk_id, priority=priority)
            for chunk_id, priority in updates
        ],
        delete_chunk_ids=delete,
    )


def create_buffer(name: str, config: types.BufferConfig) -> Call[types.BufferDescription]:
    """Create a buffer."""
    return _call(
        pb.CreateBufferRequest, _described, name=name, config=wire.to_wire(wire.CONFIG, config)
    )


def update_buffer(
    name: str, config: types.BufferConfig, reset: Iterable[str] = ()
) -> Call[types.BufferDescription]:
    """Change limits, and set those that `reset` names to their default."""
    return _call(
        pb.UpdateBufferRequest,
        _described,
        name=name,
        config=wire.to_wire(wire.CONFIG, config),
        update_mask=wire.update_mask(config, reset),
    )


def delete_buffer(name: str) -> Call[None]:
    """Delete a buffer."""
    return _call(pb.DeleteBufferRequest, _nothing, name=name)


BufferPage = tuple[tuple[types.BufferDescription, ...], str]
"""A page of buffers, and the token of the next page, or empty if it is the last."""


def list_buffers(page_token: str = "") -> Call[BufferPage]:
    """Return a page of the buffers."""
    return Call(
        "ListBuffers",
        pb.ListBuffersRequest(page_token=page_token),
        lambda response: (
            tuple(wire.buffer_from_wire(buffer) for buffer in response.buffers),
            response.next_page_token,
        ),
    )


def get_buffer(
    name: str, events_after: int | None = None, with_workers: bool = False
) -> Call[types.BufferDescription]:
    """Return one buffer, with the events of its chunks after a number if that is not None."""
    return _call(
        pb.GetBufferRequest,
        _described,
        name=name,
        chunk_events_after=events_after,
        with_workers=with_workers,
    )


def get_store_config(write_refusal: str = "") -> Call[types.StoreConfig]:
    """Return the settings of the payload store; report its answer to a write that waits."""
    return _call(pb.GetStoreConfigRequest, wire.store_config_from_wire, write_refusal=write_refusal)


def report_episodes(
    buffer: str,
    episodes: Sequence[types.EpisodeReport],
    workers: Sequence[types.WorkerSteps] = (),
) -> Call[None]:
    """Report finished episodes, and where the steps of workers went."""
    return _call(
        pb.ReportEpisodesRequest,
        _nothing,
        buffer=buffer,
        episodes=[wire.to_wire(wire.EPISODE, episode) for episode in episodes],
        workers=[wire.to_wire(wire.WORKER, worker) for worker in workers],
    )


def _described(response: Any) -> types.BufferDescription:
    return wire.buffer_from_wire(response.buffer)
