"""Priorities through real processes: given, told, changed, and still there after a kill."""

import itertools
import math
from collections.abc import Iterator

import pytest

import breadbox
from breadbox.model.errors import InvalidRequestError
from breadbox.model.types import PrioritiesReply
from support.fragments import vector_fragment
from support.server_process import ServerProcess

pytestmark = pytest.mark.integration

NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    with ServerProcess(
        *("--store", f"file://{folder}/store", "--uses-max", "1000"),
        *("--sampler", "prioritised", "--priority-exponent", "2"),
        log=folder / "log",
    ) as server:
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[breadbox.Client]:
    """With a buffer of its own, in a session."""
    name = f"buffer-{next(NUMBERS)}"
    with breadbox.connect(server.address, buffer=name) as connected:
        connected.create_buffer(name, connected.get_buffer("default").config)
        connected.start_session("s")
        yield connected


def test_priorities_are_told_changed_and_outlive_the_server(
    server: ServerProcess, client: breadbox.Client
) -> None:
    config = client.get_buffer().config
    assert ("prioritised", 2.0) == (config.sampler, config.priority_exponent)
    for index, priority in enumerate((1.0, 0.0, 3.0)):
        fragment = vector_fragment(index)
        fragment.priority = priority
        client.append(fragment)
    with client.fetch(fragment_count=2) as lease:
        told = {each.chunk_id: each for each in lease.references}
        assert {0: 0.1, 2: 0.9} == {key: each.probability for key, each in told.items()}
        assert {0: 1.0, 2: 3.0} == {key: each.priority for key, each in told.items()}
        assert {3} == {each.population for each in told.values()}
        assert {1.0, 3.0} == {each.priority for each in client.load_fragments([*told.values()])}
    updates = {0: 0.0, 1: 4.0, 77: 1.0}
    assert PrioritiesReply(2, 1, 2) == client.update_priorities(updates, delete=[2, 99])
    server.kill()
    server.start()
    with client.fetch(1) as lease:
        (only,) = lease.references
        assert (1, 4.0, 1.0, 2) == (
            only.chunk_id,
            only.priority,
            only.probability,
            only.population,
        )
    assert PrioritiesReply(0, 0, 1) == client.update_priorities({2: 5.0})


def test_more_priorities_than_a_call_takes_are_set_all_the_same(client: breadbox.Client) -> None:
    client.append(vector_fragment(0))
    many = dict.fromkeys(range(5000), 2.0)
    reply = client.update_priorities(many, delete=range(10_000, 12_100))
    assert PrioritiesReply(1, 0, 4999 + 2100) == reply
    assert PrioritiesReply(0, 0, 0) == client.update_priorities({})


@pytest.mark.parametrize("priority", [math.nan, math.inf, -1.0, 1e31, "high", None])
def test_a_priority_that_is_none_is_refused_before_anything_is_sent(
    client: breadbox.Client, priority: float
) -> None:
    client.append(vector_fragment(0))
    with pytest.raises(InvalidRequestError, match="priorities must be numbers from 0 to 1e"):
        client.update_priorities({0: 5.0, 1: priority})
    with client.fetch(1) as lease:
        assert [1.0] == [each.priority for each in lease.references]
