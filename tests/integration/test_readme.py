"""The code in README.md, run as a reader would run it against a running server."""

import re
from pathlib import Path

import numpy as np
import pytest

import breadbox
from breadbox.fragment import Fragment
from breadbox.testing import start_server

pytestmark = pytest.mark.integration

README = Path(__file__).resolve().parents[2] / "README.md"
STEP_COUNT = 4


def python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


def some_fragment(index: int) -> Fragment:
    flags = np.zeros(STEP_COUNT, dtype=bool)
    return Fragment(
        worker_id="w0",
        fragment_index=index,
        session_id="s",
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
    assert len([line for line in learner.splitlines() if line.strip()]) == 5
    with (
        start_server(store=f"file://{tmp_path / 'store'}") as server,
        breadbox.connect(server.address) as client,
    ):
        client.start_session("s")
        client.append_many([some_fragment(index) for index in range(32)])

        # Fresh names, as in a script of its own; without them the client would never be closed.
        names: dict[str, breadbox.Client] = {}
        exec(learner.replace("localhost:50051", server.address), names)
        names["client"].close()

        state = client.get_buffer().state
    printed = capsys.readouterr().out
    assert printed.count(f"(8, {STEP_COUNT})") == 4, "four batches of eight"
    assert state.lease_count == 0, "released on leaving the with statement"


def test_the_producer_line_appends_a_fragment(tmp_path: Path) -> None:
    (producer,) = [block for block in python_blocks() if "client.append(" in block]
    with (
        start_server(store=f"file://{tmp_path / 'store'}") as server,
        breadbox.connect(server.address) as client,
    ):
        client.start_session("s")

        exec(producer, {"client": client, "fragment": some_fragment(0)})

        assert client.get_buffer().state.fragment_count == 1
