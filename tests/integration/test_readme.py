"""The code in README.md and docs/rollout.md, run as a reader would, against a running server."""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import numpy as np
import pytest

import breadbox
from breadbox.cli.main import COMMANDS, load_command
from breadbox.model.fragment import Fragment
from breadbox.testing import start_server

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
ROLLOUT = ROOT / "docs" / "rollout.md"
STEP_COUNT = 4


def python_blocks(page: Path = README) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


def some_fragment(index: int, session_id: str = "s") -> Fragment:
    flags = np.zeros(STEP_COUNT, dtype=bool)
    return Fragment(
        worker_id="w0",
        fragment_index=index,
        session_id=session_id,
        model_version_min=0,
        model_version_max=0,
        obs=np.full((STEP_COUNT, 3), index, np.float32),
        action=np.zeros(STEP_COUNT, np.int64),
        reward=np.ones(STEP_COUNT, np.float32),
        terminated=flags,
        truncated=flags,
        first=flags,
        episode_id=np.zeros(STEP_COUNT, np.int64),
        next_obs=np.zeros(3, np.float32),
    )


def test_the_learner_lines_fetch_batches_from_a_running_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (learner,) = [block for block in python_blocks() if "client.fetch(" in block]
    lines = [line for line in learner.splitlines() if line.strip()]
    assert ("import breadbox", 6) == (lines[0], len(lines)), "five lines, and the import"
    with (
        start_server(store=f"file://{tmp_path / 'store'}") as server,
        breadbox.connect(server.address) as client,
    ):

        def work(runs: int) -> None:
            state = None
            for _ in range(runs):
                state = client.watch_model(state, max_wait_s=60)
                assert state is not None
                client.append_many([some_fragment(index, state.session_id) for index in range(32)])

        with ThreadPoolExecutor() as pool:
            working = pool.submit(work, 2)
            for _ in range(2):  # It can be run again.
                # Fresh names, as in a script; without them the client would never be closed.
                names: dict[str, breadbox.Client] = {}
                exec(learner.replace("localhost:50051", server.address), names)
                names["client"].close()
            working.result()

        state = client.get_buffer().state
    printed = capsys.readouterr().out
    line = f"(8, {STEP_COUNT}) (8, {STEP_COUNT}, 3)"
    assert [line] * 8 == printed.splitlines(), "four batches of eight, twice"
    assert state.lease_count == 0, "released on leaving the with statement"


def test_the_producer_lines_append_every_step(tmp_path: Path) -> None:
    (producer,) = [block for block in python_blocks() if "breadbox.StepWriter(" in block]
    with (
        start_server(store=f"file://{tmp_path / 'store'}") as server,
        breadbox.connect(server.address) as client,
    ):
        client.start_session("s")
        names: dict[str, breadbox.Client] = {}
        exec(producer.replace("localhost:50051", server.address), names)
        names["client"].close()

        assert 2_000 // 32 == client.get_buffer().state.fragment_count
        with client.fetch(fragment_count=1) as lease:
            (batch,) = lease.batches(batch_size=1)
    assert ((1, 32, 4), (1, 32)) == (batch.obs.shape, batch.action.shape)


def test_the_worker_of_ones_own_has_every_fragment_admitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (worker,) = [block for block in python_blocks(ROLLOUT) if "appender.append(" in block]
    with (
        start_server(store=f"file://{tmp_path / 'store'}") as server,
        breadbox.connect(server.address) as client,
    ):
        client.start_session("s")
        client.publish("s", 1, {"layer": np.zeros(3, np.float32)})

        exec(worker.replace("localhost:50051", server.address), {})

        counters = client.get_buffer().state.counters
        with client.fetch(fragment_count=20, max_wait_s=10.0) as lease:
            (batch,) = lease.batches(batch_size=20)
            fragments = sorted(lease.fragments(), key=lambda each: each.fragment_index)
    assert 20 == counters["fragments_admitted"]
    assert "20 of 20 admitted" in capsys.readouterr().out
    assert ((20, 32, 4), (20, 32)) == (batch.obs.shape, batch.reward.shape)
    assert np.array_equal(batch.first[:, 1:], (batch.terminated | batch.truncated)[:, :-1])
    for fragment in fragments:
        check_last_observations(fragment)


