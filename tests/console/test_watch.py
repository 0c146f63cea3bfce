"""Each watch and each buffer fails alone, is logged, and is said on the page."""

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from breadbox.model.errors import PayloadCorruptError, UnauthenticatedError
from breadbox.model.types import (
    ArrayType,
    BufferConfig,
    BufferDescription,
    BufferState,
    FragmentRead,
    FragmentReference,
)
from breadbox_console import watch as watching
from breadbox_console.access import Access
from breadbox_console.watch import Watch, WatchLimits
from support.console import played, reference
from support.eventually import eventually


class FakeClient:
    """A server with two buffers and a fragment of each of two workers; parts of it can fail."""

    address = "fake"

    def __init__(self) -> None:
        self.failing: dict[str, Exception] = {}
        """Errors by what is asked for: a buffer to be described or read, or a worker's payload."""
        self.is_closed = False
        self.look_count = 0
        self.names = ["one", "two"]
        self.newest = 0
        """The chunk that each worker has sent last: worker a the even ones, b the odd ones."""

    @property
    def service(self) -> "FakeClient":
        """Itself: it has the calls of a client and of its service."""
        return self

    async def list_buffers(self) -> list[BufferDescription]:
        self.look_count += 1
        self._fail("list")
        return [self._description(name) for name in self.names]

    async def get_buffer(self, name: str, *, events_after: int, **_: Any) -> BufferDescription:
        self._fail(f"describe {name}")
        return self._description(name)

    async def get_store_config(self) -> Any:
        self._fail("config")
        raise UnauthenticatedError("not for viewers")

    async def read_fragments(self, cursor: int | None, *, buffer: str, **_: Any) -> FragmentRead:
        self._fail(f"read {buffer}")
        held = [
            reference(played(at, worker_id=name), 2 * at + place)
            for at in range(self.newest + 1)
            for place, name in enumerate(("a", "b"))
        ]
        later = [each for each in held if cursor is None or each.chunk_id > cursor]
        if not later:
            await asyncio.sleep(0.05)
        return FragmentRead(
            fragments=tuple(later),
            lease_id=None,
            remaining_s=0.0,
            cursor=held[-1].chunk_id,
            skipped_chunk_count=0,
            session_id="run",
            model_version=0,
        )

    async def describe_arrays(
        self, references: list[FragmentReference]
    ) -> list[dict[str, ArrayType]]:
        return [
            {
                "reward": ArrayType("<f4", (32,)),
                "obs": ArrayType("<f4", (32, 3)),
            }
            for _ in references
        ]

    async def load_fragments(self, references: list[FragmentReference], **_: Any) -> list[Any]:
        for each in references:
            self._fail(f"load {each.metadata.worker_id}")
        return [
            played(each.metadata.fragment_index, worker_id=each.metadata.worker_id)
            for each in references
        ]

    async def close(self) -> None:
        self.is_closed = True

    def _fail(self, what: str) -> None:
        if what in self.failing:
            raise self.failing[what]

    def _description(self, name: str) -> BufferDescription:
        return BufferDescription(
            name=name,
            config=BufferConfig(),
            session_id="run",
            model_version=0,
            state=BufferState(chunk_count=2),
        )


@asynccontextmanager
async def running(client: FakeClient) -> AsyncIterator[Watch]:
    watch = Watch(client, WatchLimits(), lambda _: client)  # type: ignore[arg-type, return-value]
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(watch.run())
        yield watch
        task.cancel()


async def shown(watch: Watch, is_awaited: Callable[[Any], Any]) -> Any:
    """The first overview that is as awaited."""
    async for each in watch.overviews():
        said = json.loads(each)
        if is_awaited(said):
            return said
    raise AssertionError("the overview has ended")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PERIOD_S", "SERVERS_PERIOD_S", "GATHER_S"):
        monkeypatch.setattr(watching, name, 0.01)


def workers(watch: Watch, buffer: str) -> set[str]:
    return {*watch.buffers[buffer].index.workers} if buffer in watch.buffers else set()


