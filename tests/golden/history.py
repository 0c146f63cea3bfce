"""A history with every kind of entry, after which every part of a buffer is in use."""

from dataclasses import replace
from typing import Any

from breadbox_server.core.buffers import DEFAULT_BUFFER, BufferSet
from breadbox_server.core.model.config import (
    AssemblyPolicy,
    BufferConfig,
    FullPolicy,
    LeaseExpiryPolicy,
    SampleToInsertRatioConfig,
    SchemaPolicy,
    StalePolicy,
)
from breadbox_server.core.model.events import FetchGranted, TicketsTaken
from breadbox_server.core.model.ids import (
    BufferName,
    FragmentIndex,
    ModelVersion,
    PayloadId,
    RequestId,
    SessionId,
    SubscriptionName,
    WorkerId,
)
from breadbox_server.core.model.inputs import (
    Acknowledge,
    AdmissionOutcome,
    Answer,
    AppendFragments,
    CreateBuffer,
    DeclareSchema,
    DeleteBuffer,
    DropMembers,
    DropPayloads,
    EndSession,
    Fetch,
    Fragment,
    GiveBackTicket,
    Input,
    Payload,
    PublishModel,
    ReleaseLease,
    ReleaseMode,
    RenewLease,
    RenewTicket,
    ReportUnreadable,
    StartSession,
    Subscribe,
    TakeTickets,
    UndeliveredGrant,
    Unsubscribe,
    UpdateBuffer,
    UpdatePriorities,
)
from breadbox_server.core.model.schemas import SchemaArray, SchemaOrigin
from breadbox_server.core.model.validation import PART_VERSION
from breadbox_server.core.samplers import SAMPLERS
from breadbox_server.core.state.chunks import ChunkState

STARTED_AT = 1_700_000_000.25
LIMITS = BufferConfig(
    capacity_chunks=200,
    uses_max=2,
    full_policy=FullPolicy.BLOCK,
    lease_expiry_policy=LeaseExpiryPolicy.CONSUME,
    lease_s=45.5,
    sampler="freshest_first",
    schema=SchemaPolicy.ANY,
    limiter=SampleToInsertRatioConfig(
        ratio=1.5, error_chunks=1000.0, minimum_chunk_count=2, lead_chunks=2.5
    ),
)
SCHEMA = (
    SchemaArray("obs.image", "|u1", (84, 84, 3)),
    SchemaArray("reward", "<f4", ()),
    SchemaOrigin("environment wrappers", "none"),
)
SCHEMA_HASH = 2**64 - 7
CHUNKS = BufferName("chunks")
GONE = BufferName("gone")
KEPT = BufferName("kept")
GROUPS = BufferName("groups")
PACED = BufferName("paced")
ROWS = BufferName("rows")
VERIFIED = BufferName("verified")
RUN = 20
"""Fragments decided at a time, enough to be written down as columns."""


def play(buffers: BufferSet, act: int = 0) -> float:
    """Carry one act of the history out; gives the instant at which it has ended.

    Args:
        buffers: Those that the act before has left, or new ones.
        act: 0, 1, and so on: each in sessions of its own, and at a later time.
    """
    return _Act(buffers, act).play()


