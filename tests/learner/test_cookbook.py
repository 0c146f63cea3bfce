"""The learner in docs/learner-cookbook.md, run as a reader would run it."""

import re
from pathlib import Path

import pytest

import breadbox
from breadbox.testing import start_server
from support.feeder import feeding

COOKBOOK = Path(__file__).resolve().parents[2] / "docs" / "learner-cookbook.md"


def python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", COOKBOOK.read_text(), flags=re.DOTALL)


@pytest.mark.integration
def test_the_plain_torch_learner_trains_on_a_running_server() -> None:
    (learner,) = [block for block in python_blocks() if "optimizer.step()" in block]
    with (
        start_server() as server,
        breadbox.connect(server.address) as client,
        feeding(server.address),
    ):
        learner = learner.replace("localhost:50051", server.address)
        exec(learner.replace("range(1, 101)", "range(1, 4)"), {})
        buffer = client.get_buffer()
    assert 3 == buffer.state.counters["versions_published"]
    assert ("", 0) == (buffer.session_id, buffer.state.lease_count)


def test_every_python_block_parses() -> None:
    for block in python_blocks():
        compile(block, str(COOKBOOK), "exec")


def test_every_picture_and_file_it_links_to_exists() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)\)", COOKBOOK.read_text())
    missing = [link for link in links if not (COOKBOOK.parent / link).exists()]
    assert [] == missing
