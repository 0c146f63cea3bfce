"""Claims and listings beside the simple rules that look at every member, and what they look at."""

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from breadbox_server.core.buffers import DEFAULT_BUFFER as B
from breadbox_server.core.buffers import BufferSet
from breadbox_server.core.lacking import INDEXES_MAX, Wanted
from breadbox_server.core.model import sorted_names
from breadbox_server.core.model.config import AssemblyPolicy, BufferConfig, FullPolicy
from breadbox_server.core.model.ids import BufferName, WorkerId
from breadbox_server.core.model.inputs import AppendFragments, DropMembers
from breadbox_server.core.model.sorted_names import SortedNames
from breadbox_server.core.state.groups import GroupChunk, Groups
from core.test_rows_simulated import SIZE, Members, Rows, Simulation
from support.inputs import start_session

Key = tuple[str, int]
ROWS = BufferConfig(assembly=AssemblyPolicy.GROUPS, fragments_per_chunk=0, open_chunk_s=1.0)
KINDS = (
    Wanted("reward"),
    Wanted("score"),
    Wanted("reward", ("*3*",)),
    Wanted("none", ("row-1*", "g1*")),
)


def may_take(wanted: Wanted) -> Callable[[WorkerId], bool]:
    """What the patterns of the kinds above say."""
    texts = [each.strip("*") for each in wanted.groups or ("",)]
    return lambda name: any(each in name for each in texts)


def groups_of(buffers: BufferSet) -> Groups:
    groups = buffers._shared.states[B].assembly  # noqa: SLF001 - its indexes are shown nowhere
    assert isinstance(groups, Groups)
    return groups


class Claimants:
    """Claims on what a simulation does, compared with a look at every member."""

    def __init__(self, it: Simulation) -> None:
        self.it = it
        self.rng = it.rng
        self.claims: list[list[Key]] = []
        self.claimed_count = 0
        self.buffers = it.buffers

    def expected(self, wanted: Wanted) -> list[Key]:
        """The members of a claim without a bound, those of the longest silent group first."""
        claimed = {key for keys in self.claims for key in keys}
        return [
            (name, member)
            for name, chunk in groups_of(self.it.buffers).open.items()
            if isinstance(chunk, GroupChunk) and may_take(wanted)(name)
            for member, parts in chunk.members.items()
            if chunk.has((member, "")) and wanted.part not in parts
            if (name, member) not in claimed
        ]

    def act(self) -> None:
        if self.buffers is not self.it.buffers:
            # Claims end with the server.
            self.buffers, self.claims = self.it.buffers, []
        if self.claims and self.rng.random() < 0.4:
            ended = self.claims.pop(self.rng.randrange(len(self.claims)))
            self.it.buffers.end_claim(B, [(WorkerId(name), member) for name, member in ended])
        wanted, count = self.rng.choice(KINDS), self.rng.choice([0, 1, 2, 5, 40])
        expected = self.expected(wanted)
        taken = self.it.buffers[B].claim(wanted, count, may_take(wanted), lambda _: False)
        keys = [(each[0].fragment.worker_id, each[0].fragment.fragment_index) for each in taken]
        assert [name for name, _ in expected[:count]] == [name for name, _ in keys]
        assert len({*keys}) == len(keys)
        assert {*keys} <= {*expected}
        if keys:
            self.claims.append([(str(name), member) for name, member in keys])
            self.claimed_count += len(keys)
        held = sum(map(len, self.claims))
        assert self.it.buffers[B].claimed_count == held


class ClaimedRows(Rows):
    claimants: Claimants

    def check(self) -> None:
        self.check_payloads()

    def drop(self) -> None:
        super().drop()
        self.claimants.act()
        if self.rng.random() < 0.2:
            self.die()

    def let_go(self) -> list[Any]:
        if self.rng.random() < 0.3:
            self.claimants.act()
        return super().let_go()


class ClaimedMembers(Members):
    claimants: Claimants

    def learn(self) -> None:
        super().learn()
        self.claimants.act()
        if self.rng.random() < 0.05:
            self.check_payloads()
        if self.rng.random() < 0.1:
            self.die()


MEMBERS = BufferConfig(
    fragments_per_chunk=SIZE,
    assembly=AssemblyPolicy.GROUPS,
    required_parts="tokens,reward",
    group_min=2,
    capacity_chunks=10,
    staleness_max=2,
    open_chunk_s=1.5,
    workers_max=500,
    sampler="oldest_first",
)


@pytest.mark.parametrize(
    ("kind", "config"), [(ClaimedRows, ROWS), (ClaimedMembers, MEMBERS)], ids=["rows", "groups"]
)
def test_a_claim_gets_what_a_look_at_every_member_finds(
    kind: type[ClaimedRows | ClaimedMembers], config: BufferConfig
) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)  # noqa: T201 - told when it fails
    simulation = kind(seed, config)
    simulation.claimants = Claimants(simulation)
    simulation.run(3_000)
    assert simulation.deaths > 0
    assert simulation.claimants.claimed_count > 100


def rows_of(count: int, *, start: int = 0, it: Rows | None = None) -> Rows:
    it = it or Rows(0, ROWS)
    for number in range(start, start + count):
        it.buffers.apply(AppendFragments(B, [it.tokens((f"g{number:05}", 0))]), now=0.0)
    return it


def claim(it: Rows, wanted: Wanted = KINDS[0], count: int = 4, *, is_awaited: bool = False) -> int:
    return len(it.buffers[B].claim(wanted, count, may_take(wanted), lambda _: is_awaited))


def calls_of(act: Callable[[], object]) -> int:
    """How many functions, of Python and of C, an act calls: what it looks at, not how long."""
    count = 0

    def note(*_: object) -> None:
        nonlocal count
        count += 1

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