@pytest.mark.long
def test_the_policy_of_ones_own_acts_and_learns(tmp_path: Path) -> None:
    (policy,) = [block for block in python_blocks(ROLLOUT) if "PolicyModule" in block]
    (tmp_path / "my_policy.py").write_text(policy)
    common = ["--env", "CartPole-v1", "--policy", "my_policy:make"]
    with start_server(store=f"file://{tmp_path / 'store'}") as server:
        command = [sys.executable, "-P", "-m", "breadbox.cli.main"]
        worker = subprocess.Popen(
            [*command, "rollout", "--server", server.address, "--num-envs", "2", *common],
            cwd=tmp_path,
        )
        try:
            learner = subprocess.run(
                [*command, "learn", "--server", server.address, "--fragments-per-batch", "4",
                 "--updates-max", "2", *common],
                cwd=tmp_path, check=False, capture_output=True, text=True, timeout=120.0,
            )  # fmt: skip
            worker.terminate()
            assert 0 == worker.wait(60.0)
        finally:
            worker.kill()
            worker.wait()
    assert 0 == learner.returncode, learner.stderr


def check_last_observations(fragment: Fragment) -> None:
    """What follows a step, as Q-learning sees it, obeys CartPole's law of motion everywhere."""
    following = np.concatenate([fragment.obs[1:], fragment.next_obs[None]])
    ends = np.flatnonzero(fragment.ended)
    assert fragment.final_obs_step is not None
    assert ends.tolist() == fragment.final_obs_step.tolist()
    following[ends] = fragment.final_obs if len(ends) else following[ends]
    for place in (0, 2):  # the cart's and the pole's: place + 0.02 s * speed
        moved = fragment.obs[:, place] + 0.02 * fragment.obs[:, place + 1]
        np.testing.assert_allclose(moved, following[:, place], atol=1e-5)


@pytest.mark.parametrize("page", [README, ROLLOUT, ROOT / "docs" / "operate.md"])
def test_every_link_to_a_file_or_heading_leads_somewhere(page: Path) -> None:
    dead = []
    for target, heading in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", page.read_text()):
        file = page.parent / target if target else page
        if not file.exists():
            dead.append(target)
        elif heading:
            titles = re.findall(r"^#+ (.*)$", file.read_text(), flags=re.MULTILINE)
            anchors = [
                re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles
            ]
            if heading not in anchors:
                dead.append(f"{target}#{heading}")
    assert [] == dead


def test_the_readme_leads_to_every_page_and_to_the_one_that_chooses_first() -> None:
    text = README.read_text()
    pages = sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))
    assert [] == [page for page in pages if f"({page})" not in text]
    read_on = text[text.index("## Read on") :]
    assert "docs/which-read.md" == re.findall(r"\]\(([^)]+)\)", read_on)[0]


def test_the_readme_has_every_command() -> None:
    (table,) = re.findall(r"\| command \|.*?\n\n", README.read_text(), flags=re.DOTALL)
    assert [] == [name for name in COMMANDS if not re.search(rf"`(?:breadbox )?{name}`", table)]


def documented_commands() -> list[tuple[str, str, str]]:
    """Page, command and the word behind it of each `breadbox ...` in the documents."""
    pages = [README, *sorted((ROOT / "docs").glob("*.md"))]
    pattern = r"(?:^|`|\$ )breadbox ([a-z]+)(?: ([a-z-]+)\b)?"
    return [
        (page.name, *found)
        for page in pages
        for found in re.findall(pattern, page.read_text(), flags=re.MULTILINE)
    ]


def test_every_command_that_the_documents_name_exists() -> None:
    found = documented_commands()
    assert {"serve", "buffers"} <= {command for _, command, _ in found}
    unknown = []
    for page, name, word in found:
        command = load_command(name) if name in COMMANDS else None
        if command is None or (
            isinstance(command, click.Group) and word not in ("", *command.commands)
        ):
            unknown.append(f"{page}: breadbox {name} {word}")
    assert [] == unknown
