"""Several ranks of one learner: shares of one draw, and what happens when one is late or dies."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest
import torch

import breadbox
from breadbox.model.errors import InvalidRequestError
from breadbox.testing import ServerProcess, start_server
from breadbox_learner.ranks import RankLostError, meeting_of
from breadbox_learner.settings import Membership, membership_from_environment
from breadbox_learner.training.source import FetchedBatch, LeaseSource, Share
from support.eventually import eventually_sync
from support.feeder import feeding
from support.fragments import vector_fragment
from support.tiers import long_but

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

RANK_PROCESS = Path(__file__).parents[1] / "support" / "rank_process.py"
RANK_LIMIT_S = 20.0
LEAVING_S = 10.0
"""To end the session and the process, once a rank knows."""


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    # A learner is tried with misfits, which a server refuses unless told otherwise.
    with start_server() as running:
        with breadbox.connect(running.address) as client:
            client.update_buffer("default", breadbox.BufferConfig(schema=breadbox.SchemaPolicy.ANY))
        yield running


def identities(fetched: FetchedBatch) -> list[tuple[str, int]]:
    batch = fetched.batch
    return list(zip(batch.worker_ids, batch.fragment_indices, strict=True))


def await_fragments(client: breadbox.Client, count: int) -> None:
    eventually_sync(lambda: client.get_buffer().state.fragment_count >= count, within_s=60)


def fill(client: breadbox.Client, address: str, count: int) -> None:
    """Put fragments of a session "run" into the buffer."""
    client.start_session("run")
    client.publish("run", 1, weights_of_cartpole())
    with feeding(address, fragments_max=count):
        await_fragments(client, count)


def read_reports(text: str) -> list[dict[str, Any]]:
    """What `support/rank_process.py` printed, in order of rank."""
    reports = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return sorted(reports, key=lambda report: int(report["rank"]))


def check_shares(reports: list[dict[str, Any]], *, world_size: int, fragments: int) -> None:
    """Every rank got equal shares, together each fragment once, and they understood each other."""
    assert list(range(world_size)) == [report["rank"] for report in reports]
    assert {"made-by-rank-0"} == {report["nonce"] for report in reports}
    seen = Counter(tuple(name) for report in reports for name in report["seen"])
    assert (fragments, {1}) == (len(seen), set(seen.values()))
    assert 1 == len({tuple(report["sizes"]) for report in reports})
    own = [value for report in reports for value in report["own"]]
    assert len(own) > world_size
    for report in reports:
        assert own == report["gathered"]
        assert sum(own) == pytest.approx(report["summed"])
        uneven = [[0, 0]] + [[rank] * 2 for rank in range(2, world_size) for _ in range(rank - 1)]
        assert uneven == report["uneven"]
        assert [] == report["none"]
        assert world_size - 1 == report["largest"]


@pytest.mark.parametrize("world_size", long_but(1, [2, 4]))
def test_ranks_in_processes_consume_every_grant_exactly_once(
    server: ServerProcess, world_size: int
) -> None:
    """Each rank asks by itself, in its own time; together they get each fragment once."""
    with breadbox.connect(server.address) as client:
        fill(client, server.address, 64)
        command = [sys.executable, str(RANK_PROCESS), server.address, "16", "4"]
        processes = start_ranks(command, world_size)
        try:
            ended = [process.communicate(timeout=120) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.communicate()
        assert [0] * world_size == [process.returncode for process in processes], ended
        reports = read_reports("".join(out for out, _ in ended))
        check_shares(reports, world_size=world_size, fragments=64)
        assert 0 == client.get_buffer().state.lease_count


def weights_of_cartpole() -> dict[str, object]:
    import gymnasium

    from breadbox_policies import make_policy, policy_weights

    env = gymnasium.make("CartPole-v1")
    policy = make_policy("mlp", env.observation_space, env.action_space)
    env.close()
    return dict(policy_weights(policy))


def test_a_late_rank_finds_its_share_and_a_dead_one_keeps_nobody_waiting(
    server: ServerProcess,
) -> None:
    with breadbox.connect(server.address) as client:
        fill(client, server.address, 32)
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


def clean_environment() -> dict[str, str]:
    kept = {n: v for n, v in os.environ.items() if not n.startswith("BREADBOX_")}
    return {**kept, "OMP_NUM_THREADS": "1"}


def start_ranks(command: list[str], world_size: int) -> list[subprocess.Popen[str]]:
    """Start the ranks as torchrun would, but each in the test's hand."""
    meeting = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "WORLD_SIZE": str(world_size),
    }
    return [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**clean_environment(), **meeting, "RANK": str(rank)},
            start_new_session=True,
        )
        for rank in range(world_size)
    ]


