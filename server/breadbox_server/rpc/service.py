"""The gRPC methods: convert, call the driver, convert back; `interceptors` report errors."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, Final

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from breadbox import __version__
from breadbox.model.errors import StoreFullError
from breadbox.stores.frames import pack
from breadbox.v1 import buffer_pb2, replay_buffer_service_pb2, replay_buffer_service_pb2_grpc
from breadbox_server.access.authorization import (
    Role,
    caller_name,
    current_caller,
    current_process,
)
from breadbox_server.base import conversion as convert
from breadbox_server.base.errors import GatewayOffError
from breadbox_server.core.model.config import MEMBER_PARTS_MAX
from breadbox_server.core.model.description import BufferDescription
from breadbox_server.core.model.errors import InvalidArgumentError, LeaseNotFoundError
from breadbox_server.core.model.events import FetchGranted, TicketsTaken
from breadbox_server.core.model.ids import (
    BufferName,
    LeaseId,
    ModelVersion,
    RequestId,
    SessionId,
    SubscriptionName,
    WorkerId,
)
from breadbox_server.core.model.inputs import (
    Acknowledge,
    AdmissionOutcome,
    CreateBuffer,
    DeleteBuffer,
    DropMembers,
    EndSession,
    Fetch,
    GiveBackTicket,
    PublishModel,
    RenewLease,
    RenewTicket,
    StartSession,
    Subscribe,
    TakeTickets,
    Unsubscribe,
    UpdateBuffer,
)
from breadbox_server.core.model.validation import check_buffer_name, check_int
from breadbox_server.core.rules.parts import MemberSeen
from breadbox_server.driver import Driver
from breadbox_server.gateway.transfers import Gateway, Incoming, Message, first_message
from breadbox_server.limits import (
    CLAIM_MEMBERS_MAX,
    EPISODES_MAX,
    GATEWAY_PAYLOADS_MAX,
    MEMBERS_PAGE_MAX,
    PAGE_SIZE,
    PAGE_SIZE_MAX,
    REPORT_WORKERS_MAX,
    SHARED_REPLY_BYTES_MAX,
)
from breadbox_server.metrics.episodes import by_key
from breadbox_server.metrics.metrics import Metrics
from breadbox_server.reading.session_users import User
from breadbox_server.reading.step_ends import check_reports
from breadbox_server.settings import Settings

pb = replay_buffer_service_pb2
Context = grpc.aio.ServicerContext[Any, Any]

WAIT_S_MAX: Final = 300.0
"""Longest wait of a fetch or a watch; callers that want to wait longer ask again."""
REFUSAL_LENGTH_MAX: Final = 256
REPLY_MARGIN_S: Final = 0.25
"""Kept free before a call's deadline, so that "elapsed" still reaches the caller."""


