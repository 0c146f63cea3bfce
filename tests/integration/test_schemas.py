"""One schema in a session: a wrong producer is told what is wrong, and nobody else meets it."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import breadbox
from breadbox.model.errors import SchemaMismatchError
from breadbox.model.fragment import Fragment
from breadbox.model.types import AdmissionOutcome, ArrayType, BufferConfig, SchemaPolicy
from breadbox.reading.batches import load_batch
from support.eventually import eventually_sync
from support.fragments import vector_fragment
from support.server_process import ServerProcess, plain_environment

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

WAIT_S = 120.0
ADMITTED = AdmissionOutcome.ADMITTED


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess("--store", f"file://{tmp_path}/store", log=tmp_path / "log") as server:
        yield server


def image_fragment(index: int, worker_id: str = "images", session_id: str = "s") -> Fragment:
    fragment = vector_fragment(index, worker_id=worker_id, session_id=session_id)
    fragment.obs = {"image": np.zeros((4, 8, 8, 3), np.uint8)}
    fragment.next_obs = {"image": np.zeros((8, 8, 3), np.uint8)}
    return fragment


def test_the_schema_of_a_session_is_shown_and_outlives_the_server(server: ServerProcess) -> None:
    with breadbox.connect(server.address) as client:
        client.start_session("s")
        assert client.get_buffer().schema is None
        assert ADMITTED == client.append(vector_fragment(0)).outcome
        schema = client.get_buffer().schema
        assert schema is not None
        assert (ArrayType("<f4", (3,)), ArrayType("<f4", ())) == (schema["obs"], schema["reward"])
        assert ArrayType("<f4", (3,)) == schema["next_obs"]
        server.kill()
        server.start()
        assert schema == client.get_buffer().schema
        with pytest.raises(SchemaMismatchError) as refused:
            client.append(image_fragment(0))
        wanted = ("obs", "float32[3]", "nothing")
        assert wanted == (refused.value.path, refused.value.wanted, refused.value.got)
        assert "--schema any" in str(refused.value)
        assert ADMITTED == client.append(vector_fragment(1)).outcome
        with client.fetch(fragment_count=2) as lease:
            assert (2, 4, 3) == load_batch(client.store, lease.references).obs.shape
            assert 1 == len({each.metadata.schema_hash for each in lease.references} - {0})
        client.start_session("next")
        assert ADMITTED == client.append(image_fragment(0, session_id="next")).outcome


def test_producers_of_another_origin_are_refused_in_its_session_also_after_a_restart(
    server: ServerProcess,
) -> None:
    with (
        breadbox.connect(server.address) as silent,
        breadbox.connect(server.address) as one,
        breadbox.connect(server.address) as other,
    ):
        one.declare_origin({"wrappers": "none", "policy": "A"})
        other.declare_origin({"wrappers": "Normalize()"})
        silent.start_session("s")
        assert ADMITTED == silent.append(vector_fragment(0, worker_id="silent")).outcome
        assert ADMITTED == one.append(vector_fragment(0, worker_id="one")).outcome
        for _ in range(2):
            with pytest.raises(SchemaMismatchError) as refused:
                other.append(vector_fragment(0, worker_id="other"))
            wanted = ("wrappers", "none", "Normalize()")
            assert wanted == (refused.value.path, refused.value.wanted, refused.value.got)
            server.kill()
            server.start()
        assert ADMITTED == one.append(vector_fragment(1, worker_id="one")).outcome
        assert ADMITTED == silent.append(vector_fragment(1, worker_id="silent")).outcome
        silent.start_session("next")
        fragments = [vector_fragment(0, worker_id=name, session_id="next") for name in "ab"]
        assert ADMITTED == other.append(fragments[0]).outcome
        with pytest.raises(SchemaMismatchError, match="wrappers"):
            one.append(fragments[1])
        other.declare_origin({"wrappers": "x" * 513})
        silent.start_session("third")
        with pytest.raises(breadbox.errors.InvalidRequestError, match="16 origins, of 512"):
            other.append(vector_fragment(0, session_id="third"))


def test_an_origin_declared_anew_is_compared_as_well(server: ServerProcess) -> None:
    with breadbox.connect(server.address) as client:
        client.start_session("s")
        client.declare_origin({"wrappers": "none"})
        assert ADMITTED == client.append(vector_fragment(0)).outcome
        client.declare_origin({"wrappers": "Normalize()"})
        with pytest.raises(SchemaMismatchError, match="none wanted, Normalize"):
            client.append(vector_fragment(1))
        client.declare_origin({"wrappers": "none"})
        assert ADMITTED == client.append(vector_fragment(1)).outcome


def test_a_buffer_may_take_any_schema(server: ServerProcess) -> None:
    config = BufferConfig(schema=SchemaPolicy.ANY)
    with breadbox.connect(server.address, buffer="mixed") as client:
        client.create_buffer("mixed", config)
        client.start_session("s")
        many = [vector_fragment(0), image_fragment(0), vector_fragment(1)]
        assert [ADMITTED] * 3 == [each.outcome for each in client.append_many(many)]
        server.kill()
        server.start()
        described = client.get_buffer()
        assert SchemaPolicy.ANY is described.config.schema
        assert [True, False] == ["obs" in each for each in described.schemas]
        with client.fetch(fragment_count=3) as lease:
            assert 3 == len(list(lease.fragments()))


def test_the_command_line_shows_a_schema_as_a_table(server: ServerProcess) -> None:
    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "breadbox.cli.main", "buffers", *arguments]
        done = subprocess.run(
            [*command, "--server", server.address],
            capture_output=True,
            text=True,
            check=True,
            env=plain_environment(),
        )
        return done.stdout

    assert "its arrays are not known" in run("show", "default")
    with breadbox.connect(server.address) as client:
        client.start_session("s")
        client.append(image_fragment(0))
    lines = [line.split() for line in run("show", "default").splitlines()]
    assert ["obs.image", "|u1", "8", "×", "8", "×", "3"] in lines
    assert ["reward", "<f4", "-"] in lines
    shown = json.loads(run("show", "default", "--json"))
    assert ["|u1", [8, 8, 3]] == shown["schemas"][0]["obs.image"]
    assert "any schema" in run("update", "default", "--schema", "any")


@pytest.mark.long
def test_a_worker_with_other_observations_ends_and_says_why_and_the_learner_goes_on(
    server: ServerProcess, tmp_path: Path
) -> None:
    progress = tmp_path / "run" / "progress.jsonl"

    def start(stack: ExitStack, name: str, *arguments: str) -> "subprocess.Popen[bytes]":
        with (tmp_path / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "breadbox.cli.main", *arguments, "--server", server.address],
                cwd=Path(__file__).parent.parent,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=plain_environment(),
            )
        stack.callback(process.wait)
        stack.callback(process.kill)
        return process

    def updates() -> int:
        return len(progress.read_text().splitlines()) if progress.exists() else 0

    with ExitStack() as stack:
        learner = start(
            *(stack, "learner", "learn", "--run-dir", str(progress.parent), "--no-tensorboard"),
            *("--fragments-per-batch", "8", "--minibatch-fragments", "8"),
        )
        right = start(stack, "right", "rollout", "--env", "CartPole-v1", "--num-envs", "2")
        eventually_sync(lambda: updates() >= 2, "the learner learning", within_s=WAIT_S)
        wrong = start(stack, "wrong", "rollout", "--env", "support.wide_cartpole:make")
        assert 0 != wrong.wait(WAIT_S)
        wanted = updates() + 3
        eventually_sync(lambda: updates() >= wanted, "the learner going on", within_s=WAIT_S)
        assert [None, None] == [learner.poll(), right.poll()]
    said = (tmp_path / "wrong.log").read_text()
    assert "obs: float32[4] wanted, float64[4] got (and 1 more differ)" in said
    assert "start a new session" in said
    assert "Traceback" not in said
