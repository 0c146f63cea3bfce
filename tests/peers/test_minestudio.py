"""MineStudio 1.1.6's own rollout manager, senders, loaders and PPO trainer, on a Breadbox server.

Its package is installed without dependencies. In the place of the simulator are scripted
environments, in the place of Ray threads; wandb keeps what it is given; the policy is a small one.
"""

import collections
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from breadbox.testing import ServerProcess, start_server
from peers.packages import environment, install
from support.redis_server import RedisServer

pytestmark = [pytest.mark.peers, pytest.mark.timeout(580)]

HERE = Path(__file__).parent / "minestudio"
RUN_LIMIT_S = 200.0
PAGE = Path(__file__).parents[2] / "docs" / "minestudio.md"


def switches() -> dict[str, str]:
    """What the page tells users of MineStudio to put into which of its files: path to content."""
    found = re.findall(
        r"`(minestudio/\S+\.py)`[^`]*\n\n<!-- \S+ -->\n```python\n(.*?)```",
        PAGE.read_text(),
        re.S,
    )
    assert 2 == len(found)
    return dict(found)


@pytest.fixture(scope="session")
def minestudio(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As it is published."""
    return install("minestudio==1.1.6", tmp_path_factory.mktemp("packages"))


@pytest.fixture(
    scope="module",
    params=[("file", 1), ("redis", 1), ("file", 2)],
    ids=lambda case: f"{case[0]}-{case[1]}",
)
def case(request: pytest.FixtureRequest) -> tuple[str, int]:
    """Where payloads are, and how many of the page's changes are made: loaders are the second."""
    chosen: tuple[str, int] = request.param
    return chosen


@pytest.fixture(scope="module")
def switched(case: tuple[str, int], minestudio: Path, tmp_path_factory: Any) -> Path:
    """MineStudio with the page's changes."""
    folder: Path = tmp_path_factory.mktemp("switched")
    shutil.copytree(minestudio, folder, dirs_exist_ok=True)
    for path, content in list(switches().items())[: case[1]]:
        assert (folder / path).exists()
        (folder / path).write_text(content)
    return folder


@pytest.fixture(scope="module")
def server(case: tuple[str, int]) -> Iterator[ServerProcess]:
    """With its buffer `default` as it is when nothing is said."""
    if case[0] == "file":
        with start_server() as server:
            yield server
    else:
        with RedisServer(with_tcp=True) as redis, start_server(store=redis.tcp_url) as server:
            yield server


@pytest.fixture(scope="module")
def report(switched: Path, server: ServerProcess, tmp_path_factory: Any) -> dict[str, Any]:
    """What came of six iterations."""
    file = tmp_path_factory.mktemp("run") / "report.json"
    log = file.with_name("log")
    with log.open("wb") as output:
        done = subprocess.run(
            [sys.executable, str(HERE / "driver.py"), str(file)],
            env=environment(switched, HERE / "stand_ins") | {"BREADBOX_SERVER": server.address},
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=RUN_LIMIT_S,
        )
    assert 0 == done.returncode, log.read_text()[-6000:]
    made: dict[str, Any] = json.loads(file.read_text())
    return made


def test_six_iterations_run_on_the_default_buffer(
    report: dict[str, Any], case: tuple[str, int]
) -> None:
    assert report["is_switched"]
    roots = {1: "minestudio", 2: "breadbox_adapters"}
    assert roots[case[1]] == report["loaders_of"].partition(".")[0]
    assert [] == report["failures"]
    assert [12] * 6 == [len(fetched) for fetched in report["fetches"]]
    assert [[1, 2, 3, 4, 5, 6, 7]] * 2 == report["versions"]


def test_every_field_of_every_fragment_is_loaded_as_it_was_sent(report: dict[str, Any]) -> None:
    """Once before advantages, and once in each of two epochs."""
    assert 12 * 6 * 3 == len(report["loaded"])
    for iteration, name, digests in report["loaded"]:
        assert report["sent"][name] == digests, (iteration, name)
    wanted = collections.Counter(
        (number, fragment["name"])
        for number, fetched in enumerate(report["fetches"], 1)
        for fragment in fetched
        for _ in range(3)
    )
    assert wanted == collections.Counter((number, name) for number, name, _ in report["loaded"])


def test_nothing_stale_is_fetched_and_nothing_too_often(report: dict[str, Any]) -> None:
    uses: collections.Counter[int] = collections.Counter()
    for number, fetched in enumerate(report["fetches"], 1):
        assert {number} == {fragment["current"] for fragment in fetched}
        for fragment in fetched:
            assert fragment["current"] - fragment["version"] <= 1
            assert fragment["staleness"] <= 1
        for chunk_id, use_count in {(each["chunk_id"], each["use_count"]) for each in fetched}:
            uses[chunk_id] += 1
            assert uses[chunk_id] == use_count <= 2


def test_chunks_are_as_long_as_the_configuration_says(report: dict[str, Any]) -> None:
    for fetched in report["fetches"]:
        names = [fragment["name"].rsplit("/", 1) for fragment in fetched]
        for (worker, fid), (next_worker, next_fid) in zip(names[::2], names[1::2], strict=True):
            assert (worker, int(fid) + 1) == (next_worker, int(next_fid))


def test_the_records_of_the_replay_buffer_reach_wandb(report: dict[str, Any]) -> None:
    logged = [name for record in report["logged"] for name in record]
    counts = collections.Counter(name for name in logged if name.startswith("replay_buffer/"))
    assert {
        "replay_buffer/fragments_per_second",
        "replay_buffer/replay_buffer_size (chunk)",
        "replay_buffer/model_version",
        "replay_buffer/avg_reuse",
        "replay_buffer/avg_staleness",
    } == set(counts)
    assert 6 == logged.count("trainer/policy_loss")
    for record in report["logged"]:
        assert 0 <= record.get("replay_buffer/avg_reuse", 0) <= 2
        assert 0 <= record.get("replay_buffer/avg_staleness", 0) <= 1


@pytest.mark.parametrize("seed", range(3))
def test_its_data_functions_and_advantages_give_the_same_from_either(
    minestudio: Path, seed: int
) -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / "functions.py"), str(seed)],
        env=environment(minestudio, HERE / "stand_ins"),
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_LIMIT_S,
    )
    assert 0 == done.returncode, done.stderr[-6000:]
    lines = [line.split(" ", 2) for line in done.stdout.splitlines()]
    assert 10 == len(lines)
    for name, count, different in lines:
        assert "[]" == different, (name, count)
        assert int(count) >= 200
