"""Raw stubs that lie about parts: each lie is answered, and changes nothing but its own row."""

import json
import random
from typing import Any

import grpc
import pytest

from breadbox.v1 import fragment_pb2
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox_server.core.buffers import DEFAULT_BUFFER as B
from breadbox_server.core.model.config import AssemblyPolicy, BufferConfig
from support.served import CALL_S, Served, served

CALLS = 300
pytestmark = pytest.mark.timeout(120)
NUMBERS = (
    *("", "{}", "[]", "null", "7", "{", '{"a":1}', '{"a":true,"b":"x"}', '{"a":1,"a":2}'),
    *('{"a":NaN}', '{"a":-Infinity}', '{"a":1e999}', '{"a":{"b":1}}', '{"a":[1]}', '{"a":null}'),
    *('{"a":9223372036854775807}', '{"a":9223372036854775808}', '{"a":' + "9" * 5000 + "}"),
    *('{"":1}', '{"a":"\\ud800"}', '{"\\ud800":1}', '{"a":"\\u0000"}', "[" * 9000, " " * 20_000),
    json.dumps({f"n{place}": place for place in range(17)}),
    json.dumps({"x" * 65: 1}),
    json.dumps({"a": "x" * 65}),
)
NAMES = ("", "ids", "reward", "tokens", "x" * 64, "x" * 65, "a\n", "ü" * 32, "a/b", " ")
HUGE = (0, 1, 2, 2**31, 2**31 + 1, 2**62, 2**63 - 1, -1)


LIES: dict[str, tuple[Any, ...]] = {
    "worker_id": ("", "x/y", "x" * 257),
    "fragment_index": (3, 1023, 1024, 2**40, -1),
    "session_id": ("", "other"),
    "model_version_min": HUGE,
    "model_version_max": HUGE,
    "step_count": HUGE,
    "schema_hash": (0, 2**64 - 1),
    "priority": (0.0, -1.0, 1e31, float("nan")),
    "numbers": NUMBERS,
    "part": NAMES,
    "payload_id": ("", "x", "0" * 32, "used"),
    "size_bytes": (0, -1, 7, 2**50),
    "piece_size_bytes": (1, 2**41),
    "body": (b"", b"x"),
}


class Liar:
    """A client whose fragments are mostly right; every second one has a lie or two."""

    def __init__(self, it: Served, rng: random.Random) -> None:
        self.it, self.rng, self.used = it, rng, "0" * 32

    def request(self) -> pb.AppendFragmentsRequest:
        made = [self._fragment() for _ in range(self.rng.randrange(1, 4))]
        bodies = [body for _, body in made] if any(body for _, body in made) else []
        return pb.AppendFragmentsRequest(fragments=[each for each, _ in made], payloads=bodies)

    def _fragment(self) -> tuple[fragment_pb2.FragmentMetadata, bytes]:
        rng = self.rng
        fields: dict[str, Any] = {
            "worker_id": rng.choice("abcdefgh"),
            "fragment_index": rng.randrange(3),
            "session_id": "run",
            "step_count": 1,
            "schema_hash": rng.choice([1, 2]),
            "numbers": rng.choice(["", '{"a":1}', '{"a":2,"b":true}']),
            "part": rng.choice(["", "ids", "reward"]),
            "replaces": rng.random() < 0.2,
            "discontinuity": rng.random() < 0.2,
        }
        if not fields["part"]:
            fields["schema_hash"] = 0
        payload: dict[str, Any] = {}
        body = b""
        kind = rng.choice(["stored", "inline", "numbers"])
        if kind == "stored":
            written = self.it.custodian.write(rng.randrange(1, 50))
            payload = {"payload_id": written.payload_id, "size_bytes": written.size_bytes}
        elif kind == "inline":
            body = rng.randbytes(rng.randrange(1, 9))
        for name in rng.sample(sorted(LIES), rng.choice([0, 0, 1, 2])):
            value = rng.choice(LIES[name])
            if name == "body":
                body = value
            elif name in ("payload_id", "size_bytes", "piece_size_bytes"):
                payload[name] = self.used if value == "used" else value
            else:
                fields[name] = value
        made = fragment_pb2.FragmentMetadata(**fields)
        if payload:
            made.payload.CopyFrom(fragment_pb2.PayloadReference(**payload))
            self.used = payload.get("payload_id") or self.used
        return made, body


@pytest.mark.parametrize("size", [0, 3], ids=["rows", "groups"])
async def test_a_client_that_lies_about_parts_is_answered_and_harms_nothing(size: int) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)  # noqa: T201 - told when it fails
    rng = random.Random(seed)
    required = "tokens,reward" if size else ""
    config = BufferConfig(
        assembly=AssemblyPolicy.GROUPS, fragments_per_chunk=size, required_parts=required
    )
    told = set[grpc.StatusCode]()
    async with served(config) as it:
        await it.start()
        liar, buffers = Liar(it, rng), it.server.driver.core.buffers
        for _ in range(CALLS):
            try:
                await it.stub.AppendFragments(liar.request(), timeout=CALL_S)
            except grpc.aio.AioRpcError as error:
                told.add(error.code())
            buffers.check_invariants()
        listed = (await it.stub.Members(pb.MembersRequest(), timeout=CALL_S)).members
        read = await it.stub.ClaimMembers(
            pb.ClaimMembersRequest(lacking="score", member_count=99), timeout=CALL_S
        )
        referred = {
            each.payload.payload_id for each in buffers[B].fragments() if each.payload.size_bytes
        }
        assert referred <= it.custodian.kept
    assert {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION} >= told
    assert all(len(json.loads(each.numbers or "{}")) <= 16 for each in listed)
    assert {each.metadata.worker_id for each in read.grant.fragments} <= set("abcdefgh")
    assert listed
