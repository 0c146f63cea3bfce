"""`breadbox learn` as a process, against a real server and environments."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import breadbox
from breadbox.model.errors import SchemaMismatchError, SessionInUseError
from breadbox.shared.extras import how_to_install
from breadbox.testing import ServerProcess, start_server
from support.eventually import eventually_sync as eventually
from support.feeder import feeding
from support.fragments import vector_fragment
from support.hidden_modules import hiding
from support.tiers import long_but

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

QUICK = ("--fragments-per-batch", "16", "--minibatch-fragments", "8", "--no-tensorboard")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with start_server() as running:
        yield running


class Learners:
    """Processes of one test; none outlives it."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        self._started.append(start_learner(*arguments, environment=environment))
        return self._started[-1]

    def kill(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()


@pytest.fixture
def learners() -> Iterator[Learners]:
    made = Learners()
    yield made
    made.kill()


def start_learner(
    *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("BREADBOX_")}
    return subprocess.Popen(
        [sys.executable, "-m", "breadbox.cli.main", "learn", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**clean, "OMP_NUM_THREADS": "1", **(environment or {})},
        start_new_session=True,
    )


def finish(learner: subprocess.Popen[str], limit_s: float = 90.0) -> tuple[int, str, str]:
    try:
        out, err = learner.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        learner.kill()
        out, err = learner.communicate()
    # What it does is told, too; the tests are about what goes wrong.
    told = [line for line in err.splitlines(keepends=True) if " INFO    breadbox" not in line]
    return learner.returncode, out, "".join(told)


def records(folder: Path) -> list[dict[str, Any]]:
    path = folder / "progress.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_it_trains_and_leaves_nothing_behind(
    server: ServerProcess, tmp_path: Path, learners: Learners
) -> None:
    with breadbox.connect(server.address) as client, feeding(server.address):
        learner = learners.start(
            *("--server", server.address, "--run-dir", str(tmp_path), *QUICK),
            *("--updates-max", "5", "--prefetch-batches", "1"),
        )
        code, out, err = finish(learner)
        assert (0, "ended: updates_done", "") == (code, out.splitlines()[-1], err)
        buffer = client.get_buffer()
        assert ("", 0) == (buffer.session_id, buffer.state.lease_count)
    written = records(tmp_path)
    assert [1, 2, 3, 4, 5] == [record["update"] for record in written]
    assert [2, 3, 4, 5, 6] == [record["model_version"] for record in written]
    assert [16, 32, 48, 64, 80] == [record["fragments"] for record in written]
    assert all(record["staleness_at_grant_max"] <= 2 for record in written)
    assert all(1.0 == record["use_count_mean"] for record in written)
    assert (tmp_path / "checkpoint.safetensors").exists()


@pytest.mark.parametrize(("limit", "ahead"), [(1, 1), (2, 2), (9, 4)])
def test_what_was_fetched_ahead_is_as_stale_as_its_record_says_and_never_beyond_the_limit(
    server: ServerProcess, tmp_path: Path, learners: Learners, limit: int, ahead: int
) -> None:
    with feeding(server.address):
        learner = learners.start(
            *("--server", server.address, "--run-dir", str(tmp_path), *QUICK),
            *("--updates-max", "8", "--prefetch-batches", "4", "--epochs", "60"),
            *("--max-staleness-at-use", str(limit)),
        )
        code, _, err = finish(learner)
    assert 0 == code, err
    assert (f"{ahead} batches are fetched ahead, not 4" in err) == (ahead < 4)
    written = records(tmp_path)
    assert all(record["staleness_max"] <= limit for record in written)
    # Each batch waits for the updates ahead of it, unless its data came later. With many epochs
    # data comes faster than updates.
    pairs = [(record["staleness_mean"], record["staleness_at_grant_mean"]) for record in written]
    waited = [round(at_use - at_grant, 6) for at_use, at_grant in pairs]
    assert all(0 <= each <= min(number, ahead) for number, each in enumerate(waited))
    assert max(waited) > 0
    trained = 16 * len(written)
    assert trained - written[-1]["left_out"] <= written[-1]["fragments"] <= trained


