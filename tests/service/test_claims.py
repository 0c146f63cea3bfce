"""Claims that wait: served in order of arrival, and never left waiting beside a member."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from breadbox_server.access.authorization import ANONYMOUS, Caller, Role
from breadbox_server.base.errors import WatchersFullError
from breadbox_server.core.buffer import ReplayBuffer
from breadbox_server.core.model.config import AssemblyPolicy, BufferConfig
from breadbox_server.core.model.errors import (
    BufferNotFoundError,
    DrainingError,
    InvalidArgumentError,
)
from breadbox_server.core.model.ids import (
    FragmentIndex,
    ModelVersion,
    PayloadId,
    SessionId,
    WorkerId,
)
from breadbox_server.core.model.inputs import (
    AppendFragments,
    DeleteBuffer,
    DropMembers,
    EndSession,
    Fragment,
    Payload,
    StartSession,
    UpdateBuffer,
)
from breadbox_server.core.model.validation import PART_VERSION
from breadbox_server.limits import CLAIM_PARTS_MAX
from breadbox_server.reading.claims import Claimed
from support.at_rest import left_over
from support.driven import BUFFER, Driven, driven

ROWS = BufferConfig(assembly=AssemblyPolicy.GROUPS, fragments_per_chunk=0, lease_s=30.0)
TEAM, OTHER = (Caller(name, Role.PRODUCER, workers=(f"{name}-*",)) for name in ("team", "other"))


class Verifiers:
    """Verifiers that claim in one process with the server."""

    def __init__(self, it: Driven) -> None:
        self.it = it
        self.driver = it.driver
        self.tasks: list[asyncio.Task[Claimed | str]] = []
        self.count = 0
        self.session = "run"

    def fragment(self, group: str, part: str = "") -> Fragment:
        self.count += 1
        version = PART_VERSION if part else ModelVersion(0)
        return Fragment(
            WorkerId(group),
            FragmentIndex(0),
            SessionId(self.session),
            version,
            version,
            Payload(PayloadId(f"{self.count:032x}"), 7),
            step_count=0 if part else 4,
            discontinuity=True,
            part=part,
            schema_hash=1 if part else 0,
        )

    def append(self, *groups: str) -> None:
        self.driver.core.apply_now(
            AppendFragments(BUFFER, [self.fragment(group) for group in groups])
        )

    def attach(self, group: str, part: str) -> None:
        self.driver.core.apply_now(AppendFragments(BUFFER, [self.fragment(group, part)]))

    def claim(
        self,
        count: int = 1,
        *,
        wait_s: float = 600.0,
        part: str = "reward",
        caller: Caller = ANONYMOUS,
    ) -> asyncio.Task[Claimed | str]:
        task = asyncio.get_running_loop().create_task(
            self.driver.reading.claims.claim(
                BUFFER, part, count, wait_s=wait_s, lease_s=None, caller=caller
            )
        )
        self.tasks.append(task)
        return task

    async def claims(self, count: int, **more: Any) -> list[asyncio.Task[Claimed | str]]:
        tasks = [self.claim(**more) for _ in range(count)]
        await self.it.settle()
        return tasks

    def groups(self) -> list[list[str] | str | None]:
        """The groups that each call got, in order of the calls, or its answer, or None yet."""
        return [groups_of(each) if each.done() else None for each in self.tasks]


def groups_of(task: asyncio.Task[Claimed | str]) -> list[str] | str:
    if task.cancelled() or task.exception() is not None:
        return "ended"
    found = task.result()
    if isinstance(found, str):
        return found
    return [each.fragment.worker_id for each in found.fragments if not each.fragment.part]


@asynccontextmanager
async def verifiers(config: BufferConfig = ROWS, **limits: Any) -> AsyncIterator[Verifiers]:
    """Verifiers of a buffer; what they leave waiting is cancelled, and nothing must be left."""
    async with driven(config, **limits) as it:
        them = Verifiers(it)
        yield them
        for task in them.tasks:
            task.cancel()
        if them.tasks:
            await asyncio.wait(them.tasks)
        it.driver.reading.leases.end_all()
        await it.settle()
        held = BUFFER in it.driver.core.buffers
        assert not held or it.driver.core.buffers[BUFFER].claimed_count == 0
        assert {} == left_over(it.driver)


async def test_members_go_to_the_claims_that_have_waited_longest_and_wake_no_others() -> None:
    async with verifiers() as they:
        await they.claims(4)
        they.append("a", "b")
        await they.it.settle()
        assert [["a"], ["b"], None, None] == they.groups()
        they.append("c")
        await they.it.settle()
        assert [["a"], ["b"], ["c"], None] == they.groups()


async def test_a_claim_of_several_gets_what_one_append_brings() -> None:
    async with verifiers() as they:
        first, second = they.claim(8), they.claim(8)
        await they.it.settle()
        they.append("a", "b", "c")
        await they.it.settle()
        assert (["a", "b", "c"], False) == (groups_of(first), second.done())


@pytest.mark.parametrize("passes", range(4))
async def test_what_a_claim_got_whose_caller_has_left_goes_to_the_next(passes: int) -> None:
    async with verifiers() as they:
        leaving, staying = await they.claims(2)
        they.append("a")
        for _ in range(passes):
            await asyncio.sleep(0)
        if not leaving.done():
            leaving.cancel()
            await they.it.settle()
            assert (True, ["a"]) == (leaving.cancelled(), groups_of(staying))


async def test_members_pass_claims_that_may_not_take_them_or_lack_another_part() -> None:
    async with verifiers() as they:
        they.attach("team-1", "score")
        they.claim(caller=OTHER)
        they.claim(part="score")
        they.claim(caller=TEAM)
        they.claim()
        await they.it.settle()
        they.append("team-1")
        await they.it.settle()
        assert [None, None, ["team-1"], None] == they.groups()
        they.append("other-1")
        await they.it.settle()
        assert [["other-1"], None, ["team-1"], None] == they.groups()
        they.append("else")
        await they.it.settle()
        assert [["other-1"], ["else"], ["team-1"], None] == they.groups()


async def test_a_new_claim_does_not_overtake_those_that_wait() -> None:
    async with verifiers() as they:
        await they.claims(1)
        they.append("a")
        # In the same pass of the loop, before the waiting claim was served.
        late = they.claim(wait_s=0.0)
        await they.it.settle()
        assert [["a"], await late] == they.groups()
        assert isinstance(await late, str)


@pytest.mark.parametrize("how", ["released", "expired"])
async def test_members_of_a_claim_that_ends_go_to_the_one_that_has_waited_longest(how: str) -> None:
    async with verifiers() as they:
        they.append("a")
        first, *_ = await they.claims(3)
        found = await first
        assert isinstance(found, Claimed)
        if how == "released":
            they.driver.reading.leases.release(found.lease.lease_id)
        else:
            they.it.clock.advance(30.0)
        await they.it.settle()
        assert [["a"], ["a"], None] == they.groups()


async def test_claims_that_end_together_serve_those_that_wait_in_one_go() -> None:
    async with verifiers() as they:
        they.append("a")
        they.append("b")
        first, second, *_ = await they.claims(4)
        for each in (await first, await second):
            assert isinstance(each, Claimed)
            they.driver.reading.leases.release(each.lease.lease_id)
        await they.it.settle()
        assert [["a"], ["b"], ["a"], ["b"]] == they.groups()


async def test_claims_at_the_limit_of_leases_end_the_oldest_and_serve_those_that_wait() -> None:
    async with verifiers(read_leases_max=1) as they:
        they.append("a")
        await they.claims(2)
        they.append("b")
        await they.it.settle()
        # The second claim's lease ended the first one's: its member is free again.
        they.claim(wait_s=0.0)
        await they.it.settle()
        assert [["a"], ["b"], ["a"]] == they.groups()


async def test_a_claim_that_waited_in_a_deleted_buffer_is_refused() -> None:
    async with verifiers() as they:
        (waiting,) = await they.claims(1)
        await they.driver.delete_buffer(DeleteBuffer(BUFFER))
        with pytest.raises(BufferNotFoundError):
            await waiting


async def test_a_claim_that_waits_in_a_buffer_whose_groups_go_is_refused() -> None:
    async with verifiers() as they:
        (waiting,) = await they.claims(1)
        await they.driver.core.call(EndSession(BUFFER, SessionId("run")))
        await they.it.settle()
        assert not waiting.done()
        await they.driver.core.call(UpdateBuffer(BUFFER, BufferConfig()))
        with pytest.raises(InvalidArgumentError, match="has no members"):
            await waiting


async def test_a_claim_waits_on_in_the_next_session() -> None:
    async with verifiers() as they:
        (waiting,) = await they.claims(1)
        await they.driver.core.call(EndSession(BUFFER, SessionId("run")))
        await they.driver.core.call(StartSession(BUFFER, SessionId("next")))
        they.session = "next"
        they.append("a")
        await they.it.settle()
        assert ["a"] == groups_of(waiting)


async def test_a_claim_that_is_served_while_the_server_stops_gives_its_members_back() -> None:
    async with verifiers() as they:
        (waiting,) = await they.claims(1)
        they.append("a")
        they.driver.drain()
        with pytest.raises(DrainingError):
            await waiting
        assert 0 == they.driver.core.buffers[BUFFER].claimed_count


async def test_claims_that_wait_are_bounded() -> None:
    async with verifiers(watchers_max=2) as they:
        tasks = await they.claims(3)
        with pytest.raises(WatchersFullError):
            await tasks[2]
        they.append("a", "b", "c")
        await they.it.settle()
        assert [["a"], ["b"], "ended"] == they.groups()


async def test_claims_of_a_token_wait_for_a_bounded_number_of_parts() -> None:
    async with verifiers() as they:
        for number in range(CLAIM_PARTS_MAX):
            they.claim(part=f"part{number}")
        (again,) = await they.claims(1, part="part0")
        (more,) = await they.claims(1, part="more")
        with pytest.raises(WatchersFullError, match="8 parts are waited for"):
            await more
        (other,) = await they.claims(1, part="more", caller=TEAM)
        they.append("team-1")
        await they.it.settle()
        assert (["team-1"], 9) == (they.groups()[0], they.groups().count(None))
        they.append(*(f"x-{number}" for number in range(8)))
        await they.it.settle()
        assert (True, False) == (again.done(), other.done())


async def test_an_append_looks_only_into_the_claims_that_wait_and_only_for_new_members(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = 0
    original = ReplayBuffer.claim

    def counted(self: ReplayBuffer, *args: Any) -> Any:
        nonlocal looks
        looks += 1
        return original(self, *args)

    async with verifiers() as they:
        await they.claims(16)
        monkeypatch.setattr(ReplayBuffer, "claim", counted)
        for number in range(20):
            they.attach(f"row-{number}", "reward")
            await they.it.settle()
        assert 0 == looks, "none of them is to be claimed"
        they.append(*(f"row-{number}" for number in range(20)))
        await they.it.settle()
        assert (0, 16) == (looks, they.groups().count(None))
        they.append("new")
        await they.it.settle()
        assert (2, ["new"]) == (looks, they.groups()[0]), "nothing for the second, nor for others"
        await they.claims(1)
        assert 3 == looks, "nothing has come since for those that wait"


async def test_no_claim_waits_beside_a_member_and_no_member_is_claimed_twice() -> None:
    seed = random.randrange(10**6)
    print("seed", seed)  # noqa: T201 - told when it fails
    rng = random.Random(seed)
    callers = (ANONYMOUS, TEAM, OTHER)
    served_count = 0
    async with verifiers(watchers_max=40) as they:
        live: dict[str, Claimed] = {}
        waiting: dict[asyncio.Task[Claimed | str], Caller] = {}
        for step in range(200):
            for _ in range(rng.randrange(4)):
                kind = rng.choice(["append", "claim", "claim", "leave", "end", "drop", "attach"])
                if kind == "append":
                    they.append(*{f"{rng.choice(('team', 'other', 'x'))}-{rng.randrange(60)}"})
                elif kind == "claim":
                    caller = rng.choice(callers)
                    waiting[they.claim(rng.choice([1, 1, 3]), caller=caller)] = caller
                elif kind == "leave" and waiting:
                    rng.choice(list(waiting)).cancel()
                elif kind == "end" and live:
                    they.driver.reading.leases.release(
                        live.pop(rng.choice(list(live))).lease.lease_id
                    )
                elif kind == "drop" or kind == "attach":
                    name = f"{rng.choice(('team', 'other', 'x'))}-{rng.randrange(60)}"
                    if kind == "attach":
                        they.attach(name, "reward")
                    else:
                        drop = DropMembers(BUFFER, (WorkerId(name),), (0,))
                        they.driver.core.apply_now(drop)
                if rng.random() < 0.3:
                    await asyncio.sleep(0)
            if rng.random() < 0.05:
                they.it.clock.advance(20.0)
            await they.it.settle()
            for task in [each for each in waiting if each.done()]:
                del waiting[task]
                if not task.cancelled() and isinstance(found := task.result(), Claimed):
                    live[f"{step}-{id(task)}"] = found
                    served_count += 1
            leases = they.driver.reading.leases._leases  # noqa: SLF001 - nothing else shows them
            live = {name: each for name, each in live.items() if each.lease.lease_id in leases}
            claimed = [
                f.fragment.worker_id
                for each in live.values()
                for f in each.fragments
                if not f.fragment.part
            ]
            assert len(claimed) == len({*claimed}), "claimed twice"
            held = they.driver.core.buffers[BUFFER]
            for row in held.members("", ("", -1), 10**6):
                if {"tokens"} == {*row.parts} and row.group not in claimed:
                    usable = [each for each in waiting.values() if each.may_append_as(row.group)]
                    assert [] == usable, "a claim waits beside a member"
    assert served_count > 20
