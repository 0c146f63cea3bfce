"""A server that is told another payload store than its journal's: a slip, a move, or a loss."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import breadbox
from support.fragments import vector_fragment
from support.redis_server import RedisServer
from support.server_process import ServerProcess

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

COUNT = 20


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class World:
    """A server whose journal is apart from its payloads, of which it has some."""

    def __init__(
        self, stack: ExitStack, store: str, journal: str, folder: Path, count: int = COUNT
    ) -> None:
        self._journal = journal
        self.server = ServerProcess("--store", store, "--journal", journal, log=folder / "log")
        stack.enter_context(self.server)
        with breadbox.connect(self.server.address) as client:
            client.start_session("s")
            client.append_many([vector_fragment(index) for index in range(count)])
        self.server.kill()

    def held_with(self, store: str, *arguments: str) -> int:
        """How many chunks the server holds that is started on a store, and killed again."""
        self.server.arguments = ("--store", store, "--journal", self._journal, *arguments)
        self.server.start()
        with breadbox.connect(self.server.address) as client:
            chunk_count = client.get_buffer().state.chunk_count
        self.server.kill()
        return chunk_count


def test_a_mistyped_store_is_refused_and_costs_nothing(stack: ExitStack, tmp_path: Path) -> None:
    right, wrong = f"file://{tmp_path}/right", f"file://{tmp_path}/wrong"
    world = World(stack, right, f"file://{tmp_path}/journal", tmp_path)
    with pytest.raises(AssertionError) as caught:
        world.held_with(wrong)
    said = str(caught.value)
    assert f"--store {wrong} holds nothing of the journal" in said
    assert f"{COUNT} payloads in {right}" in said
    assert "--accept-store" in said
    assert "Traceback" not in said
    assert world.held_with(right) == COUNT


def test_a_mistyped_redis_is_refused_without_showing_passwords(
    stack: ExitStack, tmp_path: Path
) -> None:
    right, wrong = (stack.enter_context(RedisServer(password="s3cret")) for _ in range(2))
    world = World(stack, right.url, f"file://{tmp_path}/journal", tmp_path)
    with pytest.raises(AssertionError, match="--accept-store") as caught:
        world.held_with(wrong.url)
    assert "s3cret" not in str(caught.value)
    assert world.held_with(right.url) == COUNT


def test_a_mistyped_store_displaces_nobody(stack: ExitStack, tmp_path: Path) -> None:
    redis = stack.enter_context(RedisServer())
    world = World(stack, f"file://{tmp_path}/right", redis.url, tmp_path)
    world.server.start()
    second = ServerProcess(
        *("--store", f"file://{tmp_path}/wrong", "--journal", redis.url, "--take-over"),
        log=tmp_path / "second",
    )
    with pytest.raises(AssertionError, match="holds nothing of the journal"):
        second.start()
    with breadbox.connect(world.server.address) as client:
        client.append(vector_fragment(COUNT))
        assert client.get_buffer().state.chunk_count == COUNT + 1


def test_a_store_that_was_accepted_needs_no_word_any_more(stack: ExitStack, tmp_path: Path) -> None:
    world = World(stack, f"file://{tmp_path}/old", f"file://{tmp_path}/journal", tmp_path)
    assert world.held_with(f"file://{tmp_path}/new", "--accept-store") == 0
    assert world.held_with(f"file://{tmp_path}/new") == 0


def test_a_store_that_moved_with_all_it_holds_needs_no_word(
    stack: ExitStack, tmp_path: Path
) -> None:
    world = World(stack, f"file://{tmp_path}/old", f"file://{tmp_path}/journal", tmp_path)
    shutil.move(tmp_path / "old", tmp_path / "new")
    assert world.held_with(f"file://{tmp_path}/new") == COUNT


def test_a_store_that_was_lost_needs_no_word(stack: ExitStack, tmp_path: Path) -> None:
    world = World(stack, f"file://{tmp_path}/store", f"file://{tmp_path}/journal", tmp_path)
    shutil.rmtree(tmp_path / "store")
    assert world.held_with(f"file://{tmp_path}/store") == 0


def test_another_store_for_empty_books_needs_no_word(stack: ExitStack, tmp_path: Path) -> None:
    world = World(stack, f"file://{tmp_path}/one", f"file://{tmp_path}/journal", tmp_path, count=0)
    assert world.held_with(f"file://{tmp_path}/two") == 0