def test_it_goes_on_from_its_checkpoint(
    server: ServerProcess, tmp_path: Path, learners: Learners
) -> None:
    common = ("--server", server.address, "--run-dir", str(tmp_path), *QUICK, "--resume")
    with feeding(server.address):
        first = finish(learners.start(*common, "--updates-max", "2"))
        second = finish(learners.start(*common, "--updates-max", "4"))
    assert (0, 0) == (first[0], second[0]), first[2] + second[2]
    written = records(tmp_path)
    assert [1, 2, 3, 4] == [record["update"] for record in written]
    versions = [record["model_version"] for record in written]
    assert sorted(set(versions)) == versions
    assert written[1]["episode_count"] <= written[2]["episode_count"]


@pytest.mark.long
def test_a_run_is_neither_overwritten_nor_mixed_unless_told_so(
    server: ServerProcess, tmp_path: Path, learners: Learners
) -> None:
    common = ("--server", server.address, "--run-dir", str(tmp_path), *QUICK)
    with feeding(server.address):
        assert 0 == finish(learners.start(*common, "--updates-max", "3"))[0]
        before = {path: path.read_bytes() for path in tmp_path.iterdir()}
        code, out, err = finish(learners.start(*common, "--updates-max", "3"))
        assert (2, "") == (code, out), err
        assert "--resume" in err
        assert before == {path: path.read_bytes() for path in tmp_path.iterdir()}

        again = finish(learners.start(*common, "--updates-max", "3", "--resume"))
        assert (0, "ended: updates_done\n") == again[:2]
        assert "had come to its end at update 3: a higher --target-return, " in again[2]

        anew = finish(learners.start(*common, "--updates-max", "2", "--overwrite"))
    assert 0 == anew[0], anew[2]
    assert [1, 2] == [record["update"] for record in records(tmp_path)]


@pytest.mark.long
def test_a_killed_learner_goes_on_where_its_checkpoint_was(
    server: ServerProcess, tmp_path: Path, learners: Learners
) -> None:
    """As a supervisor would restart it: the same command line, without a word about checkpoints."""
    common = ("--server", server.address, "--run-dir", str(tmp_path), *QUICK, "--resume")
    with feeding(server.address):
        first = learners.start(*common)
        eventually(lambda: len(records(tmp_path)) >= 23, within_s=90)
        first.kill()
        first.communicate()
        code, _, err = finish(learners.start(*common, "--updates-max", "45"))
    assert 0 == code, err
    assert list(range(1, 46)) == [record["update"] for record in records(tmp_path)]


def test_a_full_disk_is_one_line_at_the_end_and_no_traceback(
    server: ServerProcess, tmp_path: Path, learners: Learners
) -> None:
    for name in ("progress.jsonl", "checkpoint.partial"):
        (tmp_path / name).symlink_to("/dev/full")
    with feeding(server.address):
        code, _, err = finish(
            learners.start(
                *("--server", server.address, "--run-dir", str(tmp_path), *QUICK),
                *("--updates-max", "3", "--checkpoint-every", "1"),
            )
        )
    assert 2 == code
    assert "Traceback" not in err
    wanted = f"Error: {tmp_path / 'checkpoint.safetensors'}: No space left on device"
    assert wanted == err.splitlines()[-1]


def test_a_worker_of_another_environment_does_not_end_it(
    tmp_path: Path, learners: Learners
) -> None:
    # Of a server that takes such fragments, unlike one with default settings.
    with start_server() as own, breadbox.connect(own.address) as client:
        client.update_buffer("default", breadbox.BufferConfig(schema=breadbox.SchemaPolicy.ANY))
        learner = learners.start(
            *("--server", own.address, "--run-dir", str(tmp_path), *QUICK, "--updates-max", "3")
        )
        eventually(lambda: client.get_buffer().session_id != "", within_s=60)
        session = client.get_buffer().session_id
        odd = [
            vector_fragment(index, worker_id="odd", session_id=session, step_count=16)
            for index in range(5)
        ]
        eventually(lambda: client.get_buffer().model_version == 1, within_s=60)
        client.append_many(odd)
        with feeding(own.address):
            code, out, err = finish(learner)
        assert (0, "ended: updates_done") == (code, out.splitlines()[-1]), err
    (told,) = [line for line in err.splitlines() if "left out" in line]
    assert "worker odd" in told
    assert "obs: wanted shape [steps, 4], got shape [16, 3]" in told
    assert [5] * 3 == [record["misfits"] for record in records(tmp_path)]


