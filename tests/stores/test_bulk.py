"""Many files read by one call: each is whole, or is left to be read alone."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from breadbox.stores import bulk
from breadbox.stores.bulk import FILES_MAX, read_whole


def memory_of(size_bytes: int) -> list[memoryview]:
    """Memory in several parts, one of them empty."""
    memory = memoryview(bytearray(size_bytes))
    return [memory[: size_bytes // 3], memory[:0], memory[size_bytes // 3 :]]


def joined(memory: Sequence[memoryview]) -> bytes:
    return b"".join(memory)


def body_of(number: int) -> bytes:
    return number.to_bytes(2, "little") * (5 + 700 * number)


@pytest.mark.parametrize("count", [0, 1, FILES_MAX, 2 * FILES_MAX + 1])
def test_files_are_read_into_their_memory(tmp_path: Path, count: int) -> None:
    files = []
    for number in range(count):
        path = tmp_path / str(number)
        path.write_bytes(body_of(number))
        files.append(([str(tmp_path / "gone"), str(path)], memory_of(len(body_of(number)))))
    assert [True] * count == read_whole(files)
    assert [body_of(number) for number in range(count)] == [joined(memory) for _, memory in files]


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda path: None, id="gone"),
        pytest.param(lambda path: path.write_bytes(b"x" * 99), id="shorter"),
        pytest.param(lambda path: path.write_bytes(b"x" * 101), id="longer"),
        pytest.param(lambda path: path.mkdir(), id="directory"),
        pytest.param(lambda path: os.mkfifo(path), id="pipe"),
        pytest.param(lambda path: path.symlink_to("whole"), id="link"),
    ],
)
def test_a_file_that_is_not_as_expected_is_left_and_those_before_it_come(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    (tmp_path / "whole").write_bytes(b"w" * 100)
    make(tmp_path / "odd")
    files = [([str(tmp_path / name)], memory_of(100)) for name in ("whole", "whole", "odd")]
    assert [True, True, False] == read_whole(files)
    assert [b"w" * 100] * 2 == [joined(files[number][1]) for number in (0, 1)]


def test_reads_that_a_kernel_goes_on_with_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, number_of_get_events = bulk.call_holding, bulk.IO_GETEVENTS

    def none_done(number: int, *given: int) -> int:
        return 0 if number == number_of_get_events else int(call(number, *given))

    monkeypatch.setattr(bulk, "call_holding", none_done)
    (tmp_path / "whole").write_bytes(b"w" * 100)
    memory = memory_of(100)
    assert [True] == read_whole([([str(tmp_path / "whole")], memory)])
    assert b"w" * 100 == joined(memory)


def test_no_file_stays_open(tmp_path: Path) -> None:
    (tmp_path / "whole").write_bytes(b"w" * 100)
    before = len(os.listdir("/dev/fd"))
    for _ in range(3):
        read_whole([([str(tmp_path / name)], memory_of(100)) for name in ("whole", "gone")])
    assert before == len(os.listdir("/dev/fd"))


def test_a_child_process_reads_files_too(tmp_path: Path) -> None:
    """Its parent's contexts are not its own."""
    (tmp_path / "whole").write_bytes(b"w" * 100)

    def reads() -> bool:
        memory = memory_of(100)
        return [True] == read_whole([([str(tmp_path / "whole")], memory)])

    assert reads()
    child = os.fork()
    if not child:
        os._exit(0 if reads() else 1)
    assert 0 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
