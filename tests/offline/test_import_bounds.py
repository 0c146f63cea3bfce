"""A small file that asks for much is refused before anything is allocated for it.

All are read in one process that can get only so much more memory, and so many seconds of processor
time, than it has when it starts to read.
"""

import base64
import importlib
import io
import json
import os
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import av
import lz4.frame
import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from PIL import Image

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

MEMORY_BYTES = 1 << 28
"""What `DataLimits.within` is told."""
SPACE_BYTES = 1 << 29
"""Address space that reading may take, threads and all."""
CPU_S = 60

READER = """
import json, resource, sys
from pathlib import Path
import av, pyarrow.compute, pyarrow.json, pyarrow.parquet
try:
    import h5py, minari, PIL.Image
except ImportError:
    pass
from breadbox_offline.files.dataset import Dataset
from breadbox_offline.errors import OfflineDataError
from breadbox_offline.limits import DataLimits
from breadbox_offline.rows.options import MappingOptions

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


def read_all(paths: list[str], minari_folder: Path) -> list[str]:
    """What reading some datasets in one bounded process says of each."""
    bounds = [str(MEMORY_BYTES), str(SPACE_BYTES), str(CPU_S)]
    done = subprocess.run(
        [sys.executable, "-c", READER, *bounds, *paths],
        capture_output=True,
        check=False,
        text=True,
        env=os.environ | QUIET | {"MINARI_DATASETS_PATH": str(minari_folder)},
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


def rows_of_one_value(folder: Path) -> Path:
    """20 million rows that are all alike, in a few kilobytes."""
    count = 20_000_000
    column = pa.array(np.zeros(count, np.int64))
    parquet.write_table(
        pa.table({"t": column, "rewards": column}), folder / "a.parquet", compression="zstd"
    )
    return folder / "a.parquet"


def short_rows_in_one_run(folder: Path) -> Path:
    """A million rows of 20 zeros each, as one run: no row, and no column, is large."""
    ends = pa.array(np.arange(0, 20_000_001, 20, dtype=np.int32))
    column = pa.ListArray.from_arrays(ends, pa.array(np.zeros(20_000_000, np.float64)))
    parquet.write_table(
        pa.table({"obs": column}), folder / "a.parquet", compression="zstd", store_schema=False
    )
    return folder / "a.parquet"


def steps_of(folder: Path, obs: pa.Array, **how: Any) -> Path:
    """A file with rows of these observations, whose other columns are fine."""
    count = len(obs)
    columns = {
        "obs": obs,
        "new_obs": obs,
        "actions": pa.array(np.zeros(count, np.int64)),
        "rewards": pa.array(np.zeros(count)),
        "terminateds": pa.array(np.ones(count, np.bool_)),
        "eps_id": pa.array(["a"] * count),
    }
    path = folder / "a.parquet"
    how = {"compression": "zstd", "write_statistics": False, "store_schema": False} | how
    parquet.write_table(pa.table(columns), path, **how)
    return path


def shared(value: Any, count: int) -> pa.DictionaryArray:
    """Rows that are all the same value, which is stored once."""
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), pa.array([value]))


def rows_of_one_text(folder: Path) -> Path:
    """2,000 rows of the same 8 MB, in two kilobytes: each fits, and so does each read."""
    return steps_of(folder, shared(b"x" * (1 << 23), 2000), dictionary_pagesize_limit=1 << 30)


def lists_of_one_text(folder: Path) -> Path:
    """500 rows of 4 times the same 8 MB."""
    ends = pa.array(np.arange(0, 2001, 4, dtype=np.int32))
    texts = pa.ListArray.from_arrays(ends, shared(b"x" * (1 << 23), 2000))
    return steps_of(folder, texts, dictionary_pagesize_limit=1 << 30)


def maps_of_one_text(folder: Path) -> Path:
    """500 rows of 4 keys that lead to the same 8 MB."""
    ends = pa.array(np.arange(0, 2001, 4, dtype=np.int32))
    keys = pa.array([str(at % 4) for at in range(2000)])
    texts = pa.MapArray.from_arrays(ends, keys, shared(b"x" * (1 << 23), 2000))
    return steps_of(folder, texts, dictionary_pagesize_limit=1 << 30)


def texts_that_begin_alike(folder: Path) -> Path:
    """128 texts of which each repeats the first megabyte, and has a letter of its own."""
    texts = pa.array([b"x" * (1 << 20) + bytes([65 + at % 26]) for at in range(128)])
    encoding = dict.fromkeys(("obs", "new_obs"), "DELTA_BYTE_ARRAY")
    return steps_of(folder, texts, use_dictionary=False, column_encoding=encoding)


def image_of(width: int, height: int) -> bytes:
    """A PNG of one colour, which is small."""
    written = io.BytesIO()
    Image.new("L", (width, height)).save(written, "PNG")
    return written.getvalue()


def images_of(data: bytes | None, count: int, path: str | None = None) -> pa.Array:
    held = [{"bytes": data, "path": path}] * count
    return pa.array(held, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))


def many_pixels(folder: Path) -> Path:
    """An image that states 65,500 by 65,500 pixels."""
    data = bytearray(image_of(16, 16))
    data[16:24] = (65_500).to_bytes(4, "big") * 2
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return steps_of(folder, images_of(bytes(data), 1))


def one_image_for_all_rows(folder: Path) -> Path:
    """1,000 rows of the same image of 16 megapixels."""
    return steps_of(folder, images_of(image_of(4000, 4000), 1000))


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


def huge_npy() -> bytes:
    """An array's header that states 8 TiB, and nothing behind it."""
    written = io.BytesIO()
    header = {"descr": "<f8", "fortran_order": False, "shape": (1 << 40,)}
    np.lib.format.write_array_header_1_0(written, header)
    return written.getvalue()