@pytest.mark.parametrize("what", ["describe one", "read one"])
async def test_a_buffer_that_fails_is_named_and_the_other_is_shown(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = FakeClient()
    client.failing[what] = TypeError("a bug")
    async with running(client) as watch:
        await eventually(lambda: workers(watch, "two") == {"a", "b"})
        await eventually(lambda: bool(watch.buffers["one"].problems))
        said = await shown(watch, lambda each: each["server"]["concerns"] and each["buffers"])
        assert "two" in [each["name"] for each in said["buffers"]]
        for concern in said["server"]["concerns"]:
            assert concern.startswith("Buffer one cannot be ")
            assert concern.endswith("the console failed: TypeError: a bug")
        client.failing.clear()
        await eventually(lambda: workers(watch, "one") == {"a", "b"})
        await eventually(lambda: not watch.buffers["one"].problems)

    logged = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]
    assert len({*logged}) == len(logged)
    assert "TypeError: a bug" in caplog.text


@pytest.mark.parametrize("error", [TypeError("a bug"), PayloadCorruptError("fails its checksum")])
async def test_a_fragment_that_cannot_be_read_is_said_at_its_worker(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    client = FakeClient()
    client.failing["load a"] = error
    async with running(client) as watch:
        said = await shown(watch, lambda each: len(each["buffers"][0]["workers"]) == 2)
        problems = {each["name"]: each["problems"] for each in said["buffers"][0]["workers"]}

    named = f"sent an unreadable fragment ({type(error).__name__}: {error})"
    assert [] == [each for each in problems.get("b", []) if "cannot be read" in each]
    assert 1 == len(problems["a"])
    assert problems["a"][0].startswith(named)
    assert f"fragment 0 of a is left out: {type(error).__name__}" in caplog.text


async def test_a_look_that_fails_is_said_and_the_next_one_is_taken() -> None:
    client = FakeClient()
    client.failing["list"] = ValueError("a bug")
    async with running(client) as watch:
        await eventually(lambda: watch.problem == "the console failed: ValueError: a bug")
        client.failing.clear()
        await eventually(lambda: not watch.problem)
    assert client.is_closed


async def test_the_reader_of_a_deleted_buffer_ends_and_the_other_reads_on() -> None:
    client = FakeClient()
    async with running(client) as watch:
        await eventually(lambda: workers(watch, "one") == {"a", "b"})
        await eventually(lambda: workers(watch, "two") == {"a", "b"})
        gone, other = (watch.buffers[name].reader for name in ("one", "two"))
        assert gone is not None
        assert other is not None
        client.names.remove("one")
        await eventually(gone.cancelled)
        assert not other.done()


async def test_of_each_buffer_an_episode_is_kept_whole_though_no_page_is_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watching, "KEEP_S", -1.0)
    client = FakeClient()
    async with running(client) as watch:
        for name in ("one", "two"):
            await eventually(lambda: bool(name in watch.buffers and watch.buffers[name].sample))  # noqa: B023
        one = watch.buffers["one"]
        assert one.sample is not None
        assert ("a", True) == (one.sample.worker_id, one.can_be_watched(one.sample))
        await shown(
            watch,
            lambda said: [True] * 2 == [each["watch"] is not None for each in said["buffers"]],
        )
        # Until its time is over no other one is read whole.
        client.newest = 1
        await eventually(lambda: len(one.index.episodes) == 4)
        assert [("a", 0)] == [key[1:] for key in one.kept]
        monkeypatch.setattr(watching, "SAMPLE_S", -1.0)
        client.newest = 2
        await eventually(lambda: [("a", 0), ("a", 2)] == [key[1:] for key in one.kept])


