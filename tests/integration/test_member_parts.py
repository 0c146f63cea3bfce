"""Groups whose members get parts later, from other producers, through a real server."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import breadbox
from breadbox.errors import (
    GroupEndedError,
    InvalidRequestError,
    PartConflictError,
    WaitElapsedError,
)
from breadbox.types import GroupEndReason, MemberDescription
from support.server_process import ServerProcess

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

ADMITTED, DUPLICATE = breadbox.AdmissionOutcome.ADMITTED, breadbox.AdmissionOutcome.DUPLICATE


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess("--store", f"file://{tmp_path}/store", log=tmp_path / "log") as started:
        yield started


@pytest.fixture
def client(server: ServerProcess) -> Iterator[breadbox.Client]:
    config = breadbox.BufferConfig.preset(
        "groups", fragments_per_chunk=2, required_parts=("tokens", "reward"), group_min=1
    )
    with breadbox.connect(server.address, buffer="verified") as client:
        client.create_buffer("verified", config)
        client.start_session("run")
        yield client


def completion(member: int, length: int = 3, group: str = "g") -> breadbox.Sequence:
    return breadbox.Sequence(
        group=group,
        member=member,
        tokens={"ids": np.arange(length)},
        numbers={"length": length, "status": "generated"},
        model_version_min=0,
        model_version_max=0,
        session_id="run",
    )


def reward(member: int, value: float, length: int = 3, group: str = "g") -> breadbox.Part:
    return breadbox.Part(
        group=group,
        member=member,
        name="reward",
        arrays={"why": b"good"},
        numbers={"reward": value, "status": "judged"},
        tokens={"token_reward": np.full(length, value, np.float32)},
    )


def test_a_group_is_complete_once_each_member_has_its_required_parts(
    client: breadbox.Client,
) -> None:
    client.append(completion(1, 4))
    client.attach(reward(0, 0.0))  # Before its sequence.
    client.attach(reward(1, 1.0, 4))
    assert client.get_buffer().state.chunk_count == 0
    assert client.members() == [
        MemberDescription("g", 0, ("reward",), {"reward": 0.0, "status": "judged"}),
        MemberDescription(
            "g", 1, ("tokens", "reward"), {"length": 4, "status": "judged", "reward": 1.0}
        ),
    ]
    client.append(completion(0))

    with client.fetch(2, max_wait_s=10) as lease:
        first, second = lease.references
        sequences = list(lease.sequences())
        (packed,) = lease.packed()
        (padded,) = lease.padded(columns=["token_reward"])
    assert [first.metadata.fragment_index, second.metadata.fragment_index] == [0, 1]
    assert first.metadata.numbers == {"reward": 0.0, "status": "generated", "length": 3}
    assert second.metadata.numbers == {"length": 4, "status": "judged", "reward": 1.0}
    assert [each.tokens["token_reward"].tolist() for each in sequences] == [[0.0] * 3, [1.0] * 4]
    assert [bytes(each.context["why"]) for each in sequences] == [b"good", b"good"]
    assert packed.tokens["ids"].tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert packed.tokens["token_reward"].tolist() == [0.0] * 3 + [1.0] * 4
    assert packed.cu_seqlens.tolist() == [0, 3, 7]
    assert packed.numbers["reward"].tolist() == [0.0, 1.0]
    assert [bytes(each) for each in packed.context["why"]] == [b"good", b"good"]
    assert set(padded.tokens) == {"token_reward"}
    assert padded.tokens["token_reward"].tolist() == [[0.0, 0.0, 0.0, 0.0], [1.0] * 4]
    assert [each.reason for each in client.group_ends()] == [GroupEndReason.COMPLETE]


def test_attaching_to_what_has_ended_says_why(client: breadbox.Client) -> None:
    for member in range(2):
        client.append(completion(member))
        client.attach(reward(member, 1.0))
    with pytest.raises(GroupEndedError, match="'g' has ended \\(complete\\)"):
        client.attach(reward(0, 1.0))


def test_a_part_of_other_bytes_is_a_conflict_in_a_group_whatever_replace_says(
    client: breadbox.Client,
) -> None:
    client.append(completion(0))
    client.attach(reward(0, 1.0))
    assert [each.outcome for each in client.attach(reward(0, 1.0))] == [DUPLICATE]
    with pytest.raises(PartConflictError):
        client.attach(reward(0, 2.0))
    with pytest.raises(InvalidRequestError, match="is for buffers of rows"):
        client.attach(breadbox.Part("g", 0, "other", {"x": np.ones(1)}), replace=True)


def test_a_silent_group_is_delivered_with_its_complete_members_alone(
    client: breadbox.Client,
) -> None:
    client.update_buffer("verified", breadbox.BufferConfig(open_chunk_s=1.0))
    client.append(completion(0))
    client.append(completion(1))
    client.attach(reward(1, 1.0))
    with client.fetch(2, max_wait_s=20) as lease:
        assert [each.metadata.fragment_index for each in lease.references] == [1]
        assert [len(each.parts) for each in lease.references] == [1]
    assert client.get_buffer().state.payload_bytes == 0


def test_parts_of_an_open_group_survive_a_killed_server(
    server: ServerProcess, client: breadbox.Client
) -> None:
    client.append(completion(0))
    client.attach(reward(0, 1.0))
    before = client.members()
    server.kill()
    server.start()
    assert client.members() == before
    assert client.attach(reward(0, 1.0))[0].outcome is DUPLICATE
    client.append(completion(1))
    client.attach(reward(1, 0.0))
    with client.fetch(2, max_wait_s=10) as lease:
        assert [each.metadata.numbers["reward"] for each in lease.references] == [1.0, 0.0]
        assert [set(each.tokens) for each in lease.sequences()] == [{"ids", "token_reward"}] * 2


def test_parts_need_groups(client: breadbox.Client) -> None:
    client.create_buffer("steps", breadbox.BufferConfig())
    client.start_session("run", buffer="steps")
    with pytest.raises(InvalidRequestError, match="`assembly` groups"):
        client.attach(reward(0, 1.0), buffer="steps")


def test_a_claimed_member_is_nobody_elses_until_the_claim_ends(client: breadbox.Client) -> None:
    client.append_many([completion(0), completion(1)])
    with (
        client.claim("reward", 1, max_wait_s=10) as first,
        client.claim("reward", 5, max_wait_s=10) as second,
    ):
        members = [each.metadata.fragment_index for each in first.references]
        others = [each.metadata.fragment_index for each in second.references]
        assert (members, others) == ([0], [1])
        with pytest.raises(WaitElapsedError, match="2 are claimed"):
            client.claim("reward", max_wait_s=0)
        (sequence,) = first.sequences()
        assert sequence.tokens["ids"].tolist() == [0, 1, 2]
        client.attach(reward(0, 1.0))
    with client.claim("reward", 5, max_wait_s=10) as again:
        assert [each.metadata.fragment_index for each in again.references] == [1]
        client.attach(reward(1, 0.0))
    with client.fetch(2, max_wait_s=10) as lease:
        assert [each.metadata.numbers["reward"] for each in lease.references] == [1.0, 0.0]


def test_a_claim_waits_for_a_member_and_for_another_claim_to_expire(
    client: breadbox.Client, server: ServerProcess
) -> None:
    with (
        ThreadPoolExecutor(1) as pool,
        breadbox.connect(server.address, buffer="verified") as verifier,
    ):
        waiting = pool.submit(verifier.claim, "reward", 4, 30.0, lease_s=0.5)
        client.append(completion(0))
        assert len(waiting.result(30)) == 1  # Not entered: nothing renews it.
        with client.claim("reward", 4, max_wait_s=30) as claim:
            assert [each.metadata.worker_id for each in claim.references] == ["g"]


@pytest.mark.parametrize("lacking", ["", "tokens", "x" * 65, "a\n"])
def test_a_claim_of_a_part_that_no_member_can_lack_is_refused(
    client: breadbox.Client, lacking: str
) -> None:
    client.append(completion(0))
    with pytest.raises(InvalidRequestError, match="lacking"):
        client.claim(lacking, max_wait_s=30)


def test_a_claim_where_there_are_no_groups_is_refused(client: breadbox.Client) -> None:
    client.create_buffer("steps", breadbox.BufferConfig())
    with pytest.raises(InvalidRequestError, match="`assembly` groups"):
        client.claim("reward", max_wait_s=30, buffer="steps")


VERIFY = """
import sys
import breadbox

