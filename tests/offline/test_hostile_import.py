"""Goal: `breadbox import` of a broken or hostile file says which file, row and column, executes
nothing in it, and ends with an error or leaves out what is wrong.

Method: real files, the real command and a real server; every case states what must be said.
"""

import base64
import os
import pickle  # noqa: TID251 - makes hostile inputs
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lz4.frame
import msgpack
import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

import breadbox.testing
from breadbox.cli.main import cli
from breadbox_offline.episodes.serialized import pack_episode
from breadbox_offline.errors import ValidationError
from breadbox_offline.files.dataset import Dataset
from breadbox_offline.files.writers import write_episodes
from breadbox_offline.report import FindingKind, ValidationPolicy
from support.rllib_cases import make_toy_episode

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

GOOD = base64.b64encode(lz4.frame.compress(pickle.dumps(np.zeros(2), 5))).decode()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with breadbox.testing.start_server() as server:
        yield server.address


class Executes:
    """Its pickle calls os.system when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.marker}",)


def hostile_pickle(folder: Path) -> str:
    return base64.b64encode(lz4.frame.compress(pickle.dumps(Executes(folder / "ran")))).decode()


def huge_frame() -> str:
    frame = lz4.frame.compress(pickle.dumps(np.arange(3), 5), store_size=True)
    stated = struct.pack("<Q", lz4.frame.get_frame_info(frame)["content_size"])
    return base64.b64encode(frame.replace(stated, struct.pack("<Q", 2**60), 1)).decode()


def steps(**changed: Any) -> pa.Table:
    """Three rows, one per step."""
    columns = {
        "eps_id": ["a"] * 3,
        "t": [0, 1, 2],
        "obs": [[0.0], [1.0], [2.0]],
        "new_obs": [[1.0], [2.0], [3.0]],
        "actions": [0, 1, 0],
        "rewards": [1.0, 1.0, 1.0],
        "terminateds": [False, False, True],
    }
    return pa.table(columns | changed)


def toys() -> list[Any]:
    return [make_toy_episode(name, 40, terminated=True, truncated=False) for name in "ab"]


def cut(path: Path, part: float = 0.7) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * part)])


def truncated(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        write_episodes(toys(), folder / name)
        cut(folder / name)
        return folder / name

    return make


def truncated_lines(folder: Path) -> Path:
    path = folder / "a.jsonl"
    path.write_text('{"obs": [1.0], "rewards": 1.0}\n{"obs": [1.0], "rew')
    return path


def huge_message(folder: Path) -> Path:
    path = folder / "a.msgpack"
    path.write_bytes(b"\xdd" + struct.pack(">I", 2**32 - 1) + b"\x00" * 10)
    return path


def rows_with(**changed: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        made = {name: held(folder) if callable(held) else held for name, held in changed.items()}
        table = steps(**{name: held for name, held in made.items() if held is not None})
        missing = [name for name, held in made.items() if held is None]
        parquet.write_table(table.drop_columns(missing), folder / "a.parquet")
        return folder / "a.parquet"

    return make


STRUCT = [{"x": 1.0}, {"x": 2.0}, {"x": 3.0}]
REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "truncated parquet": (truncated("a.parquet"), "a.parquet"),
    "truncated msgpack": (truncated("a.msgpack"), "a.msgpack"),
    "truncated lines": (truncated_lines, "a.jsonl"),
    "huge declared size": (huge_message, "a.msgpack"),
    "huge declared frame": (
        rows_with(obs=[GOOD, huge_frame(), GOOD], new_obs=[GOOD] * 3),
        "a.parquet, row 1, column 'obs'",
    ),
    "pickle that calls os.system": (
        rows_with(obs=lambda folder: [GOOD, GOOD, hostile_pickle(folder)], new_obs=[GOOD] * 3),
        "a.parquet, row 2, column 'obs'",
    ),
    "NaN flag": (
        rows_with(terminateds=[0.0, float("nan"), 1.0]),
        "a.parquet, row 1, column 'terminateds'",
    ),
    "null flag": (
        rows_with(terminateds=[False, False, None]),
        "a.parquet, row 2, column 'terminateds'",
    ),
    "flag of 2": (rows_with(terminateds=[0, 2, 1]), "a.parquet, row 1, column 'terminateds'"),
    "missing actions": (rows_with(actions=None), "a.parquet, column 'actions': is missing"),
    "missing rewards": (rows_with(rewards=None), "a.parquet, column 'rewards': is missing"),
    "missing final observations": (rows_with(new_obs=None), "a.parquet, column 'new_obs'"),
    "missing flags": (rows_with(terminateds=None), "a.parquet, column 'terminateds'"),
    "text for rewards": (rows_with(rewards=["1", "x", "2"]), "a.parquet, row 0, column 'rewards'"),
    "null reward": (rows_with(rewards=[1.0, None, 1.0]), "a.parquet, row 1, column 'rewards'"),
    "null id": (rows_with(eps_id=["a", None, "a"]), "a.parquet, row 1, column 'eps_id'"),
    "fraction of a timestep": (rows_with(t=[0.0, 1.5, 2.0]), "a.parquet, row 1, column 't'"),
    "ragged observations": (
        rows_with(obs=[[0.0], [1.0, 2.0], [2.0]]),
        "a.parquet, row 1, column 'obs'",
    ),
    "null observation": (rows_with(obs=[[0.0], None, [2.0]]), "a.parquet, row 1, column 'obs'"),
    "nested rewards": (rows_with(rewards=STRUCT), "a.parquet, column 'rewards'"),
    "nested ids": (rows_with(eps_id=STRUCT), "a.parquet, column 'eps_id'"),
    "nested flags": (rows_with(terminateds=STRUCT), "a.parquet, column 'terminateds'"),
    "nested timesteps": (rows_with(t=STRUCT), "a.parquet, column 't'"),
    "other structure of final observations": (
        rows_with(new_obs=STRUCT),
        "a.parquet, column 'new_obs'",
    ),
}


def run(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(args=arguments)
    code = ended.value.code
    assert isinstance(code, int)
    return code


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_cannot_be_read_is_refused_with_its_place(
    name: str, address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, place = REFUSED[name]
    path = make(tmp_path)
    code = run(["import", str(path), "--server", address, "--buffer", "hostile"])
    error = capsys.readouterr().err
    assert (2, 1) == (code, error.count("\n")), error
    assert error.startswith("Error: ")
    assert f"{tmp_path}/{place}" in error
    assert not (tmp_path / "ran").exists()


def items(folder: Path) -> Path:
    """Serialized episodes, of which the second hides a pickle among its arrays."""
    array = {
        b"nd": True,
        b"type": b"|O",
        b"kind": b"O",
        b"shape": [1],
        b"data": pickle.dumps(Executes(folder / "ran")),
    }
    good, other = map(pack_episode, toys())
    hostile = msgpack.packb({"id_": "b", "observations": array})
    table = pa.table({"item": pa.array([good, hostile, other], pa.binary())})
    parquet.write_table(table, folder / "a.parquet")
    return folder / "a.parquet"


def sample_batches(**changed: Any) -> Callable[[Path], Path]:
    """Three episodes, a row each; the second is changed."""

    def make(folder: Path) -> Path:
        rows: dict[str, list[Any]] = {
            "eps_id": [["a"] * 3, ["b"] * 3, ["c"] * 3],
            "obs": [[[0.0], [1.0], [2.0]]] * 3,
            "new_obs": [[[1.0], [2.0], [3.0]]] * 3,
            "actions": [[0, 1, 0]] * 3,
            "rewards": [[1.0, 1.0, 1.0]] * 3,
            "dones": [[0.0, 0.0, 1.0]] * 3,
        }
        for name, held in changed.items():
            made = held(folder) if callable(held) else held
            rows[name] = made if len(made) == 3 and made[0] == GOOD else [*rows[name]]
            if rows[name] is not made:
                rows[name][1] = made
        parquet.write_table(pa.table(rows), folder / "a.parquet")
        return folder / "a.parquet"

    return make


REPORTED: dict[str, tuple[Callable[[Path], Path], str, int]] = {
    "pickle in a serialized episode": (items, "row 1, column 'item'", 2),
    "NaN flag": (sample_batches(dones=[0.0, float("nan"), 1.0]), "row 1, column 'dones'", 2),
    "null flag": (sample_batches(dones=[0.0, None, 1.0]), "row 1, column 'dones'", 2),
    "a step too few": (sample_batches(actions=[0, 1]), "row 1, column 'actions'", 2),
    "null reward": (sample_batches(rewards=[1.0, None, 1.0]), "row 1, column 'rewards'", 2),
    "pickle that calls os.system": (
        sample_batches(obs=lambda folder: [GOOD, hostile_pickle(folder), GOOD], new_obs=[GOOD] * 3),
        "row 1, column 'obs'",
        0,
    ),
}


@pytest.mark.parametrize("name", REPORTED)
def test_an_episode_that_cannot_be_read_is_left_out_and_its_place_is_said(
    name: str, address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, place, episode_count = REPORTED[name]
    path = make(tmp_path)
    options = ["--server", address, "--buffer", f"reported-{name.replace(' ', '-')}"]
    # What imports nothing at all is an error, besides.
    status = 0 if episode_count else 2
    assert status == run(["import", str(path), "--step-count", "2", *options])
    said = capsys.readouterr().out
    assert said.startswith(f"{episode_count} episodes with ")
    assert f"malformed ({path}, {place}" in said
    assert not (tmp_path / "ran").exists()


def test_rows_of_findings_are_those_of_the_file(tmp_path: Path) -> None:
    (place,) = [
        (finding.file, finding.row, finding.column)
        for path in [items(tmp_path)]
        for dataset in [Dataset(str(path), batch_rows=1)]
        for _ in [list(dataset.episodes())]
        for finding in dataset.report.findings
    ]
    assert (str(tmp_path / "a.parquet"), 1, "item") == place


@pytest.mark.parametrize("batch_rows", [1, 2, 100])
def test_rows_of_findings_that_raise_are_those_of_the_file(tmp_path: Path, batch_rows: int) -> None:
    strict = ValidationPolicy.strict()
    with pytest.raises(ValidationError) as raised:
        list(Dataset(str(items(tmp_path)), policy=strict, batch_rows=batch_rows).episodes())
    assert 1 == raised.value.row
    repeated = steps(t=[0, 0, 2])
    parquet.write_table(repeated, tmp_path / "b.parquet")
    with pytest.raises(ValidationError) as raised:
        list(Dataset(str(tmp_path / "b.parquet"), policy=strict, batch_rows=batch_rows).episodes())
    assert (1, True) == (raised.value.row, str(FindingKind.REPEATED_STEP) in str(raised.value))


def test_infos_may_be_a_struct(tmp_path: Path) -> None:
    parquet.write_table(steps(infos=STRUCT), tmp_path / "a.parquet")
    (episode,) = Dataset(str(tmp_path / "a.parquet")).episodes()
    assert [{}, *STRUCT] == [dict(info) for info in episode.infos]


def test_a_struct_in_front_does_not_change_the_rows_that_are_named(tmp_path: Path) -> None:
    table = steps(obs=STRUCT, new_obs=STRUCT, rewards=[1.0, 1.0, None])
    parquet.write_table(
        table.select(["obs", *set(table.column_names) - {"obs"}]), tmp_path / "a.parquet"
    )
    with pytest.raises(Exception, match=r"a\.parquet, row 2, column 'rewards'"):
        list(Dataset(str(tmp_path / "a.parquet"), batch_rows=1).episodes())
