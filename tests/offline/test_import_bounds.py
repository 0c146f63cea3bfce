"""A small file that asks for much is refused before anything is allocated for it.

All are read in one process that can get only so much more memory, and so many seconds of processor
time, than it has when it starts to read.
"""

import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import lz4.frame
import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

MEMORY_BYTES = 1 << 28
"""What `DataLimits.within` is told."""
SPACE_BYTES = 1 << 29
"""Address space that reading may take, threads and all."""
CPU_S = 60

READER = """
import json, resource, sys
from pathlib import Path
import pyarrow.compute, pyarrow.json, pyarrow.parquet
from breadbox_learner.offline.dataset import Dataset
from breadbox_learner.offline.errors import OfflineDataError
from breadbox_learner.offline.limits import DataLimits
from breadbox_learner.offline.options import MappingOptions

memory, space, cpu_s, *paths = sys.argv[1:]
held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + int(space),) * 2)
resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_s),) * 2)
for path in paths:
    mapping = MappingOptions(limits=DataLimits.within(int(memory)))
    dataset = Dataset(path, mapping)
    try:
        said = f"{sum(1 for _ in dataset.episodes())} episodes"
    except OfflineDataError as error:
        said = f"refused: {error}"
    found = "".join(f", found: {finding}" for finding in dataset.report.findings)
    print(json.dumps(said + found), flush=True)
"""
QUIET = {
    "OPENBLAS_NUM_THREADS": "1",
    # Allocators that reserve much more than they use would hide what is asked for.
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_ARENA_MAX": "1",
}


def read_all(paths: list[str]) -> list[str]:
    """What reading some datasets in one bounded process says of each."""
    bounds = [str(MEMORY_BYTES), str(SPACE_BYTES), str(CPU_S)]
    done = subprocess.run(
        [sys.executable, "-c", READER, *bounds, *paths],
        capture_output=True,
        check=False,
        text=True,
        env=os.environ | QUIET,
    )
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert (0, "", len(paths)) == (done.returncode, done.stderr[-2000:], len(said)), said[-1:]
    return said


def packed(pickled: bytes) -> str:
    return base64.b64encode(lz4.frame.compress(pickled)).decode()


def doubled_tuple(levels: int) -> bytes:
    """A pickle that names a dtype after a tuple of twice the same tuple, and so on."""
    name = b"N" + b"q\x00h\x00\x86" * levels
    return b"\x80\x04cnumpy\ndtype\n" + name + b"\x85R."


def rebuilt_array(times: int) -> bytes:
    """A pickle that makes the same array, of the other byte order, again and again."""
    contents = bytes(1 << 20)
    start = (
        b"\x80\x04cnumpy._core.numeric\n_frombuffer\nq\x00"
        + b"cnumpy\ndtype\nX\x02\x00\x00\x00f4\x89\x88\x87R(K\x03X\x01\x00\x00\x00>NNNtbq\x01"
        + b"\x8e"
        + len(contents).to_bytes(8, "little")
        + contents
        + b"q\x02"
        + b"J"
        + (len(contents) // 4).to_bytes(4, "little")
        + b"\x85q\x03"
        + b"X\x01\x00\x00\x00Cq\x04"
    )
    return start + b"h\x00(h\x02h\x01h\x03h\x04tR" * times + b"."


def packed_steps(value: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        table = pa.table(
            {
                "eps_id": ["a"],
                "t": [0],
                "obs": [value],
                "new_obs": [value],
                "actions": [0],
                "rewards": [1.0],
                "terminateds": [True],
            }
        )
        parquet.write_table(table, folder / "a.parquet")
        return folder / "a.parquet"

    return make


def one_text_for_all_rows(folder: Path) -> Path:
    """4,096 rows of the same 80 MB, in a few kilobytes."""
    text = pa.array([b"x" * (80 << 20)])
    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(4096, np.int32)), text)
    parquet.write_table(
        pa.table({"obs": column}),
        folder / "a.parquet",
        compression="zstd",
        dictionary_pagesize_limit=1 << 30,
        write_statistics=False,
    )
    return folder / "a.parquet"


