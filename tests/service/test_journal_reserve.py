"""Room that is taken early and given up when the journal's disk is full."""

import os
from pathlib import Path

import pytest

from breadbox.stores.disk import MIB
from breadbox_server.journal.storage.disk_reserve import (
    FOLDER_NAME,
    PART_COUNT,
    ROOM_PARTS,
    SNAPSHOT_PARTS,
    Reserve,
)
from breadbox_server.journal.storage.interface import JournalFullError


class FullDisk:
    """Has room for one write once enough parts of the reserve are gone."""

    def __init__(self, directory: Path, parts_gone: int) -> None:
        self._folder = directory / FOLDER_NAME
        self._parts_left = PART_COUNT - parts_gone

    def write(self) -> str:
        if len(os.listdir(self._folder)) > self._parts_left:
            raise JournalFullError("full")
        return "written"


@pytest.fixture
def reserve(tmp_path: Path) -> Reserve:
    made = Reserve(tmp_path, clock=lambda: 0.0)
    assert PART_COUNT == made.refill()
    return made


def test_a_reserve_takes_its_blocks_at_once(tmp_path: Path, reserve: Reserve) -> None:
    parts = [part.stat() for part in (tmp_path / FOLDER_NAME).iterdir()]
    assert 16 * MIB == sum(part.st_size for part in parts)
    assert 16 * MIB <= sum(part.st_blocks * 512 for part in parts)


def test_no_more_is_given_up_than_a_write_needs(tmp_path: Path, reserve: Reserve) -> None:
    assert "written" == reserve.with_room(FullDisk(tmp_path, 2).write)
    assert PART_COUNT - 2 == len(os.listdir(tmp_path / FOLDER_NAME))
    assert reserve.has_room()


def test_with_half_of_it_gone_nothing_more_is_taken_in(tmp_path: Path, reserve: Reserve) -> None:
    gone = PART_COUNT - ROOM_PARTS + 1
    reserve.with_room(FullDisk(tmp_path, gone).write)
    assert not reserve.has_room()


def test_the_last_parts_are_for_a_snapshot(tmp_path: Path, reserve: Reserve) -> None:
    full = FullDisk(tmp_path, PART_COUNT)
    with pytest.raises(JournalFullError):
        reserve.with_room(full.write)
    assert SNAPSHOT_PARTS == len(os.listdir(tmp_path / FOLDER_NAME))
    assert "written" == reserve.with_room(full.write, is_snapshot=True)


def test_what_was_given_up_is_taken_again_when_there_is_room(tmp_path: Path) -> None:
    now = 0.0
    reserve = Reserve(tmp_path, clock=lambda: now)
    reserve.refill()
    reserve.with_room(FullDisk(tmp_path, PART_COUNT - 1).write, is_snapshot=True)
    assert not reserve.has_room()
    now = 10.0
    assert reserve.has_room()
    assert PART_COUNT == len(os.listdir(tmp_path / FOLDER_NAME))


def test_a_reserve_that_cannot_be_made_does_no_harm(tmp_path: Path) -> None:
    gone = Reserve(tmp_path / "gone")
    assert 0 == gone.refill()