class ReplayBufferService(replay_buffer_service_pb2_grpc.ReplayBufferServiceServicer):
    """All methods, on one driver.

    `settings`: what clients learn of the store, and limits of new buffers. `journal_epoch` gives 0
    without a journal. `concerns`: settings under which data may be lost.
    """

    def __init__(
        self,
        driver: Driver,
        *,
        metrics: Metrics,
        settings: Settings,
        journal_epoch: Callable[[], int] = int,
        concerns: Sequence[str] = (),
        gateway: Gateway | None = None,
    ) -> None:
        self._gateway = gateway
        self._driver = driver
        self._metrics = metrics
        self._settings = settings
        self._default_config = settings.default_config
        self._inline_sizes = {role: settings.inline_size_told(role) for role in Role}
        self._journal_epoch = journal_epoch
        self._concerns = concerns

    async def StartSession(
        self, request: pb.StartSessionRequest, context: Context
    ) -> pb.StartSessionResponse:
        """Make a session current."""
        version = ModelVersion(request.model_version) if request.HasField("model_version") else None
        state = await self._driver.start_session(
            StartSession(
                convert.buffer_name(request.buffer),
                SessionId(convert.as_one_object(request.session_id)),
                version,
            ),
            User(Role.LEARNER, current_process(context.peer()), caller_name() or ""),
            take_over=request.take_over,
        )
        return pb.StartSessionResponse(
            session_id=state.session_id, model_version=state.model_version
        )

    async def EndSession(
        self, request: pb.EndSessionRequest, context: Context
    ) -> pb.EndSessionResponse:
        """End a session."""
        await self._driver.core.call(
            EndSession(convert.buffer_name(request.buffer), SessionId(request.session_id))
        )
        return pb.EndSessionResponse()

    async def PublishModel(
        self, request: pb.PublishModelRequest, context: Context
    ) -> pb.PublishModelResponse:
        """Move the model version forward."""
        if not request.HasField("model_version"):
            raise InvalidArgumentError("model_version", "must be given")
        weights = None
        if request.HasField("weights"):
            weights = convert.weights(request.weights)
        published = await self._driver.appends.publish(
            PublishModel(
                convert.buffer_name(request.buffer),
                SessionId(request.session_id),
                ModelVersion(request.model_version),
                weights,
            ),
            current_caller(),
        )
        if self._gateway is not None and weights is not None and published.weights_taken:
            self._gateway.unannounced.forget(weights.payload_id)
        return pb.PublishModelResponse(
            model_version=published.model_version, evicted_chunk_count=published.evicted_chunk_count
        )

    async def WatchModel(
        self, request: pb.WatchModelRequest, context: Context
    ) -> pb.WatchModelResponse:
        """Wait for a session, version or weights that the caller does not know."""
        # Looked up first, so that it is durable once the watch has returned.
        has_ended = self._driver.core.buffers.has_ended(
            convert.buffer_name(request.buffer), SessionId(request.known_session_id)
        )
        changed, state = await self._driver.reading.watch(
            convert.buffer_name(request.buffer),
            session_id=SessionId(request.known_session_id),
            model_version=(
                ModelVersion(request.known_model_version)
                if request.HasField("known_model_version")
                else None
            ),
            lacks_weights=request.HasField("known_weights") and not request.known_weights,
            wait_s=_wait_s(request, context),
            caller=current_caller(),
        )
        return pb.WatchModelResponse(
            known_session_ended=has_ended,
            changed=changed,
            session_id=state.session_id,
            model_version=state.model_version,
            weights=None if state.weights is None else convert.to_payload(state.weights),
        )

    async def GroupEnds(
        self, request: pb.GroupEndsRequest, context: Context
    ) -> pb.GroupEndsResponse:
        """Wait for groups to end."""
        check_int("after_number", request.after_number, 0, 2**62)
        ends = await self._driver.reading.group_ends(
            convert.buffer_name(request.buffer),
            request.after_number,
            wait_s=_wait_s(request, context),
            caller=current_caller(),
        )
        return pb.GroupEndsResponse(ends=map(convert.GROUP_END.message, ends))

    async def TakeTickets(
        self, request: pb.TakeTicketsRequest, context: Context
    ) -> pb.TakeTicketsResponse:
        """Wait for tickets."""
        buffer, lease_s = convert.buffer_name(request.buffer), convert.lease_s(request)
        if lease_s is None:
            raise InvalidArgumentError("lease_duration", "must be given")
        caller = current_caller()
        outcome = await self._driver.take_tickets(
            TakeTickets(
                buffer,
                request_id=RequestId(request.request_id),
                ticket_count=request.ticket_count,
                deadline_at=self._driver.core.clock.now() + _wait_s(request, context),
                lease_s=lease_s,
                holder=caller.holder(buffer),
            ),
            caller,
        )
        if not isinstance(outcome, TicketsTaken):
            return pb.TakeTicketsResponse(waiting_reason=outcome.reason)
        return pb.TakeTicketsResponse(
            groups=outcome.groups,
            remaining_duration=self._remaining(outcome.expires_at),
            session_id=outcome.session_id,
            model_version=outcome.model_version,
            staleness_max=outcome.staleness_max,
        )

    async def RenewTicket(
        self, request: pb.RenewTicketRequest, context: Context
    ) -> pb.RenewTicketResponse:
        """Let a ticket live on."""
        core, buffer = self._driver.core, convert.buffer_name(request.buffer)
        command = RenewTicket(buffer, WorkerId(request.group), convert.lease_s(request))
        expires_at, state = await core.carry_out(
            lambda: (core.apply_now(command), core.buffers[buffer].model)
        )
        return pb.RenewTicketResponse(
            remaining_duration=self._remaining(expires_at),
            session_id=state.session_id,
            model_version=state.model_version,
        )

    async def GiveBackTicket(
        self, request: pb.GiveBackTicketRequest, context: Context
    ) -> pb.GiveBackTicketResponse:
        """End a ticket with its group, or note that a member will not come."""
        member = request.member if request.HasField("member") else None
        await self._driver.core.call(
            GiveBackTicket(convert.buffer_name(request.buffer), WorkerId(request.group), member)
        )
        return pb.GiveBackTicketResponse()

    async def Members(self, request: pb.MembersRequest, context: Context) -> pb.MembersResponse:
        """Show a page of the members of open groups that the caller's token is for."""
        core, buffer = self._driver.core, convert.buffer_name(request.buffer)
        check_int("keys", len(request.keys), 0, MEMBERS_PAGE_MAX)
        keys = convert.member_keys(request.keys) if request.keys else []
        # Before all: members are numbered from 0.
        after = (request.after.group, request.after.member if request.HasField("after") else -1)

        def look() -> list[MemberSeen]:
            held = core.buffers[buffer]
            if keys:
                return held.members_by_key(keys)
            return held.members(request.prefix, after, MEMBERS_PAGE_MAX)

        found = await core.look(look)
        await self._driver.turns.settled()
        response, caller = pb.MembersResponse(), current_caller()
        for each in found:
            if caller.may_append_as(each.group):
                convert.MEMBER.put(each, response.members.add())
        if len(found) == MEMBERS_PAGE_MAX and not keys:
            response.next_after.group, response.next_after.member = found[-1][:2]
        return response

    async def ReadMembers(
        self, request: pb.ReadMembersRequest, context: Context
    ) -> pb.ReadMembersResponse:
        """Return the parts of members, by their keys."""
        caller, names = current_caller(), request.parts
        check_int("parts", len(names), 0, MEMBER_PARTS_MAX)
        found, reply, lease = await self._driver.reading.read_members(
            convert.buffer_name(request.buffer),
            convert.member_keys(request.keys),
            frozenset(names),
            lease_s=convert.lease_s(request),
            inline_bytes_max=self._inline_bytes_max(request.inline_bytes_max),
            is_look=caller.role is Role.VIEWER,
            caller=caller,
        )
        response = pb.ReadMembersResponse(
            part_counts=found.counts, payloads=reply.bodies if any(reply.bodies) else ()
        )
        for each in found.fragments:
            convert.METADATA.put(each, response.parts.add())
        if lease is not None:
            response.lease.CopyFrom(self._lease(lease.lease_id, lease.expires_at))
        return response

    async def ClaimMembers(
        self, request: pb.ClaimMembersRequest, context: Context
    ) -> pb.ClaimMembersResponse:
        """Wait for members that lack a part."""
        check_int("member_count", request.member_count, 1, CLAIM_MEMBERS_MAX)
        found = await self._driver.reading.claims.claim(
            convert.buffer_name(request.buffer),
            request.lacking,
            request.member_count,
            wait_s=_wait_s(request, context),
            lease_s=convert.lease_s(request),
            inline_bytes_max=self._inline_bytes_max(request.inline_bytes_max),
            caller=current_caller(),
        )
        if isinstance(found, str):
            return pb.ClaimMembersResponse(waiting_reason=found)
        response = pb.ClaimMembersResponse()
        grant = response.grant
        grant.lease.CopyFrom(self._lease(found.lease.lease_id, found.lease.expires_at))
        grant.session_id = found.model.session_id
        grant.model_version = found.model.model_version or 0
        grant.payloads.extend(found.bodies if any(found.bodies) else ())
        convert.add_references(found.fragments, grant.fragments)
        return response

    async def DropMembers(
        self, request: pb.DropMembersRequest, context: Context
    ) -> pb.DropMembersResponse:
        """Drop rows by their keys."""
        keys = convert.member_keys(request.keys)
        groups, members = zip(*keys, strict=True)
        count = await self._driver.core.call(
            DropMembers(convert.buffer_name(request.buffer), groups, members)
        )
        return pb.DropMembersResponse(dropped_count=count)

    async def AppendFragments(
        self, request: pb.AppendFragmentsRequest, context: Context
    ) -> pb.AppendFragmentsResponse:
        """Admit fragments, one result each."""
        began_at = perf_counter()
        appends = self._driver.appends
        buffer = convert.buffer_name(request.buffer)
        bodies = list(request.payloads)
        await appends.queue.may_read(len(request.fragments), sum(map(len, bodies)))
        fragments = convert.fragments(request.fragments, bodies)
        schemas = convert.schemas(request.schemas) if request.schemas else {}
        wait_s = _wait_s(request, context)
        caller = current_caller()
        results, state = await appends.append(
            buffer, fragments, caller, schemas, bodies, wait_s=wait_s
        )
        if self._gateway is not None:
            for fragment, result in zip(fragments, results, strict=True):
                if result is not None and result.outcome is AdmissionOutcome.ADMITTED:
                    self._gateway.unannounced.forget(fragment.payload.payload_id)
        retry_delay = None
        if any(result is not None and result.outcome.asks_to_wait for result in results):
            delay_s = self._driver.core.buffers[buffer].config.retry_delay_s
            # A producer that has waited here need not do so again.
            waited_s = min(perf_counter() - began_at, wait_s)
            retry_delay = convert.to_duration(max(0.0, delay_s - waited_s))
        response = pb.AppendFragmentsResponse(
            session_id=state.session_id,
            model_version=state.model_version,
            retry_delay=retry_delay,
        )
        convert.add_append_results(results, response.results)
        return response

    async def FetchFragments(
        self, request: pb.FetchFragmentsRequest, context: Context
    ) -> pb.FetchFragmentsResponse:
        """Wait for fragments."""
        inline_bytes_max = self._inline_bytes_max(request.inline_bytes_max)
        outcome = await self._driver.fetch(
            Fetch(
                buffer=convert.buffer_name(request.buffer),
                request_id=RequestId(request.request_id),
                fragment_count=request.fragment_count,
                deadline_at=self._driver.core.clock.now() + _wait_s(request, context),
                rank=request.rank,
                world_size=request.world_size or 1,
                lease_s=convert.lease_s(request),
            )
        )
        if not isinstance(outcome, FetchGranted):
            return pb.FetchFragmentsResponse(
                wait_elapsed=pb.FetchWaitElapsed(waiting_reason=outcome.reason)
            )
        try:
            bodies = await self._driver.bodies.read(outcome.fragments, inline_bytes_max)
        except asyncio.CancelledError:
            self._driver.core.take_back(outcome)
            raise
        response = pb.FetchFragmentsResponse()
        # In place: what is handed to a constructor is copied, payloads and all.
        grant = response.grant
        grant.lease.CopyFrom(self._lease(outcome.lease_id, outcome.expires_at))
        grant.session_id = outcome.session_id
        grant.model_version = outcome.model_version
        grant.payloads.extend(bodies)
        convert.add_references(outcome.fragments, grant.fragments)
        for step_counts in outcome.step_counts:
            grant.share_fragment_counts.append(len(step_counts))
            grant.step_counts.extend(step_counts)
        return response

    async def GetPreparedFragments(
        self, request: pb.GetPreparedFragmentsRequest, context: Context
    ) -> pb.GetPreparedFragmentsResponse:
        """List all shares of a granted request."""
        buffer, core = convert.buffer_name(request.buffer), self._driver.core
        granted = await core.look(
            lambda: core.buffers[buffer].prepared(RequestId(request.request_id))
        )
        await self._driver.turns.settled()
        response = pb.GetPreparedFragmentsResponse()
        convert.add_references(granted, response.fragments)
        return response

    async def ReadFragments(self, request: pb.ReadFragmentsRequest, context: Context) -> bytes:
        """Return the chunks after a cursor; the response is encoded once for equal readers."""
        inline_bytes_max = self._inline_bytes_max(request.inline_bytes_max)
        found, reply, lease = await self._driver.reading.read(
            convert.buffer_name(request.buffer),
            convert.read_spec(request),
            wait_s=_wait_s(request, context),
            lease_s=convert.lease_s(request),
            inline_bytes_max=inline_bytes_max,
            is_look=request.is_look or current_caller().role is Role.VIEWER,
            caller=current_caller(),
        )
        encoded = reply.encoded
        if not encoded:
            response = pb.ReadFragmentsResponse(
                cursor=found.cursor,
                skipped_chunk_count=found.skipped_count,
                session_id=found.model.session_id,
                model_version=found.model.model_version,
                payloads=reply.bodies if any(reply.bodies) else (),
            )
            convert.add_references(found.fragments, response.fragments)
            encoded = response.SerializeToString()
            if len(encoded) <= SHARED_REPLY_BYTES_MAX:
                reply.encoded = encoded
        if lease is None:
            return encoded
        # Encoded messages that stand one after the other are one message with the fields of both.
        rest = pb.ReadFragmentsResponse(lease=self._lease(lease.lease_id, lease.expires_at))
        return encoded + rest.SerializeToString()

    def _inline_bytes_max(self, asked: int) -> int:
        """Return how many bytes may be inline in the reply, 0 where the caller reads the store."""
        check_int("inline_bytes_max", asked, 0, 2**63 - 1)
        return asked if self._inline_sizes[current_caller().role] > 0 else 0

    async def CreateSubscription(
        self, request: pb.CreateSubscriptionRequest, context: Context
    ) -> pb.CreateSubscriptionResponse:
        """Make a named cursor."""
        buffer, name = convert.buffer_name(request.buffer), SubscriptionName(request.name)
        after = request.after_chunk_id if request.HasField("after_chunk_id") else None
        await self._driver.core.call(Subscribe(buffer, name, request.retaining, after))
        found = await self._driver.core.look(partial(self._driver.reading.subscriptions, buffer))
        created = [convert.to_subscription(*each) for each in found if each[0].name == name]
        return pb.CreateSubscriptionResponse(subscription=created[0] if created else None)

    async def AcknowledgeChunks(
        self, request: pb.AcknowledgeChunksRequest, context: Context
    ) -> pb.AcknowledgeChunksResponse:
        """Move a named cursor forward."""
        await self._driver.core.call(
            Acknowledge(
                convert.buffer_name(request.buffer),
                SubscriptionName(request.subscription),
                request.chunk_id,
            )
        )
        return pb.AcknowledgeChunksResponse()

    async def DeleteSubscription(
        self, request: pb.DeleteSubscriptionRequest, context: Context
    ) -> pb.DeleteSubscriptionResponse:
        """Delete a named cursor."""
        buffer, name = convert.buffer_name(request.buffer), SubscriptionName(request.name)
        await self._driver.core.call(Unsubscribe(buffer, name))
        self._metrics.forget_subscription(buffer, name)
        return pb.DeleteSubscriptionResponse()

    async def RenewLease(
        self, request: pb.RenewLeaseRequest, context: Context
    ) -> pb.RenewLeaseResponse:
        """Let a lease live on."""
        buffer, lease_id = convert.buffer_name(request.buffer), LeaseId(request.lease_id)
        self._check_lease(buffer, lease_id)
        expires_at = await self._driver.renew(
            RenewLease(buffer, lease_id, convert.lease_s(request))
        )
        return pb.RenewLeaseResponse(lease=self._lease(lease_id, expires_at))

    async def ReleaseLease(
        self, request: pb.ReleaseLeaseRequest, context: Context
    ) -> pb.ReleaseLeaseResponse:
        """End a lease; a viewer or producer ends those of its own reads, and finds no others."""
        commands = convert.releases(request)
        for command in commands:
            self._check_lease(command.buffer, command.lease_id)
        await self._driver.release(commands, convert.unreadable(request.unreadable_payload_ids))
        return pb.ReleaseLeaseResponse(ended_count=len(commands))

    def _check_lease(self, buffer: BufferName, lease_id: LeaseId) -> None:
        """Raise LeaseNotFoundError if a viewer, or producer, names no lease of its own reads."""
        caller = current_caller()
        if caller.role in (Role.VIEWER, Role.PRODUCER) and not self._driver.reading.leases.knows(
            buffer, lease_id, caller.holder(buffer)
        ):
            raise LeaseNotFoundError(lease_id)

    async def UpdatePriorities(
        self, request: pb.UpdatePrioritiesRequest, context: Context
    ) -> pb.UpdatePrioritiesResponse:
        """Set priorities of chunks, and evict others."""
        done = await self._driver.core.call(convert.priorities(request))
        return pb.UpdatePrioritiesResponse(**done._asdict())

    async def CreateBuffer(
        self, request: pb.CreateBufferRequest, context: Context
    ) -> pb.CreateBufferResponse:
        """Make a buffer."""
        name = BufferName(request.name)
        await self._driver.create_buffer(
            CreateBuffer(name, convert.config(request.config, self._default_config)),
            current_caller(),
        )
        return pb.CreateBufferResponse(buffer=self._buffer(name))

    async def UpdateBuffer(
        self, request: pb.UpdateBufferRequest, context: Context
    ) -> pb.UpdateBufferResponse:
        """Change the limits of a buffer."""
        name, core = convert.buffer_name(request.name), self._driver.core
        current = await core.look(lambda: core.buffers[name].config)
        wanted = convert.updated_config(request, current, self._default_config)
        await core.call(UpdateBuffer(name, wanted))
        return pb.UpdateBufferResponse(buffer=self._buffer(name))

    async def DeleteBuffer(
        self, request: pb.DeleteBufferRequest, context: Context
    ) -> pb.DeleteBufferResponse:
        """Delete a buffer with everything in it; there is no default for the name."""
        await self._driver.delete_buffer(DeleteBuffer(BufferName(request.name)))
        return pb.DeleteBufferResponse()

    async def ListBuffers(
        self, request: pb.ListBuffersRequest, context: Context
    ) -> pb.ListBuffersResponse:
        """Show a page of the buffers that the caller may use."""
        check_int("page_size", request.page_size, 0, 2**31 - 1)
        if request.page_token:
            check_buffer_name("page_token", request.page_token)
        size = min(request.page_size or PAGE_SIZE, PAGE_SIZE_MAX)
        caller = current_caller()
        listed = self._driver.listed()
        # The token is the last name of the page before: what comes and goes meanwhile moves nobody.
        names = [name for name in listed if name > request.page_token and caller.may_use(name)]
        buffers = [
            to_buffer(listed[name] or self._driver.core.describe(name)) for name in names[:size]
        ]
        await self._driver.turns.settled_or_away()
        self._tell_problems(buffers, context)
        return pb.ListBuffersResponse(
            buffers=buffers, next_page_token=names[size - 1] if len(names) > size else ""
        )

    async def GetBuffer(
        self, request: pb.GetBufferRequest, context: Context
    ) -> pb.GetBufferResponse:
        """Show one buffer."""
        async with self._driver.core.durable_refusals():
            seen = self._driver.core.describe(convert.buffer_name(request.name))
            buffer = to_buffer(seen)
            buffer.schemas.extend(map(convert.to_schema, seen.schemas))
            buffer.state.tagged_groups.extend(self._driver.tagged_groups.messages(seen.name))
            buffer.subscriptions.extend(
                [
                    convert.to_subscription(*each)
                    for each in self._driver.reading.subscriptions(seen.name)
                ]
            )
            if request.HasField("chunk_events_after"):
                now = self._driver.core.clock.now()
                for event in self._driver.chunk_events.after(seen.name, request.chunk_events_after):
                    buffer.chunk_events.add(
                        number=event.number,
                        kind=event.kind,
                        age_duration=convert.to_duration(now - event.at),
                        chunk_ids=event.chunk_ids,
                        values=event.values,
                    )
            if request.with_workers:
                now = self._driver.core.clock.now()
                buffer.workers.extend(self._driver.step_ends.messages(seen.name, now))
        await self._driver.turns.settled_or_away()
        self._tell_problems([buffer], context)
        return pb.GetBufferResponse(buffer=buffer)

    async def GetStoreConfig(
        self, request: pb.GetStoreConfigRequest, context: Context
    ) -> pb.GetStoreConfigResponse:
        """Return the payload store's URL and settings; take note of a write that it refused."""
        settings, role = self._settings, current_caller().role
        if request.write_refusal and role is not Role.VIEWER:
            text = request.write_refusal[:REFUSAL_LENGTH_MAX]
            self._driver.store_watch.refused(text if text.isprintable() else repr(text))
        server_time = Timestamp()
        server_time.FromNanoseconds(time.time_ns())
        return pb.GetStoreConfigResponse(
            store_url=settings.store_told(role),
            unannounced_duration=convert.to_duration(settings.unannounced_s),
            piece_size_bytes=settings.piece_size_bytes,
            inline_size_bytes_max=self._inline_sizes[role],
            server_version=__version__,
            server_time=server_time,
            journal_epoch=self._journal_epoch(),
            store_concerns=self._concerns,
            payload_size_bytes_max=self._driver.store_watch.usage.limit_bytes,
        )

    async def ReportEpisodes(
        self, request: pb.ReportEpisodesRequest, context: Context
    ) -> pb.ReportEpisodesResponse:
        """Count episodes, and keep workers' reports; all, or, if one is malformed, nothing."""
        buffer, driver = convert.buffer_name(request.buffer), self._driver
        await driver.core.look(lambda: driver.core.buffers[buffer])  # Refused if there is none.
        count = len(request.episodes) + len(request.workers)
        check_int("workers", len(request.workers), 0, REPORT_WORKERS_MAX)
        check_int("episodes", len(request.episodes), 0 if request.workers else 1, EPISODES_MAX)
        check_reports(request.workers)
        episodes, caller = by_key(request.episodes), current_caller()
        driver.appends.quotas.charge_report(caller, count)
        self._metrics.count_report(caller.name, episodes)
        driver.step_ends.report(buffer, request.workers, driver.core.clock.now())
        return pb.ReportEpisodesResponse()

    async def WritePayloads(self, requests: AsyncIterator[Message], context: Context) -> None:
        """Write payloads on behalf of the caller; answers by way of the context."""
        gateway = self._open_gateway()

        async def report() -> None:
            await context.write(pb.WritePayloadsResponse())

        first = await first_message(requests)
        try:
            incoming = Incoming(first, requests)
            references = await gateway.write(
                current_caller(), context.peer(), first.size_bytes, incoming, report
            )
        except StoreFullError as error:
            self._driver.store_watch.refused(error.what)
            raise
        await context.write(pb.WritePayloadsResponse(payloads=map(convert.to_payload, references)))

    async def ReadPayloads(self, request: pb.ReadPayloadsRequest, context: Context) -> None:
        """Read payloads on behalf of the caller; answers by way of the context."""

        async def send(part: memoryview) -> None:
            await context.write(pack([part]))

        await self._open_gateway().read(
            current_caller(), context.peer(), convert.ranges(request.ranges), send
        )

    async def DiscardPayloads(
        self, request: pb.DiscardPayloadsRequest, context: Context
    ) -> pb.DiscardPayloadsResponse:
        """Delete payloads that the caller wrote and will not announce."""
        check_int("payload_ids", len(request.payload_ids), 0, GATEWAY_PAYLOADS_MAX)
        gateway = self._open_gateway()
        self._driver.deletions.put(gateway.discard(current_caller(), request.payload_ids))
        return pb.DiscardPayloadsResponse()

    def _open_gateway(self) -> Gateway:
        if self._gateway is None:
            raise GatewayOffError
        self._driver.core.check_serving()
        return self._gateway

    def _buffer(self, name: BufferName) -> buffer_pb2.Buffer:
        return to_buffer(self._driver.core.describe(name))

    def _tell_problems(self, buffers: Sequence[buffer_pb2.Buffer], context: Context) -> None:
        outage, process = self._driver.outage(), current_process(context.peer())
        for buffer in buffers:
            name, users = BufferName(buffer.name), self._driver.session_users
            is_held = bool(buffer.state.waiter_count or buffer.state.lease_count)
            idle_s = 0.0 if is_held else self._driver.uses.idle_s(name)
            buffer.state.idle_duration.CopyFrom(convert.to_duration(idle_s))
            buffer.state.outage = "" if outage is None else str(outage)
            buffer.state.session_users = users.others(name, SessionId(buffer.session_id), process)
            buffer.state.hold = self._driver.appends.hold() or self._driver.store_watch.hold()

    def _lease(self, lease_id: LeaseId, expires_at: float) -> pb.Lease:
        return pb.Lease(lease_id=lease_id, remaining_duration=self._remaining(expires_at))

    def _remaining(self, expires_at: float) -> Duration:
        return convert.to_duration(self._driver.core.remaining_s(expires_at))


def to_buffer(seen: BufferDescription) -> buffer_pb2.Buffer:
    """One buffer as it is now."""
    buffer = buffer_pb2.Buffer(
        name=seen.name,
        config=convert.to_config(seen.config),
        session_id=seen.model.session_id,
        model_version=seen.model.model_version,
    )
    convert.STATE.put(seen, buffer.state)
    return buffer


def _wait_s(request: convert.WaitingRequest, context: Context) -> float:
    wait_s = convert.wait_s(request, WAIT_S_MAX)
    remaining_s = context.time_remaining()
    if remaining_s is None:
        return wait_s
    return min(wait_s, max(0.0, remaining_s - REPLY_MARGIN_S))
