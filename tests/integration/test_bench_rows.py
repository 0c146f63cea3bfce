"""`make bench` measures what it says, and shows every row."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from bench import report
from bench.learner import copies_row
from bench.measure import Figure
from bench.processes import breadbox_server, redis_server
from bench.workloads import SESSION_ID, atari_fragment, numbered

import breadbox
from breadbox.stores import bulk
from support.compiler import needs_compiler

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def client() -> Iterator[breadbox.Client]:
    with (
        redis_server() as path,
        breadbox_server(f"unix://{path}") as server,
        breadbox.connect(server.address) as client,
    ):
        client.start_session(SESSION_ID)
        yield client


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=needs_compiler)])
def test_a_byte_is_copied_once_on_its_way_to_a_batch_whether_loads_are_compiled_or_not(
    client: breadbox.Client, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "is_compiled", is_compiled)
    fragments = numbered(atari_fragment(), f"compiled-{is_compiled}")
    client.append_many([next(fragments) for _ in range(2)])
    with client.fetch(fragment_count=2, max_wait_s=10) as lease:
        figure = copies_row(client, list(lease.references))
    # Of a reply that is there at once, what is received ahead (64 KiB) is copied once more.
    ahead = 0.0 if is_compiled else 64 * 2**10 / (next(fragments).obs.nbytes)
    assert 0.95 <= figure.value <= 1.05 + ahead


def test_a_row_is_drawn_beside_as_many_others_as_it_has(tmp_path: Path) -> None:
    peers = {f"peer {number}": float(number) for number in range(12)}
    report.write([Figure("load", "vpt", 1.0, "GB/s", 2.0, "alone", peers=peers)], tmp_path)
    assert b"\x89PNG" == (tmp_path / "results.png").read_bytes()[:4]
