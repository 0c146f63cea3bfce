"""Fragments that are well-formed and poison: a learner leaves each kind out, and trains on."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import grpc
import gymnasium
import numpy as np
import pytest

import breadbox
from breadbox.model.fragment import Fragment
from breadbox.model.types import BufferState, SchemaPolicy
from breadbox.payload import encode_tree
from breadbox.payload.fragments import fragment_tree
from breadbox.stores import open_store
from breadbox.v1 import fragment_pb2, replay_buffer_service_pb2_grpc
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox_learner.spaces import Spaces
from breadbox_learner.training.fitting import Fitting, expected_rows
from breadbox_learner.training.source import LeaseSource
from hostile.harness import attacked_server
from support.eventually import eventually_sync as eventually
from support.feeder import feeding
from support.forged_payloads import MIB, bomb_of
from support.fragments import vector_fragment
from support.load import CALL_S, fragments_of
from support.server_process import ServerProcess

STEPS = 4
CARTPOLE = gymnasium.make("CartPole-v1")


def fragment(index: int = 0, **fields: Any) -> Fragment:
    plain = vector_fragment(index, worker_id="mallory", step_count=STEPS)
    obs = {"obs": np.zeros((STEPS, 4), np.float32), "next_obs": np.zeros(4, np.float32)}
    return replace(
        plain, **{**obs, "log_prob": np.zeros(STEPS, np.float32), "in_state": None, **fields}
    )


def poisoned(name: str, value: float) -> Fragment:
    made = fragment()
    array = getattr(made, name).copy()
    array[-1] = value
    return replace(made, **{name: array})


FEW = np.zeros((1, 4), np.float32)
POISON: dict[str, Callable[[], Fragment]] = {
    "observations of another shape": lambda: fragment(
        obs=np.zeros((STEPS, 3), np.float32), next_obs=np.zeros(3, np.float32)
    ),
    "an action that does not exist": lambda: poisoned("action", 2),
    "a negative action": lambda: poisoned("action", -1),
    "a reward that is no number": lambda: poisoned("reward", np.nan),
    "an infinite observation": lambda: poisoned("obs", np.inf),
    "text for observations": lambda: fragment(obs=np.full((STEPS, 4), "x")),
    "numbers wider than tensors": lambda: fragment(obs=np.zeros((STEPS, 4), np.longdouble)),
    "a tree of observations": lambda: fragment(obs={"0": np.zeros((STEPS, 4), np.float32)}),
    "a final observation of no step": lambda: fragment(
        final_obs_step=np.array([STEPS], np.int32), final_obs=FEW
    ),
    "final observations of another shape": lambda: fragment(
        final_obs_step=np.array([1], np.int32), final_obs=np.zeros((1, 9), np.float32)
    ),
    "a next observation of another shape": lambda: fragment(next_obs=np.zeros(2, np.float32)),
    "flags that are numbers": lambda: fragment(terminated=np.zeros(STEPS, np.float32)),
    "returns of another shape": lambda: fragment(
        extras={"episode_return": np.zeros((STEPS, 2), np.float32)}
    ),
}


def encoded(made: Fragment) -> bytes:
    return b"".join(encode_tree(fragment_tree(made)))


class Buffer:
    """A buffer of a server, and a producer whose fragments nobody checks before they are sent."""

    def __init__(self, server: ServerProcess, url: str, name: str, stack: ExitStack) -> None:
        self.address = server.address
        self.name = name
        self.client = stack.enter_context(breadbox.connect(server.address, buffer=name))
        self._store = open_store(url)
        stack.callback(self._store.close)
        channel = grpc.insecure_channel(server.address)
        stack.callback(channel.close)
        self._stub = replay_buffer_service_pb2_grpc.ReplayBufferServiceStub(channel)
        self._count = 0

    def append(self, payload: bytes, worker: str = "mallory") -> None:
        """Announce a payload as the next fragment of the session, under its newest version."""
        seen = self.client.get_buffer()
        references = self._store.write_many([[memoryview(payload)]])
        version = seen.model_version or 0
        (metadata,) = fragments_of(references, worker=worker, first=self._count, version=version)
        metadata.session_id = seen.session_id
        self._count += 1
        reply = self._stub.AppendFragments(
            pb.AppendFragmentsRequest(buffer=self.name, fragments=[metadata]), timeout=CALL_S
        )
        assert fragment_pb2.ADMISSION_OUTCOME_ADMITTED == reply.results[0].outcome

    @property
    def state(self) -> BufferState:
        return self.client.get_buffer().state


@pytest.fixture(scope="module")
def store_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"file://{tmp_path_factory.mktemp('store')}"


@pytest.fixture(scope="module")
def server(store_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = attacked_server(
        *("--store", store_url, "--uses-max", "3", "--schema", "any"),
        log=tmp_path_factory.mktemp("log") / "log",
    )
    server.start()
    yield server
    server.stop()


@pytest.fixture
def buffer(server: ServerProcess, store_url: str) -> Iterator[Buffer]:
    """One of the test's own."""
    with ExitStack() as stack:
        made = Buffer(server, store_url, f"of-{uuid4().hex}", stack)
        made.client.create_buffer(
            made.name, breadbox.BufferConfig(uses_max=3, schema=SchemaPolicy.ANY)
        )
        yield made
        made.client.delete_buffer(made.name)