def test_a_worker_with_other_fragments_is_told_so_and_the_learner_goes_on(
    tmp_path: Path, learners: Learners
) -> None:
    with start_server() as own, breadbox.connect(own.address) as client, feeding(own.address):
        learner = learners.start(
            *("--server", own.address, "--run-dir", str(tmp_path), *QUICK, "--updates-max", "9")
        )
        eventually(lambda: bool(records(tmp_path)), within_s=60)
        session = client.get_buffer().session_id
        with pytest.raises(SchemaMismatchError) as refused:
            client.append(vector_fragment(worker_id="odd", session_id=session, step_count=8))
        assert "step_count: 16 wanted, 8 got" in str(refused.value)
        assert 0 == finish(learner)[0]
    assert [0] * 9 == [record["misfits"] for record in records(tmp_path)]


def test_it_survives_the_servers_death(tmp_path: Path, learners: Learners) -> None:
    with start_server() as own, feeding(own.address):
        learner = learners.start(
            *("--server", own.address, "--run-dir", str(tmp_path), *QUICK, "--updates-max", "30")
        )
        eventually(lambda: len(records(tmp_path)) >= 3, within_s=60)
        own.restart()
        code, out, err = finish(learner)
    assert (0, "ended: updates_done") == (code, out.splitlines()[-1]), err
    assert 30 == len(records(tmp_path))


def test_it_says_where_it_is_and_that_it_waits_before_workers_are_there(
    server: ServerProcess, tmp_path: Path, learners: Learners
) -> None:
    run_dir = tmp_path / "run"
    with breadbox.connect(server.address) as client:
        learner = learners.start("--server", server.address, "--run-dir", str(run_dir))
        assert learner.stderr is not None
        said = learner.stderr.readline()
        session = client.get_buffer().session_id
        learner.send_signal(signal.SIGTERM)
        _, rest = learner.communicate(timeout=40)
    assert (
        f"session {session} on {server.address}, buffer default, run folder {run_dir}; "
        "waiting for workers\n"
    ) == said.partition("breadbox_learner.app: ")[2], said
    assert f"ended after update 0; run folder {run_dir}\n" in rest


def test_a_folder_in_use_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "progress.jsonl").write_text("{}\n")
    script = (
        "import sys\n"
        "from breadbox.cli.main import cli\n"
        "try:\n"
        f"    cli(['learn', '--run-dir', {str(tmp_path)!r}])\n"
        "finally:\n"
        "    print('torch' in sys.modules)\n"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith("BREADBOX_")}
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True, env=clean
    )
    assert (2, "False\n") == (done.returncode, done.stdout), done.stderr
    assert "--overwrite deletes it" in done.stderr


@pytest.mark.parametrize("number", long_but(1, [signal.SIGTERM, signal.SIGINT]))
def test_a_signal_ends_it_while_it_waits(
    server: ServerProcess, tmp_path: Path, learners: Learners, number: signal.Signals
) -> None:
    """No worker feeds the buffer, so that it waits; it ends its session and leaves a checkpoint."""
    with breadbox.connect(server.address) as client:
        learner = learners.start("--server", server.address, "--run-dir", str(tmp_path))
        eventually(lambda: client.get_buffer().state.waiter_count == 1, within_s=60)
        learner.send_signal(number)
        assert (0, "ended: stopped\n", "") == finish(learner, 40)
        assert "" == client.get_buffer().session_id
    assert (tmp_path / "checkpoint.safetensors").exists()


def test_a_signal_ends_it_in_time_where_the_server_is_silent(
    tmp_path: Path, learners: Learners
) -> None:
    """No supervisor waits for longer than a minute, and then what is not written down is lost."""
    with start_server() as own, breadbox.connect(own.address) as client:
        learner = learners.start("--server", own.address, "--run-dir", str(tmp_path))
        eventually(lambda: client.get_buffer().state.waiter_count == 1, within_s=60)
        assert own.process_id is not None
        os.kill(own.process_id, signal.SIGSTOP)
        learner.send_signal(signal.SIGTERM)
        began_at = time.monotonic()
        code, out, err = finish(learner, 60)
        took_s = time.monotonic() - began_at
        os.kill(own.process_id, signal.SIGCONT)
    assert (0, "ended: stopped\n") == (code, out), err
    assert "ending without the server: calling FetchFragments" in err
    assert "the session could not be ended" in err
    assert took_s < 30
    assert (tmp_path / "checkpoint.safetensors").exists()