def learn_arguments(address: str, folder: Path) -> list[str]:
    return [
        *("learn", "--server", address, "--run-dir", str(folder), "--no-tensorboard"),
        *("--fragments-per-batch", "16", "--minibatch-fragments", "4", "--resume"),
        *("--rank-limit-s", f"{RANK_LIMIT_S:g}", "--checkpoint-every", "1"),
    ]


def read_records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class RankProcesses:
    """`breadbox learn` as torchrun would start it, but with each rank in the test's hand."""

    def __init__(self, address: str, folder: Path) -> None:
        self._arguments = learn_arguments(address, folder)
        self._path = folder / "progress.jsonl"
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str, world_size: int = 2) -> None:
        self.kill()
        command = [sys.executable, "-m", "breadbox.cli.main", *self._arguments, *arguments]
        self.processes = start_ranks(command, world_size)

    def records(self) -> list[dict[str, Any]]:
        return read_records(self._path)

    def updates(self) -> int:
        return len(self.records())

    def finish(self, rank: int, limit_s: float = 90.0) -> tuple[int, str]:
        process = self.processes[rank]
        _, err = process.communicate(timeout=limit_s)
        return process.returncode, err

    def finished(self, rank: int, limit_s: float = 90.0) -> tuple[int, list[str]]:
        """Exit status, and the warnings, errors and anything else that is no line of progress."""
        code, err = self.finish(rank, limit_s)
        return code, [line for line in err.splitlines() if " INFO    breadbox" not in line]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