def test_claims_and_appends_beside_them_look_at_as_few_members_of_many_as_of_few() -> None:
    def costs(size: int) -> Iterator[int]:
        it = rows_of(size)
        claim(it)
        yield calls_of(lambda: claim(it))
        made = it.tokens(("new", 0))
        yield calls_of(lambda: it.buffers.apply(AppendFragments(B, [made]), now=0.0))
        rest = claim(it, count=size)
        assert size - 7 == rest
        yield calls_of(lambda: claim(it))
        keys = [(WorkerId("g00001"), 0)]
        yield calls_of(lambda: it.buffers.end_claim(B, keys))
        assert 1 == claim(it)

    few, many = list(costs(50)), list(costs(5_000))
    assert [many_ <= few_ + 20 for few_, many_ in zip(few, many, strict=True)] == [True] * 4, (
        few,
        many,
    )
    assert max(many) < 600, many


def test_a_buffer_without_claims_and_listings_keeps_no_index(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("there is no index")

    it = Rows(0, ROWS)
    groups = groups_of(it.buffers)
    for name in ("touch", "leave", "ask"):
        monkeypatch.setattr(groups.lacking, name, never)
    for name in ("add", "remove"):
        monkeypatch.setattr(SortedNames, name, never)
    rows_of(20, it=it)
    it.buffers.apply(DropMembers(B, (WorkerId("g00003"),), (0,)), now=0.0)
    assert 19 == len(groups.open)


def test_listing_after_a_change_looks_at_as_few_groups_of_many_as_of_few() -> None:
    def cost(size: int) -> int:
        it = rows_of(size)
        held = it.buffers[B]

        def change_and_list() -> None:
            rows_of(1, start=size, it=it)
            assert ["g00007"] == [each.group for each in held.members("g00007", ("", -1), 9)]

        held.members("", ("", -1), 1)
        return calls_of(change_and_list)

    few, many = cost(50), cost(5_000)
    assert abs(many - few) <= 20, (few, many)


def test_a_listing_follows_groups_that_begin_and_end() -> None:
    it = rows_of(3)

    def listed() -> list[str]:
        return [each.group for each in it.buffers[B].members("", ("", -1), 9)]

    assert ["g00000", "g00001", "g00002"] == listed()
    it.buffers.apply(DropMembers(B, (WorkerId("g00001"),), (0,)), now=0.0)
    rows_of(1, start=3, it=it)
    assert ["g00000", "g00002", "g00003"] == listed()
    it.buffers.check_invariants()


def test_kinds_of_claims_beyond_the_limit_lose_their_index_unless_claims_wait_for_them() -> None:
    it = rows_of(3)
    indexes = groups_of(it.buffers).lacking.indexes
    kinds = [Wanted(f"part{number}") for number in range(INDEXES_MAX + 2)]
    for each in kinds[:INDEXES_MAX]:
        claim(it, each, 0)
    claim(it, kinds[0], 0)
    claim(it, kinds[-2], 0)
    assert {*kinds[:-1]} - {kinds[1]} == {*indexes}
    claim(it, kinds[-1], 0, is_awaited=True)
    assert {*kinds} - {kinds[1]} == {*indexes}
    claim(it, kinds[1], 0)
    assert INDEXES_MAX == len(indexes)
    assert 3 == claim(it, kinds[1])


def test_a_claim_that_waits_is_told_of_members_once_and_of_a_new_session() -> None:
    it = rows_of(1)

    def has_more() -> tuple[bool, bool]:
        return it.buffers.has_more_to_claim(B), it.buffers.has_more_to_claim(B)

    assert 1 == claim(it)
    assert (True, False) == has_more()
    rows_of(1, start=1, it=it)
    assert (True, False) == has_more()
    it.buffers.end_claim(B, [(WorkerId("g00000"), 0), (WorkerId("g00000"), 9)])
    assert (True, False) == has_more()
    it.buffers.apply(start_session("t", buffer=B), now=0.0)
    assert (True, False) == has_more()
    it.buffers.end_claim(BufferName("none"), [])
    assert it.buffers.has_more_to_claim(BufferName("none"))


def test_names_are_in_order_however_they_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorted_names, "PIECE", 3)
    seed = random.randrange(10**6)
    print("seed", seed)  # noqa: T201 - told when it fails
    rng = random.Random(seed)
    for _ in range(50):
        expected = {WorkerId(f"{rng.randrange(40):02}") for _ in range(rng.choice([0, 3, 20]))}
        names = SortedNames(expected)
        for _ in range(rng.choice([5, 100])):
            name = WorkerId(f"{rng.randrange(40):02}")
            if name in expected:
                expected.remove(name)
                names.remove(name)
            else:
                expected.add(name)
                names.add(name)
            since = f"{rng.randrange(42):02}"
            assert sorted(each for each in expected if each >= since) == list(names.since(since))


def test_a_group_that_waits_for_room_is_behind_the_others() -> None:
    blocking = BufferConfig(
        assembly=AssemblyPolicy.GROUPS,
        fragments_per_chunk=2,
        group_min=1,
        capacity_chunks=1,
        full_policy=FullPolicy.BLOCK,
        open_chunk_s=1.0,
    )
    it = Rows(0, blocking)
    for at, key in ((0.0, ("full", 0)), (0.0, ("full", 1)), (0.0, ("a", 0)), (0.5, ("b", 0))):
        it.buffers.apply(AppendFragments(B, [it.tokens(key)]), now=at)
    assert 0 == claim(it, count=0)
    it.buffers.handle_timer(now=1.0)
    taken = it.buffers[B].claim(KINDS[0], 9, may_take(KINDS[0]), lambda _: False)
    assert ["b", "a"] == [each[0].fragment.worker_id for each in taken]
    it.buffers.check_invariants()