def small_npy() -> bytes:
    written = io.BytesIO()
    np.save(written, np.zeros(1))
    return written.getvalue()


def recording(obs: bytes = b"", **entry: str) -> Callable[[Path], Path]:
    """A folder as `breadbox generate` writes it, with an episode of one step."""

    def make(folder: Path) -> Path:
        columns = ("action", "reward", "terminated", "truncated")
        with zipfile.ZipFile(folder / "action.npz", "w") as archive:
            for name in columns:
                archive.writestr(f"{name}.npy", small_npy())
        with zipfile.ZipFile(folder / "obs.npz", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("obs.npy", obs)
        line = {"episode_id": "a", "action_path": "action.npz", **entry}
        (folder / "manifest.jsonl").write_text(json.dumps(line) + "\n")
        return folder

    return make


def deep_manifest(folder: Path) -> Path:
    (folder / "manifest.jsonl").write_text("[" * 100_000 + "\n")
    return folder


def many_arrays(folder: Path) -> Path:
    recording(obs_path="obs.npz")(folder)
    with zipfile.ZipFile(folder / "obs.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for index in range(20):
            archive.writestr(f"obs.{index}.npy", bytes(32 << 20))
    return folder


def huge_image(folder: Path) -> Path:
    """A JPEG that states 65,500 by 65,500 pixels."""
    recording(base_image_path="images")(folder)
    (folder / "images").mkdir()
    written = io.BytesIO()
    Image.new("RGB", (16, 16)).save(written, "JPEG")
    size = written.getvalue().index(b"\xff\xc0") + 5
    data = bytearray(written.getvalue())
    data[size : size + 4] = (65_500).to_bytes(2, "big") * 2
    (folder / "images" / "0.jpeg").write_bytes(data)
    return folder


def linked_image(folder: Path) -> Path:
    recording(base_image_path="images")(folder)
    (folder / "images").mkdir()
    (folder / "images" / "0.jpeg").symlink_to("/dev/zero")
    return folder


def playlist(folder: Path) -> Path:
    """What is called a video names another file, which would be opened."""
    recording(video_path="a.mp4")(folder)
    with av.open(str(folder / "other.ts"), "w") as container:
        stream = container.add_stream("libx264", rate=30)
        stream.width, stream.height, stream.pix_fmt = 16, 16, "yuv420p"
        for _ in range(2):
            frame = av.VideoFrame.from_ndarray(np.zeros((16, 16, 3), np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    (folder / "a.mp4").write_text(
        "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nother.ts\n#EXT-X-ENDLIST\n"
    )
    return folder


def link_out_of_the_folder(folder: Path) -> Path:
    lines(GOOD_LINE)(folder)
    (folder / "b.jsonl").symlink_to("/dev/zero")
    return folder


def minari_dataset(change: Callable[[Any, dict[str, Any]], None]) -> Callable[[Path], str]:
    """A Minari dataset of an episode of one step, changed."""

    def make(folder: Path) -> str:
        h5py, _ = map(importlib.import_module, ("h5py", "minari"))
        data = folder.parent / "minari" / f"case{folder.name}-v0" / "data"
        data.mkdir(parents=True)
        box = {"type": "Box", "dtype": "float32", "shape": [1], "low": [0.0], "high": [1.0]}
        metadata = {
            "dataset_id": f"case{folder.name}-v0",
            "data_format": "hdf5",
            "minari_version": "0.5.0",
            "total_episodes": 1,
            "total_steps": 1,
            "observation_space": json.dumps(box),
            "action_space": json.dumps(box),
        }
        with h5py.File(data / "main_data.hdf5", "w") as file:
            episode = file.create_group("episode_0")
            episode["observations"] = np.zeros((2, 1), np.float32)
            episode["actions"] = np.zeros((1, 1), np.float32)
            for name in ("rewards", "terminations", "truncations"):
                episode[name] = np.ones(1)
            change(episode, metadata)
        (data / "metadata.json").write_text(json.dumps(metadata))
        return f"minari:case{folder.name}-v0"

    return make


def unchanged(episode: Any, metadata: dict[str, Any]) -> None:
    pass


def sparse_array(episode: Any, metadata: dict[str, Any]) -> None:
    """32 GiB that were never written."""
    del episode["observations"]
    episode.create_dataset(
        "observations", (1 << 33, 1), np.float32, chunks=(1 << 16, 1), compression="gzip"
    )


def many_arrays_together(episode: Any, metadata: dict[str, Any]) -> None:
    infos = episode.create_group("infos")
    for index in range(20):
        infos.create_dataset(str(index), (15 << 20,), np.uint8, chunks=(1 << 20,))


def other_file(episode: Any, metadata: dict[str, Any]) -> None:
    del episode["observations"]
    episode["observations"] = importlib.import_module("h5py").ExternalLink("/etc/passwd", "/")


def raw_file(episode: Any, metadata: dict[str, Any]) -> None:
    del episode["observations"]
    outside = [("/etc/passwd", 0, 8)]
    episode.create_dataset("observations", (2, 1), np.float32, external=outside)


def circle(episode: Any, metadata: dict[str, Any]) -> None:
    episode.create_group("infos")["again"] = episode


def one_row_for_all(episode: Any, metadata: dict[str, Any]) -> None:
    h5py = importlib.import_module("h5py")
    texts = episode.create_group("infos").create_dataset(
        "said", (100,), h5py.string_dtype(), chunks=(100,), compression="gzip"
    )
    texts[:] = ["x" * (4 << 20)] * 100


def frames_of_many_pixels(episode: Any, metadata: dict[str, Any]) -> None:
    del episode["observations"]
    written = io.BytesIO()
    Image.new("RGB", (8000, 8000)).save(written, "JPEG")
    episode["observations"] = np.stack([np.frombuffer(written.getvalue(), np.uint8)] * 2)


def code_for_spaces(episode: Any, metadata: dict[str, Any]) -> None:
    del metadata["observation_space"]
    spec = {"id": "a-v0", "entry_point": "os:mkdir", "kwargs": {"path": "/tmp/ran"}}
    metadata["env_spec"] = json.dumps(spec)


def huge_space(episode: Any, metadata: dict[str, Any]) -> None:
    space = {"type": "Box", "dtype": "float64", "shape": [1 << 40], "low": 0.0, "high": 1.0}
    metadata["observation_space"] = json.dumps(space)


def deep_space(episode: Any, metadata: dict[str, Any]) -> None:
    text = '{"type":"Tuple","subspaces":['
    metadata["observation_space"] = text * 5000 + "]}" * 5000


def many_episodes(episode: Any, metadata: dict[str, Any]) -> None:
    metadata["total_episodes"] = 1 << 40


def no_actions(episode: Any, metadata: dict[str, Any]) -> None:
    del episode["actions"]


STEP = {"obs": [1.0], "new_obs": [1.0], "actions": 0, "rewards": 1.0, "terminateds": True}
GOOD_LINE = json.dumps({"eps_id": "a", "t": 0, **STEP})
MANY_KEYS = json.dumps({"eps_id": "a", "t": 0, **STEP, **{f"k{i}": 0 for i in range(1000)}})

REFUSED: dict[str, tuple[Callable[[Path], Path | str], str]] = {
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
    "20 million equal rows": (rows_of_one_value, "bytes states 320000000 bytes"),
    "a million equal lists": (short_rows_in_one_run, "bytes states 168000000 bytes"),
    "2,000 rows of one text": (rows_of_one_text, "bytes states 33386702377 bytes"),
    "lists of one text": (lists_of_one_text, "bytes states 334"),
    "maps of one text": (maps_of_one_text, "states"),
    "texts that begin alike": (texts_that_begin_alike, "bytes states 2"),
    "an image of 4 gigapixels in a row": (
        many_pixels,
        "column 'obs': holds an image that is no PNG or JPEG: Image size (4290250000 pixels)",
    ),
    "an image of 169 megapixels": (
        lambda folder: steps_of(folder, images_of(image_of(13_000, 13_000), 1)),
        "row 0, column 'obs': a row states 169000000",
    ),
    "one image for 1,000 rows": (one_image_for_all_rows, "states 320"),
    "an image that is elsewhere": (
        lambda folder: steps_of(folder, images_of(None, 1, "/etc/hostname")),
        "column 'obs': holds an image without bytes; files that it names are not read",
    ),
    "an image that is none": (
        lambda folder: steps_of(folder, images_of(b"GIF89a" + bytes(64), 1)),
        "column 'obs': holds an image that is no PNG or JPEG",
    ),
    "an image that is cut off": (
        lambda folder: steps_of(folder, images_of(image_of(64, 64)[:60], 1)),
        "column 'obs': ",
    ),
    "an absent row of 128 MiB": (
        an_absent_row_of_a_huge_type,
        "a.parquet, column 'obs': a row states 134217728",
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
    "a list of a deep manifest": (deep_manifest, "row 0): is nested too deeply"),
    "an array of 8 TiB": (recording(huge_npy(), obs_path="obs.npz"), "states 8796093022208 bytes"),
    "arrays that are too large together": (many_arrays, "obs.npz states 671088640 bytes"),
    "an image of 4 gigapixels": (huge_image, "0.jpeg cannot be decoded"),
    "an image that is a link": (linked_image, "'0.jpeg' is no file"),
    "a video that names another": (playlist, "a.mp4 cannot be decoded"),
    "a link out of the folder": (link_out_of_the_folder, "b.jsonl: is a link out of its folder"),
    "32 GiB of HDF5": (
        minari_dataset(sparse_array),
        "column 'episode_0/observations': an array states 34359738368 bytes",
    ),
    "arrays of HDF5 together": (minari_dataset(many_arrays_together), "'episode_0' states 314"),
    "HDF5 that leads to another file": (
        minari_dataset(other_file),
        "column 'episode_0/observations': is a link to somewhere else",
    ),
    "HDF5 held in another file": (
        minari_dataset(raw_file),
        "column 'episode_0/observations': is held in other files",
    ),
    "HDF5 in a circle": (
        minari_dataset(circle),
        "column 'episode_0/infos/again': is held in two places",
    ),
    "texts of HDF5": (
        minari_dataset(one_row_for_all),
        "column 'episode_0/infos/said': an array states",
    ),
    "frames of many pixels": (
        minari_dataset(frames_of_many_pixels),
        "column 'episode_0/observations': frames states 384000000",
    ),
    "a dataset that names code": (
        minari_dataset(code_for_spaces),
        "column 'observation_space': is missing",
    ),
    "a space of 8 TiB": (
        minari_dataset(huge_space),
        "column 'observation_space': a space states 8796093022208 bytes",
    ),
    "spaces in each other": (
        minari_dataset(deep_space),
        "column 'observation_space': is nested too deeply",
    ),
    "a trillion episodes": (minari_dataset(many_episodes), "holds 1 episodes, but states"),
    "an episode without actions": (minari_dataset(no_actions), "cannot be read: KeyError"),
    "a line that fits no block": (
        lines(GOOD_LINE, '{"obs":"' + "x" * (1 << 21) + '"}'),
        "a.jsonl, row 1: a line has more than",
    ),
}


def many_fine_lines(folder: Path) -> Path:
    text = json.dumps({"eps_id": "a", "t": 0, **STEP, "infos": {"said": '\\"]]]{" [' * 20}})
    return lines(*(text.replace('"a"', f'"{index}"') for index in range(10_000)))(folder)


FINE: dict[str, Callable[[Path], Path | str]] = {
    "lines": many_fine_lines,
    "minari": minari_dataset(unchanged),
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What reading each case says."""
    makers = {name: make for name, (make, _) in REFUSED.items()} | FINE
    folder = tmp_path_factory.mktemp("files")
    paths = {}
    for index, (name, make) in enumerate(makers.items()):
        (folder / str(index)).mkdir()
        with suppress(ImportError):
            paths[name] = str(make(folder / str(index)))
    return dict(zip(paths, read_all([*paths.values()], folder / "minari"), strict=True))


def found(said: dict[str, str], name: str) -> str:
    if name not in said:
        pytest.skip("needs minari and h5py, of the extra breadbox[minari]")
    return said[name]


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_asks_for_more_than_it_may_is_refused(name: str, said: dict[str, str]) -> None:
    _, problem = REFUSED[name]

    assert found(said, name).startswith(("refused: ", "0 episodes, found: malformed"))
    assert problem in said[name]


@pytest.mark.parametrize(("name", "count"), [("lines", 10_000), ("minari", 1)])
def test_what_is_fine_is_read(name: str, count: int, said: dict[str, str]) -> None:
    assert f"{count} episodes" == found(said, name)
