"""A real server object on a free port of the loopback, with a fake store and raw stubs."""

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from breadbox.model.types import PayloadReference
from breadbox.stores.base import PayloadParts
from breadbox.v1 import fragment_pb2, replay_buffer_service_pb2_grpc
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox_server.app import RunningServer, serving
from breadbox_server.core.model.config import BufferConfig
from breadbox_server.settings import Settings
from support.fake_custodian import FakeCustodian
from support.manual_timers import ManualTimers

CALL_S = 20.0


@dataclass
class Served:
    """The server, a stub that talks to it, and the levers a test pulls."""

    server: RunningServer
    stub: Any
    channel: grpc.aio.Channel
    custodian: FakeCustodian
    clock: ManualTimers

    def metadata(
        self,
        index: int,
        *,
        worker_id: str = "w0",
        session_id: str = "run",
        version: int = 0,
        payload: PayloadReference | None = None,
        **fields: Any,
    ) -> fragment_pb2.FragmentMetadata:
        """One fragment, its payload written unless one is given."""
        payload = payload or self.custodian.write()
        return fragment_pb2.FragmentMetadata(
            **{
                "worker_id": worker_id,
                "fragment_index": index,
                "session_id": session_id,
                "model_version_min": version,
                "model_version_max": version,
                "step_count": 8,
                "payload": fragment_pb2.PayloadReference(
                    payload_id=payload.payload_id, size_bytes=payload.size_bytes
                ),
                **fields,
            }
        )

    async def start(self, session_id: str = "run", **fields: Any) -> None:
        await self.stub.StartSession(
            pb.StartSessionRequest(session_id=session_id, **fields), timeout=CALL_S
        )

    async def append(
        self, *fragments: fragment_pb2.FragmentMetadata, **fields: Any
    ) -> pb.AppendFragmentsResponse:
        return await self.stub.AppendFragments(
            pb.AppendFragmentsRequest(fragments=fragments, **fields), timeout=CALL_S
        )

    def riding(self, index: int, **fields: Any) -> fragment_pb2.FragmentMetadata:
        """One fragment whose payload rides along."""
        metadata = self.metadata(index, payload=PayloadReference("", 0), **fields)
        metadata.ClearField("payload")
        return metadata

    async def fill(self, count: int, *, worker_id: str = "w0", first: int = 0) -> None:
        """Append `count` fragments of one worker and see them admitted."""
        reply = await self.append(
            *(self.metadata(index, worker_id=worker_id) for index in range(first, first + count))
        )
        assert [fragment_pb2.ADMISSION_OUTCOME_ADMITTED] * count == [
            result.outcome for result in reply.results
        ]

    def fetch(self, count: int, *, request_id: str = "r", wait_s: float = 0, **fields: Any) -> Any:
        """Start a fetch; await the returned call."""
        return self.stub.FetchFragments(
            pb.FetchFragmentsRequest(
                request_id=request_id, fragment_count=count, max_wait=span(wait_s), **fields
            ),
            timeout=CALL_S,
        )

    async def make_room(self, count: int = 1, request_id: str = "r") -> list[str]:
        """Use up chunks: their places are free, and their bytes too. Return their workers."""
        reply = await self.fetch(count, request_id=request_id)
        release = pb.ReleaseLeaseRequest(
            lease_id=reply.grant.lease.lease_id, mode=pb.RELEASE_MODE_CONSUMED
        )
        await self.stub.ReleaseLease(release, timeout=CALL_S)
        return [each.metadata.worker_id for each in reply.grant.fragments]

    async def buffer(self, name: str = "default") -> Any:
        reply = await self.stub.GetBuffer(pb.GetBufferRequest(name=name), timeout=CALL_S)
        return reply.buffer


def span(span_s: float) -> Duration:
    """A duration on the wire."""
    duration = Duration()
    duration.FromNanoseconds(round(span_s * 1e9))
    return duration


class _Chosen(Settings):
    """Settings with limits that no option of the command line sets."""

    config: BufferConfig

    @property
    def default_config(self) -> BufferConfig:
        return self.config


@asynccontextmanager
async def served(
    config: BufferConfig | None = None,
    *,
    custodian: FakeCustodian | None = None,
    parts: PayloadParts | None = None,
    clock: ManualTimers | None = None,
    **settings: Any,
) -> AsyncIterator[Served]:
    """Serve inside the block; time stands still unless the test moves it."""
    custodian = custodian or FakeCustodian()
    clock = clock or ManualTimers()
    tls = settings.pop("tls", None)
    if tls is not None:
        settings["tls_cert"], settings["tls_key"] = tls.cert_file, tls.key_file
        settings["tls_client_ca"] = tls.client_ca_file
    chosen = _Chosen(
        store="redis://:secret@fake.invalid:6379/0",
        config=config or BufferConfig(),
        shares_store_password=True,
        seed=7,
        **{"listen": "127.0.0.1:0", "journal": "none", "drain_grace_s": 2.0, **settings},
    )
    async with (
        serving(chosen, custodian=custodian, parts=parts, clock=clock) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        stub = replay_buffer_service_pb2_grpc.ReplayBufferServiceStub(channel)
        yield Served(server, stub, channel, custodian, clock)


CLIENT_STREAMS = {"WritePayloads"}


def empty_request(method: str) -> Any:
    """A request of a method without anything in it, as its stub takes it."""
    request = getattr(pb, f"{method}Request")()
    return [request] if method in CLIENT_STREAMS else request


def reason_of(error: grpc.RpcError) -> str:
    """The reason on the wire."""
    return info_of(error).reason


def info_of(error: grpc.RpcError) -> error_details_pb2.ErrorInfo:
    """The machine-readable part of an error."""
    return info_in(status_of(error))


def info_in(status: status_pb2.Status) -> error_details_pb2.ErrorInfo:
    """The machine-readable part of a status."""
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            return info
    raise AssertionError(f"no ErrorInfo in {status}")


async def code_of(call: Any) -> grpc.StatusCode:
    """How a call ends, whatever messages its answer has."""
    if hasattr(call, "read"):
        with contextlib.suppress(grpc.RpcError):
            async for _ in call:
                pass
    return await call.code()


def status_of(error: grpc.RpcError) -> status_pb2.Status:
    """The rich status of an error."""
    status = rpc_status.from_call(error)
    assert status is not None, f"no rich status in {error}"
    return status