class Torchrun:
    """torchrun itself, and what it starts."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def start(self, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environment(),
            start_new_session=True,
        )

    def process_of_rank(self, rank: int) -> int:
        """Process id of a rank."""
        assert self._process is not None
        for child in psutil.Process(self._process.pid).children():
            if child.environ().get("RANK") == str(rank):
                return int(child.pid)
        raise AssertionError(f"torchrun runs no rank {rank}")

    def finish(self, limit_s: float = 150.0) -> tuple[int, str, str]:
        assert self._process is not None
        out, err = self._process.communicate(timeout=limit_s)
        return self._process.returncode, out, err

    def kill(self) -> None:
        if self._process is None:
            return
        if self._process.poll() is None:
            for child in psutil.Process(self._process.pid).children(recursive=True):
                child.kill()
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def torchrun() -> Iterator[Torchrun]:
    made = Torchrun()
    yield made
    made.kill()


@pytest.fixture
def ranks(server: ServerProcess, tmp_path: Path) -> Iterator[RankProcesses]:
    made = RankProcesses(server.address, tmp_path)
    yield made
    made.kill()


def test_ranks_train_together_and_their_records_cover_all_of_them(
    server: ServerProcess, ranks: RankProcesses
) -> None:
    with breadbox.connect(server.address), feeding(server.address, steps_per_fragment=16):
        ranks.start("--updates-max", "4")
        assert [(0, []), (0, [])] == [ranks.finished(rank) for rank in range(2)]
    records = ranks.records()
    assert [1, 2, 3, 4] == [record["update"] for record in records]
    assert [16, 32, 48, 64] == [record["fragments"] for record in records]
    assert [256, 512, 768, 1024] == [record["steps"] for record in records]
    assert records[-1]["episode_count"] > 0


def waits_beside(client: breadbox.Client, *, fragment_count: int) -> bool:
    state = client.get_buffer().state
    return (1, fragment_count) == (state.waiter_count, state.fragment_count)


@pytest.mark.long
def test_ranks_skip_a_draw_together_where_nothing_of_a_share_fits(
    server: ServerProcess, ranks: RankProcesses
) -> None:
    """One worker has another environment, and a share is a single fragment."""
    with breadbox.connect(server.address) as client:
        ranks.start(
            *("--fragments-per-batch", "2", "--minibatch-fragments", "1"),
            *("--updates-max", "4", "--wait-limit-s", "60"),
        )
        eventually_sync(lambda: client.get_buffer().model_version == 1, within_s=90)
        session = client.get_buffer().session_id
        client.append_many(
            [
                vector_fragment(index, worker_id="odd", session_id=session, step_count=16)
                for index in range(5)
            ]
        )
        # Two draws of two; the third waits for something better beside the last of them.
        eventually_sync(lambda: waits_beside(client, fragment_count=1), within_s=60)
        with feeding(server.address, steps_per_fragment=16):
            ended = [ranks.finished(rank) for rank in range(2)]
        # Nobody holds on to what was skipped.
        assert 0 == client.get_buffer().state.lease_count
    assert [0, 0] == [code for code, _ in ended], ended
    for _, told in ended:
        assert all("worker odd and others like it are left out: obs" in line for line in told)
    assert sum(len(told) for _, told in ended) in (1, 2)
    records = ranks.records()
    assert [1, 2, 3, 4] == [record["update"] for record in records]
    assert [2, 4, 6, 8] == [record["fragments"] for record in records]
    assert [(5, 3)] * 4 == [(record["misfits"], record["skipped_draws"]) for record in records]
    # What was drawn beside a misfit was given back: its use does not count.
    assert [1.0] * 4 == [record["use_count_mean"] for record in records]


@pytest.mark.long
def test_a_rank_that_dies_ends_the_other_in_time_and_a_restart_goes_on(
    server: ServerProcess, ranks: RankProcesses
) -> None:
    with breadbox.connect(server.address) as client, feeding(server.address):
        ranks.start()
        eventually_sync(lambda: ranks.updates() >= 3, within_s=90)
        ranks.processes[1].send_signal(signal.SIGKILL)
        killed_at = time.monotonic()
        code, told = ranks.finished(0, RANK_LIMIT_S + 40)
        assert time.monotonic() - killed_at < RANK_LIMIT_S + LEAVING_S
        assert (2, 1) == (code, len(told)), told
        assert "rank 0 lost touch with the other ranks (deadline 20 s)" in told[0]
        assert "restart all ranks with --resume" in told[0]

        before = ranks.records()
        done = len(before)
        ranks.start("--updates-max", str(before[-1]["update"] + 4))
        ended = [ranks.finish(rank) for rank in range(2)]
        assert [0, 0] == [code for code, _ in ended], ended
        after = ranks.records()[done:]
        # A checkpoint is written after each record: the last may be one update behind.
        assert after[0]["update"] in (before[-1]["update"], before[-1]["update"] + 1)
        assert before[-1]["update"] + 4 == after[-1]["update"]
        assert 16 * after[-1]["update"] == after[-1]["fragments"]
        assert after[0]["model_version"] > before[-1]["model_version"]
        # The dead rank's own lease ends by expiry.
        assert client.get_buffer().state.lease_count <= 1


@pytest.mark.long
def test_torchrun_starts_ranks_that_get_every_fragment_once(
    server: ServerProcess, torchrun: Torchrun
) -> None:
    with breadbox.connect(server.address) as client:
        fill(client, server.address, 32)
        torchrun.start("--nproc-per-node", "2", str(RANK_PROCESS), server.address, "16", "2")
        code, out, err = torchrun.finish()
        assert 0 == code, err
        check_shares(read_reports(out), world_size=2, fragments=32)


def test_torchrun_ranks_train_on_nothing_staler_than_the_limit_at_use(
    server: ServerProcess, torchrun: Torchrun, tmp_path: Path
) -> None:
    """Rank 1 was a version behind, since rank 0 alone counted the one that it starts with."""
    with breadbox.connect(server.address) as client, feeding(server.address, steps_per_fragment=16):
        torchrun.start(
            *("--nproc-per-node", "2", "-m", "breadbox.cli.main"),
            *learn_arguments(server.address, tmp_path),
            *("--updates-max", "8", "--prefetch-batches", "4", "--max-staleness-at-use", "1"),
        )
        code, _, err = torchrun.finish()
        assert 0 == code, err
        eventually_sync(lambda: 0 == client.get_buffer().state.lease_count, within_s=30)
    assert "max_staleness_at_use: 1 batches are fetched ahead, not 4" in err
    records = read_records(tmp_path / "progress.jsonl")
    assert list(range(1, 9)) == [each["update"] for each in records]
    assert [16 * n for n in range(1, 9)] == [each["fragments"] for each in records]
    assert {0, 1} >= {each["staleness_max"] for each in records}
    # Each fragment is at least as stale at its use as it was at its grant, on both ranks.
    assert all(each["staleness_at_grant_mean"] <= each["staleness_mean"] for each in records)


@pytest.mark.long
def test_torchrun_trains_and_restarts_the_ranks_when_one_is_killed(
    server: ServerProcess, torchrun: Torchrun, tmp_path: Path
) -> None:
    """With `--max-restarts`, a killed rank costs a restart from the checkpoint, by itself."""
    progress = tmp_path / "progress.jsonl"

    def records() -> list[dict[str, Any]]:
        return read_records(progress)

    with breadbox.connect(server.address), feeding(server.address):
        torchrun.start(
            *("--nproc-per-node", "2", "--max-restarts", "1", "-m", "breadbox.cli.main"),
            *learn_arguments(server.address, tmp_path),
            *("--updates-max", "12"),
        )
        eventually_sync(lambda: len(records()) >= 3, within_s=90)
        os.kill(torchrun.process_of_rank(1), signal.SIGKILL)
        code, _, err = torchrun.finish()
    assert 0 == code, err
    updates = [record["update"] for record in records()]
    assert 12 == updates[-1]
    assert set(range(1, 13)) == set(updates)
    # Nothing was begun anew: at most the update that was not yet in the checkpoint came twice.
    assert len(updates) <= 13
    assert 16 * 12 == records()[-1]["fragments"]


def test_shares_that_would_be_unequal_are_refused(ranks: RankProcesses) -> None:
    ranks.start(world_size=3)
    for rank in range(3):
        code, err = ranks.finish(rank)
        assert 2 == code
        assert "must divide by the number of ranks, got 16 for 3" in err


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_meet_in_a_store_that_remembers_dead_ones(world_size: int) -> None:
    """As that of torchrun does after a restart."""
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=20))
    met: list[str] = []
    for _ in range(3):
        with ThreadPoolExecutor(world_size) as threads:
            memberships = [Membership(rank, world_size) for rank in range(world_size)]
            names = set(
                threads.map(lambda membership: meeting_of(store, membership, 20.0), memberships)
            )
        assert 1 == len(names)
        met += names
    assert 3 == len(set(met))


def test_rank_0_says_who_did_not_come() -> None:
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    store.set("breadbox/name/1", "of a dead rank 1")
    with pytest.raises(RankLostError, match=r"deadline 0\.2 s\): ranks \[1, 2\] did not come"):
        meeting_of(store, Membership(0, 3), 0.2)


def test_the_place_is_read_as_torchrun_sets_it() -> None:
    assert Membership(0, 1) == membership_from_environment({})
    assert Membership(3, 4) == membership_from_environment({"RANK": "3", "WORLD_SIZE": "4"})
    for wrong in ({"RANK": "4", "WORLD_SIZE": "4"}, {"RANK": "-1"}, {"RANK": "first"}):
        with pytest.raises(InvalidRequestError, match="RANK"):
            membership_from_environment(wrong)