class _Act:
    def __init__(self, buffers: BufferSet, act: int) -> None:
        self._buffers = buffers
        self._act = act
        self._now = STARTED_AT + 1000.0 * act
        self._payload_count = 1000 * act

    def play(self) -> float:
        chunks = BufferConfig(
            fragments_per_chunk=3,
            uses_max=3,
            sampler="prioritised",
            priority_exponent=0.5,
            remover="lowest_priority",
        )
        self._do(CreateBuffer(CHUNKS, chunks))
        for sampler in SAMPLERS:
            limits = replace(LIMITS, sampler=sampler, with_replacement=sampler == "uniform")
            self._do(CreateBuffer(GONE, limits))
            self._do(DeleteBuffer(GONE))
        self._do(CreateBuffer(KEPT, BufferConfig(sampler="oldest_first")))
        self._in_default()
        self._in_chunks()
        self._do(
            CreateBuffer(
                GROUPS,
                BufferConfig(
                    fragments_per_chunk=3,
                    assembly=AssemblyPolicy.GROUPS,
                    group_min=2,
                    drop_equal="reward",
                    open_chunk_s=1.5,
                ),
            )
        )
        self._in_kept()
        self._in_groups()
        self._in_paced()
        self._in_rows()
        return self._now

    def _in_default(self) -> None:
        """A session that ends, one that goes on, and chunks of one fragment."""
        first, session = SessionId(f"first-{self._act}"), SessionId(f"second-{self._act}")
        self._do(StartSession(DEFAULT_BUFFER, first))
        self._append(DEFAULT_BUFFER, first, "w0", 0)
        self._do(EndSession(DEFAULT_BUFFER, first))
        self._do(StartSession(DEFAULT_BUFFER, session, ModelVersion(3)))
        for version, weights in (4, self._payload(4096)), (5, self._payload(4096)), (9, None):
            self._do(PublishModel(DEFAULT_BUFFER, session, ModelVersion(version), weights))
        for index in range(RUN):
            self._append(DEFAULT_BUFFER, session, f"wörker {index % 3}", index, version=9)
        stale = self._append(DEFAULT_BUFFER, session, "late", 0, version=3)
        assert stale is AdmissionOutcome.STALE
        released = self._fetch(DEFAULT_BUFFER, "released", 2)
        returned = self._fetch(DEFAULT_BUFFER, "returned", 2)
        undelivered = self._fetch(DEFAULT_BUFFER, "undelivered", 1)
        renewed = self._fetch(DEFAULT_BUFFER, "renewed", 4, lease_s=7.25)
        self._do(ReleaseLease(DEFAULT_BUFFER, released.lease_id, ReleaseMode.CONSUMED))
        self._do(ReleaseLease(DEFAULT_BUFFER, returned.lease_id, ReleaseMode.RETURNED))
        self._do(UndeliveredGrant(DEFAULT_BUFFER, undelivered.lease_id))
        self._do(RenewLease(DEFAULT_BUFFER, renewed.lease_id))
        self._do(RenewLease(DEFAULT_BUFFER, renewed.lease_id, 300.125))
        lost = renewed.fragments[0].fragment.payload.payload_id
        self._do(DropPayloads(DEFAULT_BUFFER, (lost, PayloadId("f" * 32))))
        self._do(UpdateBuffer(DEFAULT_BUFFER, LIMITS))

    def _in_chunks(self) -> None:
        """Chunks of several fragments, of which one cannot be read, one is used up, one is open."""
        session = SessionId(f"third-{self._act}")
        self._do(StartSession(CHUNKS, session))
        self._do(DeclareSchema(CHUNKS, session, SCHEMA_HASH, SCHEMA))
        for index in range(9):
            self._append(CHUNKS, session, "w0", index, discontinuity=index == 0)
        self._update_priorities(CHUNKS)
        for index in range(9, 17):
            self._append(CHUNKS, session, "w0", index)
        self._append(CHUNKS, session, "w1", 5, pieces=True)
        unreadable = self._fetch(CHUNKS, "unreadable", 6)
        for each, reports_max in (unreadable.fragments[1], 1), (unreadable.fragments[3], 2):
            told = (each.fragment.payload.payload_id,)
            self._do(ReportUnreadable(CHUNKS, unreadable.lease_id, told, reports_max))
        self._fetch(CHUNKS, "of two ranks", 6, world_size=2)
        other = self._fetch(CHUNKS, "of two ranks", 6, world_size=2, rank=1)
        self._do(ReleaseLease(CHUNKS, other.lease_id, ReleaseMode.CONSUMED))
        self._fetch(CHUNKS, "uses them up", 9)
        expired = self._fetch(CHUNKS, "expired", 3, lease_s=1.5)
        assert expired.fragments
        self._now += 2.0
        self._buffers.handle_timer(now=self._now)

    def _in_kept(self) -> None:
        """Chunks that are used up, of which one is retained, one passed and one missed."""
        session = SessionId(f"fourth-{self._act}")
        archive, mirror = SubscriptionName("archive"), SubscriptionName("mirror")
        self._do(Subscribe(KEPT, archive, is_retaining=True))
        self._do(Subscribe(KEPT, mirror, is_retaining=False, after_chunk_id=-1))
        self._do(Subscribe(KEPT, SubscriptionName("gone"), is_retaining=True))
        self._do(Unsubscribe(KEPT, SubscriptionName("gone")))
        self._do(StartSession(KEPT, session))
        for index in range(4):
            self._append(KEPT, session, "w0", index)
        granted = self._fetch(KEPT, f"kept-{self._act}", 3)
        self._do(ReleaseLease(KEPT, granted.lease_id, ReleaseMode.CONSUMED))
        passed, missed, _ = sorted({each.chunk_id for each in granted.fragments})
        self._do(Acknowledge(KEPT, archive, passed))
        self._do(Acknowledge(KEPT, mirror, missed))
        [lost] = [
            each.fragment.payload.payload_id
            for each in granted.fragments
            if each.chunk_id == missed
        ]
        self._do(DropPayloads(KEPT, (lost,)))

    def _in_groups(self) -> None:
        """Groups that ended complete, partial, incomplete, stale and equal, and an open one."""
        session = SessionId(f"fifth-{self._act}")
        self._do(StartSession(GROUPS, session, ModelVersion(9)))
        for group, member in (
            ("all", 2),
            ("few", 1),
            ("all", 0),
            ("part", 2),
            ("part", 0),
            ("all", 1),
            ("same", 2),
            ("same", 0),
            ("same", 1),
        ):
            self._append(GROUPS, session, group, member, version=9)
        stale = self._append(GROUPS, session, "late", 0, version=3)
        assert stale is AdmissionOutcome.STALE
        self._now += 2.0
        self._buffers.handle_timer(now=self._now)
        ended = self._append(GROUPS, session, "part", 1, version=9)
        assert ended is AdmissionOutcome.GROUP_ENDED
        self._append(GROUPS, session, "open", 1, version=9)

    def _in_paced(self) -> None:
        """Tickets that were renewed, begun, given back and that expired."""
        limits = BufferConfig(
            fragments_per_chunk=3,
            assembly=AssemblyPolicy.GROUPS,
            group_min=2,
            stale=StalePolicy.KEEP,
            groups_per_version=4,
            lead_versions=1,
        )
        self._do(CreateBuffer(PACED, limits))
        session = SessionId(f"sixth-{self._act}")
        self._do(StartSession(PACED, session, ModelVersion(4)))
        groups = self._take_tickets(6, 30.0)
        for member in range(3):
            self._append(PACED, session, groups[0], member)
        self._fetch(PACED, "paced", 3)
        self._append(PACED, session, groups[1], 2)
        self._do(GiveBackTicket(PACED, groups[1], 0))
        self._do(GiveBackTicket(PACED, groups[2]))
        self._do(RenewTicket(PACED, groups[3], 60.0))
        self._do(RenewTicket(PACED, groups[4]))
        self._take_tickets(1, 1.0)
        self._now += 2.0
        self._buffers.handle_timer(now=self._now)

    def _in_rows(self) -> None:
        """Rows with parts and numbers, some replaced or dropped; members that lack a part."""
        assembly, session = AssemblyPolicy.GROUPS, SessionId(f"seventh-{self._act}")
        self._do(CreateBuffer(ROWS, BufferConfig(fragments_per_chunk=0, assembly=assembly)))
        self._do(StartSession(ROWS, session))
        for row in "a", "b":
            self._attach(ROWS, session, row, "ids", 1, '{"status":"running"}')
        self._attach(ROWS, session, "a", "reward", 2, '{"reward":0.5,"status":"done"}')
        self._attach(ROWS, session, "a", "ids", 3, "", replaces=True)
        self._attach(ROWS, session, "c", "", 0, '{"is_prompt":true}')
        self._attach(ROWS, session, "c", "", 0, '{"status":"pending"}')
        self._do(DropMembers(ROWS, (WorkerId("b"),), (0,)))
        verified = BufferConfig(
            fragments_per_chunk=2, assembly=assembly, required_parts="tokens,reward"
        )
        self._do(CreateBuffer(VERIFIED, verified))
        self._do(StartSession(VERIFIED, session))
        for member in range(2):
            for group in "whole", "open":
                self._append(VERIFIED, session, group, member)
            self._attach(VERIFIED, session, "whole", "reward", 1, '{"reward":1}', member=member)
        self._attach(VERIFIED, session, "open", "reward", 1, '{"reward":1}')

    def _attach(
        self,
        buffer: BufferName,
        session: SessionId,
        group: str,
        part: str,
        code: int,
        numbers: str,
        member: int = 0,
        *,
        replaces: bool = False,
    ) -> None:
        attached = Fragment(
            worker_id=WorkerId(group),
            fragment_index=FragmentIndex(member),
            session_id=session,
            model_version_min=PART_VERSION,
            model_version_max=PART_VERSION,
            payload=self._payload(100 if part else 0),
            step_count=0,
            discontinuity=True,
            schema_hash=code,
            numbers=numbers,
            part=part,
            replaces=replaces,
        )
        self._do(AppendFragments(buffer, [attached]))

    def _take_tickets(self, count: int, lease_s: float) -> tuple[WorkerId, ...]:
        self._buffers.take_events()
        self._do(
            TakeTickets(
                PACED,
                request_id=RequestId(f"{count} tickets {self._act}"),
                ticket_count=count,
                deadline_at=self._now,
                lease_s=lease_s,
                holder="generators",
            )
        )
        [taken] = [each for each in self._buffers.take_events() if isinstance(each, TicketsTaken)]
        return taken.groups

    def _update_priorities(self, buffer: BufferName) -> None:
        """Of the chunks held, the second goes, and the last matters less."""
        [held] = [each.chunks for each in self._buffers.snapshot() if each.name == buffer]
        numbers = sorted(each.chunk_id for each in held if each.state is ChunkState.HELD)
        done = self._do(UpdatePriorities(buffer, ((numbers[-1], 0.25),), (numbers[1],)))
        assert (1, 1, 0) == done

    def _do(self, command: Input[Answer]) -> Answer:
        self._now += 0.125
        return self._buffers.apply(command, now=self._now)

    def _payload(self, size_bytes: int, piece_size_bytes: int = 0) -> Payload:
        self._payload_count += 1
        return Payload(PayloadId(f"{self._payload_count:032x}"), size_bytes, piece_size_bytes)

    def _append(
        self,
        buffer: BufferName,
        session: SessionId,
        worker: str,
        index: int,
        *,
        version: int = 0,
        discontinuity: bool = False,
        pieces: bool = False,
    ) -> AdmissionOutcome:
        fragment = Fragment(
            worker_id=WorkerId(worker),
            fragment_index=FragmentIndex(index),
            session_id=session,
            model_version_min=ModelVersion(version - version % 2),
            model_version_max=ModelVersion(version),
            payload=self._payload(100 + index, 65_536 if pieces else 0),
            step_count=16,
            discontinuity=discontinuity,
            schema_hash=SCHEMA_HASH if buffer == CHUNKS else 0,
            priority=index % 4 / 2 if buffer == CHUNKS else 1.0,
            numbers=f'{{"reward":{index * (worker != "same")}}}' if buffer == GROUPS else "",
        )
        (answer,) = self._do(AppendFragments(buffer, [fragment]))
        outcome: AdmissionOutcome = answer.outcome
        return outcome

    def _fetch(
        self, buffer: BufferName, request_id: str, fragment_count: int, **more: Any
    ) -> FetchGranted:
        self._buffers.take_events()
        self._do(
            Fetch(
                buffer=buffer,
                request_id=RequestId(f"{request_id} {self._act}"),
                fragment_count=fragment_count,
                deadline_at=self._now + 1.0,
                **more,
            )
        )
        granted = [each for each in self._buffers.take_events() if isinstance(each, FetchGranted)]
        assert granted, f"{request_id}: nothing was granted"
        return granted[0]