with breadbox.connect(sys.argv[1], buffer="verified") as client:
    with client.claim("reward", 8, 30, lease_s=1.0) as claim:
        print(len(claim), flush=True)
        sys.stdin.read()
"""


def test_members_of_a_verifier_that_is_killed_are_claimed_by_another(
    client: breadbox.Client, server: ServerProcess
) -> None:
    client.append_many([completion(0), completion(1)])
    command = [sys.executable, "-c", VERIFY, server.address]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe) as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == "2\n"
        killed.kill()
    with client.claim("reward", 8, max_wait_s=30) as claim:
        assert len(claim) == 2


def test_numbers_alone_can_be_a_part_that_makes_a_member_complete(client: breadbox.Client) -> None:
    def verdict(member: int, value: float) -> breadbox.Part:
        return breadbox.Part("g", member, "reward", numbers={"reward": value})

    client.append_many([completion(0), completion(1)])
    results = client.attach([verdict(0, 1.0), verdict(1, 0.5)])
    assert [ADMITTED, ADMITTED] == [each.outcome for each in results]
    with client.fetch(2, max_wait_s=30) as lease:
        (batch,) = lease.packed()
        assert [1.0, 0.5] == batch.numbers["reward"].tolist()
        assert ["ids"] == sorted(batch.tokens)
        assert [3, 3] == [len(each.tokens["ids"]) for each in lease.sequences()]


def test_other_numbers_of_a_part_of_numbers_alone_are_a_conflict(client: breadbox.Client) -> None:
    part = breadbox.Part("g", 0, "reward", numbers={"reward": 1.0, "judge": "rule"})
    client.append(completion(0))
    client.attach(part)
    same = breadbox.Part("g", 0, "reward", numbers={"judge": "rule", "reward": 1.0})
    assert [DUPLICATE] == [each.outcome for each in client.attach(same)]
    with pytest.raises(PartConflictError):
        client.attach(breadbox.Part("g", 0, "reward", numbers={"reward": 0.5, "judge": "rule"}))
