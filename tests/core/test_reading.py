"""B16: reading by a cursor gives what is held, in order of arrival, and changes nothing."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breadbox_server.core.buffers import DEFAULT_BUFFER, BufferSet
from breadbox_server.core.model.errors import BufferNotFoundError
from breadbox_server.core.model.ids import BufferName, SessionId
from breadbox_server.core.rules import reading
from breadbox_server.core.rules.reading import ChunksRead, ReadSpec
from core.world import World

START = ReadSpec(after=None)


def read(world: World, cursor: ReadSpec = START) -> ChunksRead:
    return world.buffers[DEFAULT_BUFFER].read(cursor)


def chunk_ids(found: ChunksRead) -> list[int]:
    return list(dict.fromkeys(each.chunk_id for each in found.fragments))


def test_a_buffer_that_is_not_there_has_nothing_to_read() -> None:
    world = World()
    nowhere = BufferName("nowhere")
    assert 0 == world.buffers.closed_count(nowhere)
    with pytest.raises(BufferNotFoundError):
        world.buffers[nowhere].read(START)


def test_an_empty_buffer_has_no_cursor_yet() -> None:
    found = read(World())
    assert ((), -1, 0, "s0") == (
        found.fragments,
        found.cursor,
        found.skipped_count,
        found.model.session_id,
    )


def test_a_buffer_without_a_session_gives_what_left_and_no_more() -> None:
    world = World()
    world.fill(3)
    world.end()
    found = read(world, ReadSpec(after=0))
    assert ((), 2, 2, "") == (
        found.fragments,
        found.cursor,
        found.skipped_count,
        found.model.session_id,
    )


def test_a_cursor_of_another_session_or_of_another_buffer_reads_all_that_is_held() -> None:
    world = World()
    world.fill(3)
    beyond, other = ReadSpec(after=3), ReadSpec(after=1, known_session_id=SessionId("other"))
    same = ReadSpec(after=1, known_session_id=SessionId("s0"))
    assert [[0, 1, 2], [0, 1, 2], [2]] == [
        chunk_ids(read(world, it)) for it in (beyond, other, same)
    ]
    world.start("s1")
    world.append(session_id="s1")
    # Of the same buffer, what is left of the cursor's own session is counted all the same.
    assert (1, 3) == (read(world, same).skipped_count, read(world, same).cursor)


def test_a_chunk_that_comes_back_is_read_at_its_old_place() -> None:
    world = World(sampler="oldest_first", capacity_chunks=200)
    world.fill(4)
    assert [0, 1, 2, 3] == chunk_ids(read(world))
    lease_id = world.granted(2).lease_id
    assert [2, 3] == chunk_ids(read(world, ReadSpec(after=-1)))
    assert 2 == read(world, ReadSpec(after=-1)).skipped_count
    world.give_back(lease_id)
    assert [0, 1, 2, 3] == chunk_ids(read(world, ReadSpec(after=-1)))
    # Also where the order was made smaller meanwhile, and it has to be put in again.
    for index in range(4, 140):
        world.append(index=index)
    lease_id = world.granted(120).lease_id
    assert list(range(120, 140)) == chunk_ids(read(world, replace(START, chunk_count_max=999)))
    world.give_back(lease_id)
    assert list(range(140)) == chunk_ids(read(world, replace(START, chunk_count_max=999)))
    world.buffers.check_invariants()


def test_a_read_ends_with_the_chunk_that_makes_it_large(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(fragments_per_chunk=2)
    world.fill(5)
    at_most = replace(START, chunk_count_max=2)
    assert ([0, 1], 1) == (chunk_ids(read(world, at_most)), read(world, at_most).cursor)
    with monkeypatch.context() as patched:
        patched.setattr(reading, "READ_FRAGMENTS_MAX", 3)
        assert [0, 1] == chunk_ids(read(world))
    monkeypatch.setattr(reading, "READ_BYTES_MAX", 21)
    assert [0, 1] == chunk_ids(read(world))


@given(st.integers(0, 2**32), st.integers(1, 5))
def test_every_chunk_is_read_or_counted_whatever_else_happens(seed: int, page: int) -> None:
    """A reader that goes on from its cursor accounts for every chunk that there ever was."""
    rng = random.Random(seed)
    world = World(capacity_chunks=6, uses_max=2, staleness_max=1)
    cursor, version, index, session = -1, 0, 0, 0
    seen: list[int] = []
    skipped = 0
    leases = []
    for _ in range(60):
        match rng.randrange(8):
            case 0 | 1 | 2:
                world.append(index=index, version=version, session_id=f"s{session}")
                index += 1
            case 3 if world.seen().chunk_count:
                leases.append(world.granted(1).lease_id)
            case 4 if leases:
                world.give_back(leases.pop())
            case 5:
                version += rng.randrange(2)
                world.publish(version, session_id=f"s{session}")
            case 6 if rng.random() < 0.2:
                session, version, index = session + 1, 0, 0
                world.start(f"s{session}")
            case 7:
                before = world.buffers.snapshot()
                found = read(world, ReadSpec(after=cursor, chunk_count_max=page))
                assert before == world.buffers.snapshot()
                assert {f"s{session}"} >= {each.fragment.session_id for each in found.fragments}
                seen += chunk_ids(found)
                skipped += found.skipped_count
                cursor = found.cursor
                assert cursor + 1 == len(seen) + skipped
        if rng.random() < 0.05:
            taken = world.buffers.snapshot()
            world.buffers = BufferSet.restore(taken, random.Random(0), is_recording=True)
        world.buffers.check_invariants()
    assert sorted(set(seen)) == seen
