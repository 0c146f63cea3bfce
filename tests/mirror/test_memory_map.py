"""Arrays that take address space at once, and memory only where something is written."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from breadbox.mirror import StepMemory
from breadbox.mirror.sharing.shared_memory import SharedMemory, make_file
from breadbox.mirror.storage.rings import Memory
from support.fragments import vector_fragment

MEBIBYTE = 1 << 20
OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")


def never_overcommits() -> bool:
    """Whether the system promises no more than it has, whatever it is asked."""
    return not OVERCOMMIT.exists() or OVERCOMMIT.read_text().strip() == "2"


pytestmark = pytest.mark.skipif(never_overcommits(), reason="the system never overcommits")


@pytest.fixture(params=["private", "shared"])
def memory(request: pytest.FixtureRequest) -> Iterator[Memory]:
    if request.param == "private":
        yield Memory()
        return
    shared = SharedMemory(make_file())
    yield shared
    shared.forget()


def more_than_there_is() -> int:
    """Bytes: four times the machine's memory."""
    return 4 * (psutil.virtual_memory().total + psutil.swap_memory().total)


def grown_by(write: Callable[[], None]) -> int:
    """Bytes of memory that a process has more after something."""
    process = psutil.Process()
    before = process.memory_info().rss
    write()
    return process.memory_info().rss - before


def test_address_space_beyond_the_machines_memory_is_granted(memory: Memory) -> None:
    rows = more_than_there_is() // MEBIBYTE

    def write() -> None:
        array, _ = memory.array((rows, MEBIBYTE), np.dtype(np.uint8))
        for row in (0, rows // 2, rows - 1):
            array[row] = 7
        assert [7, 7, 7, 0] == [array[row, -1] for row in (0, rows // 2, rows - 1, 5)]

    assert grown_by(write) < 64 * MEBIBYTE


def test_a_mirror_of_a_million_stacks_of_frames_takes_the_memory_of_those_that_came() -> None:
    """TorchRL's default capacity, of Atari's observations or as many as are more than there is."""
    frames = np.random.default_rng(1).integers(0, 256, (5, 4, 84, 84), np.uint8)
    capacity = max(1_000_000, more_than_there_is() // frames[0].nbytes)
    fragment = replace(vector_fragment(), obs=frames[:4], next_obs=frames[4])

    def write() -> None:
        memory = StepMemory(capacity, seed=1)
        memory.extend(fragment)
        batch = memory.sample(64)
        for obs, next_obs in zip(batch.obs, batch.next_obs, strict=True):
            (at,) = [number for number in range(4) if np.array_equal(frames[number], obs)]
            np.testing.assert_array_equal(frames[at + 1], next_obs)

    assert grown_by(write) < 256 * MEBIBYTE
