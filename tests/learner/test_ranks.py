"""Several ranks of one learner: shares of one draw, and what happens when one is late or dies."""

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

import breadbox
from breadbox.errors import InvalidRequestError
from breadbox.testing import ServerProcess, start_server
from breadbox_learner.ranks import Place, place_from_environment
from breadbox_learner.source import FetchedBatch, LeaseSource, Share
from support.eventually import eventually_sync
from support.feeder import feeding

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with start_server() as running:
        yield running


def identities(fetched: FetchedBatch) -> list[tuple[str, int]]:
    batch = fetched.batch
    return list(zip(batch.worker_ids, batch.fragment_indices, strict=True))


def await_fragments(client: breadbox.Client, count: int) -> None:
    eventually_sync(lambda: client.get_buffer().state.fragment_count >= count, within_s=60)


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_consume_every_grant_exactly_once_without_a_word_between_them(
    server: ServerProcess, world_size: int
) -> None:
    """Each rank asks by itself, in its own time; together they get each fragment once."""
    seen: list[list[tuple[str, int]]] = [[] for _ in range(world_size)]
    nonce = uuid4().hex
    with breadbox.connect(server.address) as client:
        client.start_session("run")
        client.publish("run", 1, weights_of_cartpole())
        with feeding(server.address, fragments_max=64):
            await_fragments(client, 64)

        def consume(rank: int) -> None:
            source = LeaseSource(
                client, fragment_count=16, share=Share(rank, world_size, nonce), session_id="run"
            )
            for _ in range(4):
                fetched = source.next(lambda: False)
                assert fetched is not None
                seen[rank] += identities(fetched)
                fetched.release(True)
            source.close()

        threads = [threading.Thread(target=consume, args=(rank,)) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert [64 // world_size] * world_size == [len(share) for share in seen]
        assert {1} == set(Counter(identity for share in seen for identity in share).values())
        assert 0 == client.get_buffer().state.lease_count


def weights_of_cartpole() -> dict[str, object]:
    import gymnasium

    from breadbox.policies import make_policy, policy_weights

    env = gymnasium.make("CartPole-v1")
    policy = make_policy("mlp", env.observation_space, env.action_space)
    env.close()
    return dict(policy_weights(policy))


def test_a_late_rank_finds_its_share_and_a_dead_one_keeps_nobody_waiting(
    server: ServerProcess,
) -> None:
    with breadbox.connect(server.address) as client:
        client.start_session("run")
        client.publish("run", 1, weights_of_cartpole())
        with feeding(server.address, fragments_max=32):
            await_fragments(client, 32)
        nonce = uuid4().hex
        early = LeaseSource(client, fragment_count=16, share=Share(0, 2, nonce))
        first, second = early.next(lambda: False), early.next(lambda: False)
        assert first is not None
        assert second is not None
        first.release(True)
        second.release(True)
        # Rank 1 comes only now: its shares of both draws are still there.
        late = LeaseSource(client, fragment_count=16, share=Share(1, 2, nonce))
        shares = [late.next(lambda: False) for _ in range(2)]
        got = Counter(
            identity
            for fetched in (first, second, *shares)
            if fetched is not None
            for identity in identities(fetched)
        )
        assert (32, {1}) == (len(got), set(got.values()))
        early.close()
        late.close()


def free_port() -> str:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


class RankProcesses:
    """`breadbox learn` as torchrun would start it, but with each rank in the test's hand."""

    def __init__(self, address: str, folder: Path, world_size: int = 2) -> None:
        self._arguments = [
            *("learn", "--server", address, "--run-dir", str(folder), "--no-tensorboard"),
            *("--fragments-per-batch", "16", "--minibatch-fragments", "4", "--resume"),
            *("--rank-limit-s", "20", "--checkpoint-every", "1"),
        ]
        self.path = folder / "progress.jsonl"
        self.world_size = world_size
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str) -> None:
        self.kill()
        clean = {n: v for n, v in os.environ.items() if not n.startswith("BREADBOX_")}
        meeting = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": free_port(),
            "WORLD_SIZE": str(self.world_size),
            "OMP_NUM_THREADS": "1",
        }
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "breadbox.cli.main", *self._arguments, *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**clean, **meeting, "RANK": str(rank)},
                start_new_session=True,
            )
            for rank in range(self.world_size)
        ]

    def updates(self) -> int:
        return len(self.path.read_text().splitlines()) if self.path.exists() else 0

    def finish(self, rank: int, limit_s: float = 90.0) -> tuple[int, str]:
        process = self.processes[rank]
        _, err = process.communicate(timeout=limit_s)
        return process.returncode, err

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture
def ranks(server: ServerProcess, tmp_path: Path) -> Iterator[RankProcesses]:
    made = RankProcesses(server.address, tmp_path)
    yield made
    made.kill()


def test_two_ranks_train_and_one_that_dies_ends_the_other_with_a_clear_error(
    server: ServerProcess, ranks: RankProcesses
) -> None:
    with breadbox.connect(server.address) as client, feeding(server.address):
        ranks.start()
        eventually_sync(lambda: ranks.updates() >= 3, within_s=90)
        ranks.processes[1].send_signal(signal.SIGKILL)
        code, err = ranks.finish(0, 40)
        assert 2 == code
        assert "rank 0 lost touch with the other ranks" in err
        assert "--resume" in err

        done = ranks.updates()
        ranks.start("--updates-max", str(done + 4))
        assert [0, 0] == [ranks.finish(rank)[0] for rank in range(2)]
        # The last checkpoint may be one update behind the last record.
        assert ranks.updates() >= done + 3
        # The dead rank's own lease ends by expiry.
        assert client.get_buffer().state.lease_count <= 1


def test_shares_that_would_be_unequal_are_refused(ranks: RankProcesses) -> None:
    ranks.world_size = 3
    ranks.start()
    for rank in range(3):
        code, err = ranks.finish(rank)
        assert 2 == code
        assert "must divide by the number of ranks, got 16 for 3" in err


def test_the_place_is_read_as_torchrun_sets_it() -> None:
    assert Place(0, 1) == place_from_environment({})
    assert Place(3, 4) == place_from_environment({"RANK": "3", "WORLD_SIZE": "4"})
    for wrong in ({"RANK": "4", "WORLD_SIZE": "4"}, {"RANK": "-1"}, {"RANK": "first"}):
        with pytest.raises(InvalidRequestError, match="RANK"):
            place_from_environment(wrong)
