"""Goal: every piece of code in docs/learner-cookbook.md does what the page says.

Method: run it as it stands, against a real server and, where the page asks for them, real rollout
workers. Each block is named by a comment in front of it.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import gymnasium
import numpy as np
import pytest
import torch

import breadbox
from breadbox.testing import ServerProcess, start_server
from breadbox_policies import make_policy, policy_weights
from support.feeder import feeding

COOKBOOK = Path(__file__).resolve().parents[2] / "docs" / "learner-cookbook.md"
ADDRESS = "localhost:50051"
SEEDS = range(5)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(580)]


def python_blocks() -> dict[str, str]:
    found = re.findall(r"<!-- (\S+) -->\n```python\n(.*?)```", COOKBOOK.read_text(), re.DOTALL)
    return dict(found)


def run_block(name: str, address: str, **names: Any) -> dict[str, Any]:
    code = python_blocks()[name].replace(ADDRESS, address)
    exec(compile(code, f"{COOKBOOK}, {name}", "exec"), names)  # The page is ours.
    return names


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with start_server() as running:
        yield running


@pytest.fixture
def client(server: ServerProcess) -> Iterator[breadbox.Client]:
    with breadbox.connect(server.address) as made:
        yield made


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@contextmanager
def rollout_workers(address: str, count: int) -> Iterator[None]:
    """As the page has them started, but seeded."""
    environment = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile() as log:
        workers = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "breadbox.cli.main", "rollout"),
                    *("--env", "CartPole-v1", "--server", address, "--seed", str(number)),
                ],
                env=environment,
                stdout=log,
                stderr=log,
            )
            for number in range(count)
        ]
        try:
            yield
            assert [None] * count == [worker.poll() for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait(30)


def test_every_block_has_a_name_and_is_run_here() -> None:
    assert COOKBOOK.read_text().count("```python") == len(python_blocks())
    named = {"learner", "asyncio", "advantages", "dataset", "ranks", "staleness"}
    assert named == set(python_blocks())


@pytest.mark.long
def test_the_whole_learner_learns_under_every_seed(
    client: breadbox.Client, server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fewer versions than on the page; what it prints rises from chance to what the page says."""
    page = python_blocks()["learner"].replace(ADDRESS, server.address)
    code = page.replace("range(1, 101)", "range(1, 41)")
    assert code != page
    first, best = [], []
    with rollout_workers(server.address, 2):
        for seed in SEEDS:
            torch.manual_seed(seed)
            exec(compile(code, str(COOKBOOK), "exec"), {})  # The page is ours.
            printed = capsys.readouterr().out
            returns = [float(text) for text in re.findall(r"mean return ([\d.]+)", printed)]
            assert 4 == len(returns), printed
            first.append(returns[0])
            best.append(max(returns))
            buffer = client.get_buffer()
            assert ("", 0) == (buffer.session_id, buffer.state.lease_count)
    told = f"seeds {list(SEEDS)}: from {first} to {best}"
    assert max(first) < 60, told
    assert min(best) > 100, told


def test_the_asyncio_example_prints_batches(
    client: breadbox.Client, server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    with feeding(server.address, fragments_max=64), fed_session(client):
        run_block("asyncio", server.address)
    lines = capsys.readouterr().out.splitlines()
    assert 4 == len(lines)
    assert all(line.startswith("(8, 16, 4) ") for line in lines), lines


def test_the_advantages_of_a_batch_are_estimated(
    client: breadbox.Client, server: ServerProcess
) -> None:
    with feeding(server.address), fed_session(client), client.fetch(16, 60) as lease:
        batch = client.load_batch(lease.references)
        names = run_block(
            "advantages",
            server.address,
            batch=batch,
            value=np.zeros((16, 16), np.float32),
            next_value=np.zeros(16, np.float32),
        )
    assert (16, 16) == names["estimated"].advantage.shape
    assert (names["estimated"].advantage >= 1.0 - 1e-6).all()  # Of rewards of 1 and no value.


@pytest.mark.long
def test_the_dataset_gives_batches_from_worker_processes(
    client: breadbox.Client, server: ServerProcess
) -> None:
    with feeding(server.address), fed_session(client):
        names = run_block("dataset", server.address)
        batches = iter(names["loader"])
        assert [(8, 16, 4)] * 6 == [tuple(next(batches).obs.shape) for _ in range(6)]
        del batches


def test_a_batch_says_how_stale_it_is_at_its_use(
    client: breadbox.Client, server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    with feeding(server.address), fed_session(client):
        run_block("staleness", server.address, client=client, version=2)
    assert ["1"] * 4 + [f"{np.zeros(32, np.int64)} 0"] == capsys.readouterr().out.splitlines()


def test_ranks_get_shares_of_one_draw(client: breadbox.Client, server: ServerProcess) -> None:
    granted = []
    with feeding(server.address), fed_session(client):
        for rank in range(4):
            place = {"client": client, "rank": rank, "world_size": 4, "run": "r", "update": 1}
            granted.append(run_block("ranks", server.address, **place)["lease"].references)
    payloads = {each.metadata.payload.payload_id for share in granted for each in share}
    assert ([16] * 4, 64) == ([len(share) for share in granted], len(payloads))


@contextmanager
def fed_session(client: breadbox.Client) -> Iterator[None]:
    """A session with a model, which is what whoever feeds waits for."""
    env = gymnasium.make("CartPole-v1")
    policy = make_policy("mlp", env.observation_space, env.action_space)
    env.close()
    session = uuid4().hex
    client.start_session(session)
    client.publish(session, 1, policy_weights(policy))
    try:
        yield
    finally:
        client.end_session(session)


def test_every_picture_and_file_it_links_to_exists() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)\)", COOKBOOK.read_text())
    missing = [link for link in links if not (COOKBOOK.parent / link).exists()]
    assert [] == missing


def test_the_page_says_of_learn_check_what_its_figures_are() -> None:
    docs = COOKBOOK.parent
    rows = json.loads((docs / "images" / "learn-check.json").read_text())
    assert all(row["reached"] for row in rows)
    made, trained = ([row[name] for row in rows] for name in ("environment_steps", "steps"))
    assert (
        f"after {min(made):,} to {max(made):,} environment steps, "
        f"of which the learner trained on {min(trained):,} to {max(trained):,}"
    ) in (docs / "studies" / "learning.md").read_text()