async def test_of_a_listed_buffer_all_of_a_worker_is_kept_within_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = FakeClient()
    async with running(client) as watch:
        await eventually(lambda: workers(watch, "one") == {"a", "b"})
        one = watch.buffers["one"]
        one.is_listed = True
        for client.newest in (1, 2):
            await eventually(lambda: len(one.index.episodes) == 2 * client.newest + 2)
        assert [("a", 0), ("a", 1), ("a", 2)] == [key[1:] for key in one.kept]
        size = one.kept_bytes // 3
        monkeypatch.setattr(watching, "KEPT_BYTES", 2 * size)
        client.newest = 3
        await eventually(lambda: [("a", 2), ("a", 3)] == [key[1:] for key in one.kept])
        assert 2 * size == one.kept_bytes
        # Of a worker that is silent nothing more comes: another one is kept, or the chosen one.
        assert "a" == one.worker_to_keep(["b"])
        monkeypatch.setattr(watching, "FOLLOW_S", -1.0)
        assert "b" == one.worker_to_keep(["b"])
        one.chosen_worker = "c"
        assert "c" == one.worker_to_keep(["a", "b"])


def test_reads_follow_each_other_faster_within_bounds_while_chunks_leave_unread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watching, "GATHER_S", 0.5)
    pauses = [0.5]
    for is_late in [True] * 4 + [False] * 30:
        pauses.append(watching.next_pause_s(pauses[-1], is_late=is_late))

    assert [0.5, 0.25, 0.125, 0.1, 0.1] == pauses[:5]
    assert pauses[4:] == sorted(pauses[4:])
    assert 0.5 == pauses[-1]


async def test_pages_that_follow_are_bounded_and_the_oldest_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watching, "PAGES_MAX", 2)
    async with running(FakeClient()) as watch:
        await eventually(lambda: len(watch.buffers) == 2)
        pages = [watch.overviews() for _ in range(3)]
        for each in pages:
            await anext(each)
        assert [True, False, False] == [await has_ended(each) for each in pages]
        for each in pages:
            await each.aclose()  # type: ignore[attr-defined]


async def has_ended(page: AsyncIterator[str]) -> bool:
    return await anext(page, None) is None


async def test_watches_are_bounded_and_the_one_viewed_longest_ago_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("breadbox_console.access.WATCHES_MAX", 2)
    made: dict[str, FakeClient] = {}

    def connect(token: str, *_: str) -> Any:
        made[token] = FakeClient()
        if not token:
            made[token].failing["list"] = UnauthenticatedError("a token is missing")
        return made[token]

    access = Access(connect, "own", WatchLimits())
    started = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(access.run(started))
        await started.wait()
        watches = {token: made[token] for token in ("own",)}
        for token in ("a", "b", "c"):
            await access.login(token)
            await eventually(lambda: made[token].look_count > 0)  # noqa: B023 - called here
            watches[token] = made[token]
        await eventually(lambda: watches["a"].is_closed)
        assert [False, False, False] == [watches[each].is_closed for each in ("own", "b", "c")]
        task.cancel()


async def test_the_watch_of_a_token_of_which_no_page_is_open_ends_and_the_consoles_own_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: dict[str, FakeClient] = {}

    def connect(token: str, *_: str) -> Any:
        made[token] = FakeClient()
        if not token:
            made[token].failing["list"] = UnauthenticatedError("a token is missing")
        return made[token]

    monkeypatch.setattr("breadbox_console.access.LOOK_S", 0.01)
    access = Access(connect, "own", WatchLimits())
    started = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(access.run(started))
        await started.wait()
        await access.login("a")
        watched = {token: made[token] for token in ("own", "a")}
        await eventually(lambda: min(each.look_count for each in watched.values()) > 0)
        assert not watched["a"].is_closed
        monkeypatch.setattr("breadbox_console.access.IDLE_S", -1.0)
        await eventually(lambda: watched["a"].is_closed)
        assert not watched["own"].is_closed
        task.cancel()


def test_the_table_of_bounds_is_that_of_the_code() -> None:
    """The names and limits in docs/console.md."""
    text = (Path(__file__).parents[2] / "docs/console.md").read_text()
    rows = re.findall(r"^\| `([A-Z_]+)`,[^|]* \| ([0-9.]+)( MiB| s)? \|", text, re.MULTILINE)
    rooms = [
        import_module(f"breadbox_console.{name}")
        for name in ("serving", "access", "watch", "episodes", "viewing")
    ]
    held = {name: value for room in rooms for name, value in vars(room).items()}

    assert 13 == len(rows)
    for name, number, unit in rows:
        assert held[name] == float(number) * (2**20 if unit == " MiB" else 1), name
