"""Memory that is used again, and never while somebody sees it."""

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from breadbox.payload import memory
from breadbox.payload.memory import IDLE_BYTES_MAX, RECYCLED_BYTES_MIN, empty

_BYTES = np.dtype(np.uint8)
_SHAPE = (4, RECYCLED_BYTES_MIN)


@pytest.fixture(autouse=True)
def _nothing_idle() -> Iterator[None]:
    gc.collect()
    memory.idle_blocks.clear()
    yield
    memory.idle_blocks.clear()


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_of_an_array_that_is_gone_is_used_again() -> None:
    array = empty(_SHAPE, _BYTES)
    address = _address(array)
    del array
    assert _address(empty((RECYCLED_BYTES_MIN,), np.dtype("<f4"))) == address


def test_arrays_are_ordinary_ones() -> None:
    array = empty((2, RECYCLED_BYTES_MIN // 8), np.dtype("<i8"))
    assert type(array) is np.ndarray
    assert array.flags.c_contiguous
    assert array.flags.writeable
    assert (array.shape, array.dtype) == ((2, RECYCLED_BYTES_MIN // 8), np.dtype("<i8"))


@pytest.mark.parametrize(
    "see",
    [
        lambda array: array[1:, ::2],
        lambda array: array[0][3:],
        lambda array: array.view(np.int8).reshape(-1)[5:],
        lambda array: array.T[7],
        lambda array: memoryview(array)[1:],
        lambda array: np.asarray(array[2]).ravel(),
        lambda array: np.frombuffer(array[1].data, np.uint8),
        lambda array: np.lib.stride_tricks.as_strided(array, (2, 2), (1, 1)),
    ],
)
def test_memory_that_a_view_shows_is_not_used_again(see: Callable[[np.ndarray], Any]) -> None:
    array = empty(_SHAPE, _BYTES)
    address = _address(array)
    view = see(array)
    del array
    gc.collect()
    assert _address(empty(_SHAPE, _BYTES)) != address
    del view
    assert _address(empty(_SHAPE, _BYTES)) == address


def test_memory_that_a_tensor_shows_is_not_used_again() -> None:
    torch = pytest.importorskip("torch")
    array = empty(_SHAPE, _BYTES)
    address = _address(array)
    tensor = torch.from_numpy(array)[2]
    del array
    gc.collect()
    assert _address(empty(_SHAPE, _BYTES)) != address
    del tensor
    gc.collect()
    assert _address(empty(_SHAPE, _BYTES)) == address


def test_small_arrays_own_their_memory() -> None:
    assert empty((RECYCLED_BYTES_MIN - 1,), _BYTES).flags.owndata
    assert empty((0, 3), _BYTES).shape == (0, 3)


def test_what_is_idle_is_bounded_and_the_longest_idle_goes_first() -> None:
    count = 4
    arrays = [empty((IDLE_BYTES_MAX // count,), _BYTES) for _ in range(count + 1)]
    addresses = [_address(each) for each in arrays]
    while arrays:
        del arrays[0]
    assert sum(map(len, memory.idle_blocks.values())) == IDLE_BYTES_MAX
    again = [empty((IDLE_BYTES_MAX // count,), _BYTES) for _ in range(count)]
    assert {_address(each) for each in again} == set(addresses[1:])


def test_what_is_larger_than_the_bound_is_not_kept() -> None:
    kept = empty(_SHAPE, _BYTES)
    address = _address(kept)
    del kept
    empty((IDLE_BYTES_MAX + 1,), _BYTES)
    assert [len(each) for each in memory.idle_blocks.values()] == [4 * RECYCLED_BYTES_MIN]
    assert _address(empty(_SHAPE, _BYTES)) == address


def test_threads_never_share_memory() -> None:
    def use(mark: int) -> bool:
        for _ in range(200):
            array = empty(_SHAPE, _BYTES)
            array[:, ::4096] = mark
            if not (array[:, ::4096] == mark).all():
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(use, range(8)))