def one_long_row(folder: Path) -> Path:
    """A row of 40 million zeros, as a run of one."""
    count = 40_000_000
    column = pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), pa.array(np.zeros(count)))
    parquet.write_table(
        pa.table({"obs": column}),
        folder / "a.parquet",
        compression="zstd",
        write_statistics=False,
        data_page_size=1 << 30,
        store_schema=False,
    )
    return folder / "a.parquet"


def an_absent_row_of_a_huge_type(folder: Path) -> Path:
    """A row that is absent, of a type that says how much it would hold."""
    table = pa.table({"obs": pa.array([None], pa.list_(pa.int8(), 1 << 27))})
    parquet.write_table(table, folder / "a.parquet", write_statistics=False)
    return folder / "a.parquet"


def lines(*texts: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / "a.jsonl").write_text("".join(f"{text}\n" for text in texts))
        return folder / "a.jsonl"

    return make


STEP = {"obs": [1.0], "new_obs": [1.0], "actions": 0, "rewards": 1.0, "terminateds": True}
GOOD_LINE = json.dumps({"eps_id": "a", "t": 0, **STEP})
MANY_KEYS = json.dumps({"eps_id": "a", "t": 0, **STEP, **{f"k{i}": 0 for i in range(1000)}})

REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a name that doubles": (
        packed_steps(packed(doubled_tuple(40))),
        "row 0, column 'obs': pickle refused at byte",
    ),
    "an array made 1,000 times": (
        packed_steps(packed(rebuilt_array(1000))),
        "row 0, column 'obs': pickle refused at byte",
    ),
    "a text for 4,096 rows": (
        one_text_for_all_rows,
        "a.parquet, row 0, column 'obs': a row states",
    ),
    "a row of 320 MB": (one_long_row, "a.parquet, column 'obs.list.element': row group 0 states"),
    "an absent row of 128 MiB": (
        an_absent_row_of_a_huge_type,
        "a.parquet, column 'obs': a row states for 134217728",
    ),
    "100,000 lists in each other": (
        lines(GOOD_LINE, '{"obs":' + "[" * 100_000 + "]" * 100_000 + "}"),
        "a.jsonl, row 1: has more than 64 levels",
    ),
    "lists in each other beside texts": (
        lines('{"]":"]\\"]","obs":' + '["]",' * 3000 + "1" + "]" * 3000 + "}"),
        "a.jsonl, row 0: has more than 64 levels",
    ),
    "objects in each other, behind the first block": (
        lines(*[GOOD_LINE] * 20_000, '{"obs":' * 100_000 + "1" + "}" * 100_000),
        "a.jsonl, row 20000: has more than 64 levels",
    ),
    "5,000 lines with a key each": (
        lines(*(f'{{"k{index}":1}}' for index in range(5_000))),
        "a.jsonl, row 0: 5000 objects with 5000 different keys",
    ),
    "empty lines behind one with many keys": (
        lines(MANY_KEYS, *["{}"] * 20_000),
        "a.jsonl, row 0: 20001 objects with 1007 different keys",
    ),
    "empty lines in a block of their own": (
        lines(*[MANY_KEYS] * 90, *["{}"] * 700_000),
        "different keys have more than",
    ),
    "a line that fits no block": (
        lines(GOOD_LINE, '{"obs":"' + "x" * (1 << 21) + '"}'),
        "a.jsonl, row 1: a line has more than",
    ),
}


def many_fine_lines(folder: Path) -> Path:
    text = json.dumps({"eps_id": "a", "t": 0, **STEP, "infos": {"said": '\\"]]]{" [' * 20}})
    return lines(*(text.replace('"a"', f'"{index}"') for index in range(10_000)))(folder)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What reading each case says."""
    makers = {name: make for name, (make, _) in REFUSED.items()} | {"fine": many_fine_lines}
    folder = tmp_path_factory.mktemp("files")
    paths = []
    for index, make in enumerate(makers.values()):
        (folder / str(index)).mkdir()
        paths.append(str(make(folder / str(index))))
    return dict(zip(makers, read_all(paths), strict=True))


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_asks_for_more_than_it_may_is_refused(name: str, said: dict[str, str]) -> None:
    _, problem = REFUSED[name]

    assert said[name].startswith("refused: ")
    assert problem in said[name]


def test_lines_that_are_fine_are_read_across_blocks(said: dict[str, str]) -> None:
    assert "10000 episodes" == said["fine"]
