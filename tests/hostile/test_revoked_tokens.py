"""Whoever lost a token, on a real server: nothing of it outlives the line that is taken out."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox.v1 import replay_buffer_service_pb2_grpc
from breadbox_server.access.authorization import Role
from hostile.harness import attacked_server
from support.eventually import eventually_sync
from support.load import CALL_S, SESSION
from support.served import reason_of, span
from support.token_files import write_token_file

pytestmark = pytest.mark.integration

WAIT_S = 300.0
"""What a caller may wait for at most; far beyond how long a test takes."""


class Revocable:
    """A server, its token file, and a caller for each role."""

    def __init__(self, address: str, path: Path, tokens: dict[Role, str]) -> None:
        self.path = path
        self.tokens = tokens
        self.channel = grpc.insecure_channel(address)
        self.stub = replay_buffer_service_pb2_grpc.ReplayBufferServiceStub(self.channel)

    def headers(self, role: Role) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.tokens[role]}"),)

    def is_let_in(self, role: Role) -> bool:
        call = self.stub.GetBuffer.future(
            pb.GetBufferRequest(), metadata=self.headers(role), timeout=CALL_S
        )
        code = call.code()
        assert code in (grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED)
        return bool(code is grpc.StatusCode.OK)

    def take_out(self, role: Role) -> None:
        self._change(line for line in self.path.read_text().splitlines() if role.value not in line)

    def bind(self, role: Role, bound: str) -> None:
        self._change(
            f"{line} {bound}" if role.value in line else line
            for line in self.path.read_text().splitlines()
        )

    def _change(self, lines: Iterable[str]) -> None:
        half = self.path.with_suffix(".half")
        half.write_text("\n".join(lines) + "\n")
        half.replace(self.path)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Revocable]:
    path = tmp_path / "tokens"
    tokens = write_token_file(path)
    with attacked_server(
        *("--store", f"file://{tmp_path}/store", "--tokens", str(path)), log=tmp_path / "log"
    ) as server:
        made = Revocable(server.address, path, tokens)
        with made.channel:
            made.stub.StartSession(
                pb.StartSessionRequest(session_id=SESSION),
                metadata=made.headers(Role.LEARNER),
                timeout=CALL_S,
            )
            yield made


def fetch(world: Revocable, role: Role) -> "grpc.Future[Any]":
    return world.stub.FetchFragments.future(
        pb.FetchFragmentsRequest(request_id=role.value, fragment_count=1, max_wait=span(WAIT_S)),
        metadata=world.headers(role),
        timeout=WAIT_S,
    )


def watch(world: Revocable, role: Role) -> "grpc.Future[Any]":
    return world.stub.WatchModel.future(
        pb.WatchModelRequest(
            known_session_id=SESSION, known_model_version=0, max_wait=span(WAIT_S)
        ),
        metadata=world.headers(role),
        timeout=WAIT_S,
    )


@pytest.mark.parametrize("call", [fetch, watch])
def test_a_call_that_waits_ends_when_its_token_is_taken_out(
    world: Revocable, call: Callable[[Revocable, Role], "grpc.Future[Any]"]
) -> None:
    revoked, kept = call(world, Role.LEARNER), call(world, Role.ADMIN)
    assert world.is_let_in(Role.LEARNER)
    world.take_out(Role.LEARNER)
    # Blocks; were it not ended, the timeout would be another error.
    error = revoked.exception(timeout=CALL_S)

    assert isinstance(error, grpc.RpcError)
    assert "UNAUTHENTICATED" == reason_of(error)
    assert not world.is_let_in(Role.LEARNER)
    assert not kept.done()
    kept.cancel()


@pytest.mark.parametrize("call", [fetch, watch])
def test_a_call_that_waits_ends_when_its_buffer_is_not_its_tokens_any_more(
    world: Revocable, call: Callable[[Revocable, Role], "grpc.Future[Any]"]
) -> None:
    narrowed, kept = call(world, Role.LEARNER), call(world, Role.ADMIN)
    assert world.is_let_in(Role.LEARNER)
    world.bind(Role.ADMIN, "buffers=default")
    world.bind(Role.LEARNER, "buffers=team-a-*")
    error = narrowed.exception(timeout=CALL_S)

    assert isinstance(error, grpc.RpcError)
    assert "PERMISSION_DENIED" == reason_of(error)
    assert not kept.done()
    kept.cancel()


def test_an_emptied_file_lets_nobody_in(world: Revocable) -> None:
    assert world.is_let_in(Role.ADMIN)
    world.path.write_text("")
    eventually_sync(
        lambda: not any(world.is_let_in(role) for role in Role), "all refused", within_s=CALL_S
    )