def test_another_learner_that_takes_over_ends_it(
    server: ServerProcess, tmp_path: Path, learners: Learners
) -> None:
    with breadbox.connect(server.address) as client, feeding(server.address):
        learner = learners.start("--server", server.address, "--run-dir", str(tmp_path), *QUICK)
        eventually(lambda: bool(records(tmp_path)), within_s=60)
        with pytest.raises(SessionInUseError, match=f"a learner .process {learner.pid} on "):
            client.start_session("another")
        client.start_session("another", take_over=True)
        code, _, err = finish(learner)
        assert 2 == code
        assert (tmp_path / "checkpoint.safetensors").exists()
        assert "is not current: another run has started 'another'" in err
        assert 1 == len(err.splitlines())
        client.end_session("another")


def test_a_learner_ends_the_session_of_another_run_only_when_told_to(
    server: ServerProcess, tmp_path: Path, learners: Learners
) -> None:
    common = ("--server", server.address, *QUICK, "--updates-max", "1")
    with breadbox.connect(server.address) as client:
        session_id = client.start_session().session_id
        with feeding(server.address):
            code, _, err = finish(learners.start(*common, "--run-dir", f"{tmp_path}/refused"))
            assert (2, session_id) == (code, client.get_buffer().session_id), err
            assert f"session {session_id!r} is in use: a " in err
            assert f"process {os.getpid()} on " in err
            assert "--take-over" in err
            assert 1 == len(err.splitlines())

            told = ("--run-dir", f"{tmp_path}/told", "--take-over")
            assert 0 == finish(learners.start(*common, *told))[0]


def test_a_learner_killed_before_its_first_checkpoint_goes_on_with_its_session_beside_its_workers(
    server: ServerProcess, tmp_path: Path, learners: Learners
) -> None:
    common = ("--server", server.address, "--run-dir", str(tmp_path), *QUICK, "--resume")
    session = tmp_path / "session"
    with feeding(server.address):
        first = learners.start(*common, "--fragments-per-batch", "1024")
        eventually(lambda: session.exists() and session.read_text() != "", within_s=90)
        first.kill()
        first.communicate()
        assert not (tmp_path / "checkpoint.safetensors").exists()
        session_id = session.read_text()
        code, _, err = finish(learners.start(*common, "--updates-max", "2"))
    assert (0, session_id) == (code, session.read_text()), err


def test_a_learner_without_workers_gives_up(
    server: ServerProcess, tmp_path: Path, learners: Learners
) -> None:
    learner = learners.start(
        *("--server", server.address, "--run-dir", str(tmp_path), "--wait-limit-s", "1.5")
    )
    code, _, err = finish(learner)
    assert 2 == code
    assert "no batch for" in err
    assert 1 == len(err.splitlines())


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_an_unreachable_server_is_one_line_and_exit_status_2(
    tmp_path: Path, learners: Learners
) -> None:
    address = f"127.0.0.1:{unused_port()}"
    learner = learners.start("--server", address, "--run-dir", str(tmp_path), "--reconnect-s", "0")
    code, out, err = finish(learner)
    assert (2, "", 1) == (code, out, len(err.splitlines())), err
    assert address in err


def test_a_learner_that_cannot_write_its_records_ends_no_other_run(
    server: ServerProcess, tmp_path: Path
) -> None:
    program = hiding(["tensorboard"]) + "from breadbox.cli.main import main\nmain()\n"
    with breadbox.connect(server.address) as client:
        client.start_session("precious")
        done = subprocess.run(
            [
                *(sys.executable, "-c", program, "learn"),
                *("--server", server.address, "--run-dir", str(tmp_path)),
            ],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (2, "precious") == (done.returncode, client.get_buffer().session_id), done.stderr
        client.end_session("precious")
    assert how_to_install("learner") in done.stderr
