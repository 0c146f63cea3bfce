"""Groups through a real server: two generators, members in any order, one learner, a kill -9."""

import random
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import breadbox
from breadbox.mirror import ReplayMirror
from breadbox.types import GroupEndReason
from support.fragments import vector_fragment
from support.server_process import ServerProcess

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

SIZE = 8
GROUPS = 40
ADMITTED = breadbox.AdmissionOutcome.ADMITTED


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(
        *("--store", f"file://{tmp_path}/store", "--preset", "groups"),
        *("--fragments-per-chunk", str(SIZE), "--open-chunk-s", "2", "--group-min", "6"),
        log=tmp_path / "log",
    ) as started:
        yield started


def member(group: str, index: int) -> breadbox.Fragment:
    fragment = vector_fragment(index, worker_id=group)
    fragment.worker_id, fragment.fragment_index = group, index
    return fragment


def generate(address: str, members: list[tuple[str, int]], outcomes: Counter[str]) -> None:
    with breadbox.connect(address) as client:
        for start in range(0, len(members), 5):
            sent = [member(group, index) for group, index in members[start : start + 5]]
            outcomes.update(each.outcome.value for each in client.append_many(sent))


def test_all_groups_of_two_generators_are_delivered_whole(server: ServerProcess) -> None:
    """The members of each group come from both, in any order, and every tenth comes twice."""
    seed = random.randrange(10**6)
    print("seed", seed)  # noqa: T201 - told when it fails
    rng = random.Random(seed)
    members = [(f"prompt-{group}", index) for group in range(GROUPS) for index in range(SIZE)]
    rng.shuffle(members)
    again = members[::10]
    outcomes: Counter[str] = Counter()
    with breadbox.connect(server.address) as learner:
        learner.start_session("s")
        halves = [members[::2] + again, members[1::2]]
        threads = [
            threading.Thread(target=generate, args=(server.address, half, outcomes))
            for half in halves
        ]
        for thread in threads:
            thread.start()
        came: Counter[str] = Counter()
        for _ in range(GROUPS // 4):
            with learner.fetch(fragment_count=4 * SIZE, max_wait_s=30) as lease:
                for start in range(0, 4 * SIZE, SIZE):
                    chunk = lease.references[start : start + SIZE]
                    assert 1 == len({each.metadata.worker_id for each in chunk})
                    assert [*range(SIZE)] == [each.metadata.fragment_index for each in chunk]
                    came[chunk[0].metadata.worker_id] += 1
                    assert SIZE == len(list(learner.load_fragments(chunk)))
        for thread in threads:
            thread.join()
        ends = learner.group_ends(max_wait_s=5)
        state = learner.get_buffer().state
    assert dict.fromkeys([f"prompt-{group}" for group in range(GROUPS)], 1) == dict(came)
    assert GROUPS * SIZE == outcomes["admitted"]
    assert len(again) == outcomes["duplicate"]
    assert {GroupEndReason.COMPLETE} == {each.reason for each in ends}
    assert GROUPS == len(ends)
    assert 0 == state.open_chunk_count


def test_batches_of_partial_groups_are_whole_and_nothing_joins_their_members(
    server: ServerProcess,
) -> None:
    """Partial groups make a fetch smaller, and shift the others; a mirror joins what follows."""
    sizes = {"a": 7, "b": 8, "c": 6, "d": 8}
    with breadbox.connect(server.address) as client:
        client.start_session("s")
        client.append_many([member(name, index) for name in sizes for index in range(sizes[name])])
        with ReplayMirror(client, capacity_steps=1000) as mirror:
            mirror.wait_until(4 * sum(sizes.values()), timeout_s=30)
            steps = mirror.at(range(mirror.step_count))
            ends = steps.next_obs[3::4]
            assert not ends.any(), "a member leads to its own next_obs"
        with client.fetch(fragment_count=4 * SIZE, max_wait_s=30) as lease:
            batches = [
                sorted({each.metadata.worker_id for each in batch.references})
                for batch in lease.batches(batch_size=SIZE)
            ]
            assert sorted([name] for name in sizes) == sorted(batches)
            assert sum(sizes.values()) == len(lease.references)


def test_open_groups_and_ends_outlive_a_server_that_is_killed(server: ServerProcess) -> None:
    with breadbox.connect(server.address) as client:
        client.start_session("s")
        client.append_many([member("whole", index) for index in range(SIZE)])
        client.append_many([member("most", index) for index in range(1, SIZE - 1)])
        client.append_many([member("few", 3)])
        [first] = client.group_ends(max_wait_s=5)
        assert ("whole", GroupEndReason.COMPLETE, SIZE) == first[1:]
        server.kill()
        server.start()
        rest: list[tuple[str, GroupEndReason, int]] = []
        number = first.number
        while len(rest) < 2:
            found = client.group_ends(number, max_wait_s=20)
            assert found, "the wait has elapsed"
            rest += [(each.group, each.reason, each.member_count) for each in found]
            number = found[-1].number
        expected = [("most", GroupEndReason.PARTIAL, 6), ("few", GroupEndReason.INCOMPLETE, 1)]
        assert expected == rest
        late = client.append(member("few", 5))
        assert (breadbox.AdmissionOutcome.GROUP_ENDED, GroupEndReason.INCOMPLETE) == (
            late.outcome,
            late.group_end,
        )
        assert "AppendResult(group_ended, incomplete)" == repr(late)
        with client.fetch(fragment_count=2 * SIZE, max_wait_s=5) as lease:
            groups = Counter(each.metadata.worker_id for each in lease.references)
        assert {"whole": SIZE, "most": 6} == dict(groups)