@pytest.mark.parametrize("honest_count", [0, 3])
@pytest.mark.parametrize("kind", POISON)
def test_poison_is_left_out_and_quarantined_and_the_rest_is_trained_on(
    buffer: Buffer, kind: str, honest_count: int
) -> None:
    """Also where nothing honest stands beside it to differ from."""
    buffer.client.start_session("s")
    buffer.append(encoded(POISON[kind]()))
    for _ in range(honest_count):
        buffer.append(encoded(fragment()), worker="honest")
    spaces = Spaces(CARTPOLE.observation_space, CARTPOLE.action_space)
    fitting = Fitting(expected_rows(spaces, None), spaces)
    source = LeaseSource(buffer.client, fragment_count=1 + honest_count, fitting=fitting)
    try:
        if honest_count:
            for misfit_count in (1, 2):
                fetched = source.next(lambda: False)
                assert fetched is not None
                assert ["honest"] * 3 == fetched.batch.worker_ids
                assert misfit_count == fitting.misfit_count
                fetched.release(True)
        else:
            assert None is source.next(lambda: buffer.state.chunk_count == 0)
    finally:
        source.close()
    state = buffer.state
    assert (honest_count, 1) == (state.chunk_count, state.counters["chunks_evicted_quarantined"])
    assert ["mallory"] == [each.worker_id for each in state.quarantined]


@pytest.mark.long
def test_a_learner_trains_on_while_poison_of_every_kind_comes(
    server: ServerProcess, store_url: str, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        _train_on_poison(Buffer(server, store_url, "default", stack), tmp_path)


def _train_on_poison(buffer: Buffer, tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def updates() -> int:
        path = folder / "progress.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    quick = ("--fragments-per-batch", "16", "--minibatch-fragments", "8", "--no-tensorboard")
    clean = {name: text for name, text in os.environ.items() if not name.startswith("BREADBOX_")}
    with (tmp_path / "learner.log").open("w") as log:
        arguments = ("--server", buffer.address, "--run-dir", str(folder), *quick)
        learner = subprocess.Popen(
            [sys.executable, "-m", "breadbox.cli.main", "learn", *arguments],
            stdout=log,
            stderr=log,
            env={**clean, "OMP_NUM_THREADS": "1"},
        )

    def goes_on(wanted: int) -> Callable[[], bool]:
        return lambda: updates() >= wanted or learner.poll() is not None

    kinds = [*(encoded(made()) for made in POISON.values()), b"\xff" * 8, bomb_of(1, 1024 * MIB)]
    try:
        with feeding(buffer.address, steps_per_fragment=STEPS):
            eventually(lambda: updates() > 0, within_s=90)
            for payload in kinds:
                for _ in range(4):
                    buffer.append(payload)
                eventually(goes_on(updates() + 3), within_s=90)
                assert None is learner.poll(), (tmp_path / "learner.log").read_text()[-2000:]
    finally:
        learner.kill()
        learner.wait()
    records = [json.loads(line) for line in (folder / "progress.jsonl").read_text().splitlines()]
    assert sum(record["misfits"] for record in records) >= len(kinds)
    assert {each.worker_id for each in buffer.state.quarantined} <= {"mallory"}
