"""Goal: files come back as they were written, and broken or hostile ones are refused with file, row
and column, executing nothing and allocating nothing large.
"""

import base64
import io
import json
import os
import pickle  # noqa: TID251 - makes hostile inputs
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lz4.frame
import msgpack
import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from PIL import Image

from breadbox_offline.decoding.arrow import columns_of
from breadbox_offline.decoding.msgpack_codec import pack_message
from breadbox_offline.episodes.episode import Episode
from breadbox_offline.episodes.serialized import pack_episode, unpack_episode
from breadbox_offline.errors import (
    OfflineDataError,
    SchemaError,
    UnsupportedDatasetError,
)
from breadbox_offline.files.dataset import Dataset
from breadbox_offline.files.readers import read_file
from breadbox_offline.files.writers import write_episodes
from breadbox_offline.limits import DataLimits
from breadbox_offline.report import FindingKind
from breadbox_offline.rows.options import MappingOptions
from support import growth
from support.rllib_cases import make_toy_episode


def toy(episode_id: str, length: int, *, end: str = "term") -> Episode:
    return make_toy_episode(episode_id, length, terminated=end == "term", truncated=end == "trunc")


def camera(episode_id: str, length: int) -> Episode:
    rng = np.random.default_rng(5)
    episode = toy(episode_id, length, end="trunc")
    episode.observations = {
        "cam": rng.integers(0, 255, (length + 1, 4, 4, 3), dtype=np.uint8),
        "pos": rng.normal(size=(length + 1, 2)).astype(np.float32),
        "on": rng.random(length + 1) > 0.5,
    }
    return episode


NAMED = {"0": {"space": "discrete", "n": 9}, "1": {"space": "box", "shape": [2], "dtype": "<f4"}}


def with_tuples(episode_id: str, length: int) -> Episode:
    rng = np.random.default_rng(6)
    steps = np.arange(length + 1)
    episode = toy(episode_id, length)
    episode.observations = (
        rng.normal(size=(length + 1, 2)).astype(np.float32),
        (
            rng.integers(0, 255, (length + 1, 2), dtype=np.uint8),
            {"0": steps, "1": rng.normal(size=(length + 1, 2)).astype(np.float32)},
        ),
    )
    episode.actions = (steps[:-1] % 4, rng.normal(size=(length, 1)))
    episode.extra_model_outputs = {"heads": (steps[:-1], steps[1:])}
    return episode


def box(size: int, dtype: str = "<f4") -> dict[str, Any]:
    return {"space": "box", "shape": [size], "dtype": dtype}


def tuple_space(spaces: list[Any]) -> dict[str, Any]:
    return {"space": "tuple", "spaces": spaces}


def entry_of(data: Any, row: int) -> Any:
    if isinstance(data, dict):
        return {name: entry_of(held, row) for name, held in data.items()}
    if isinstance(data, list):
        return [entry_of(held, row) for held in data]
    return data[row]


def decode_arrays(held: dict[Any, Any]) -> Any:
    if b"nd" not in held:
        return held
    return np.frombuffer(held[b"data"], held[b"type"]).reshape(held[b"shape"])


def digests(episodes: list[Episode]) -> list[bytes]:
    return [episode.content_digest() for episode in episodes]


def read(path: Path, **how: Any) -> tuple[list[Episode], Dataset]:
    dataset = Dataset(str(path), **how)
    return list(dataset.episodes()), dataset


class Executes:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.marker}",)


class TestRoundTrips:
    @pytest.mark.parametrize("batch_rows", [1, 3, 4096])
    @pytest.mark.parametrize(
        ("name", "layout"), [("a.parquet", "steps"), ("a.parquet", "episodes"), ("a.msgpack", "")]
    )
    def test_episodes_come_back_as_written(
        self, tmp_path: Path, name: str, layout: str, batch_rows: int
    ) -> None:
        episodes = [camera("a", 5), camera("b", 1), camera("c", 7)]
        counts = write_episodes(episodes, tmp_path / name, layout=layout or "steps")
        assert (3, 13) == (counts.episode_count, counts.step_count)
        back, dataset = read(tmp_path / name, batch_rows=batch_rows)
        assert digests(episodes) == digests(back)
        assert ["a", "b", "c"] == [episode.id for episode in back]
        assert not dataset.report.counts

    @pytest.mark.parametrize(
        ("name", "layout"), [("a.parquet", "steps"), ("a.parquet", "episodes"), ("a.msgpack", "")]
    )
    def test_tuples_come_back_as_tuples_and_dicts_as_dicts(
        self, tmp_path: Path, name: str, layout: str
    ) -> None:
        episodes = [with_tuples("a", 5), with_tuples("b", 1)]
        write_episodes(episodes, tmp_path / name, layout=layout or "steps")
        back, _ = read(tmp_path / name)
        assert digests(episodes) == digests(back)
        for episode in back:
            pos, (grid, named) = episode.observations
            assert (2, ["0", "1"]) == (pos.ndim, list(named))
            assert (np.uint8, np.int64) == (grid.dtype, named["0"].dtype)
            assert isinstance(episode.actions, tuple)
            assert isinstance(episode.extra_model_outputs["heads"], tuple)

    @pytest.mark.parametrize("has_space", [True, False])
    @pytest.mark.parametrize("is_stacked", [True, False])
    def test_tuples_of_other_recorders_are_found_in_lists(
        self, is_stacked: bool, has_space: bool
    ) -> None:
        state = msgpack.unpackb(pack_episode(with_tuples("a", 3)), object_hook=decode_arrays)
        spaces = {
            "observations": tuple_space(
                [box(2), tuple_space([box(2, "|u1"), {"space": "dict", "spaces": NAMED}])]
            ),
            "actions": tuple_space([{"space": "discrete", "n": 4}, box(1, "<f8")]),
        }
        for name, space in spaces.items():
            buffer = state[name]
            buffer["space"] = space if has_space else None
            buffer["finalized"] = is_stacked
            if not is_stacked:
                count = 4 if name == "observations" else 3
                buffer["data"] = [entry_of(buffer["data"], row) for row in range(count)]
        back = unpack_episode(pack_message(state))
        assert with_tuples("a", 3).content_digest() == back.content_digest()
        assert (tuple, tuple) == (type(back.observations), type(back.actions))

    @pytest.mark.parametrize("data", [[], [np.zeros(4)], 5, {"0": np.zeros(4)}, [[], []]])
    def test_a_buffer_that_its_space_does_not_fit_is_refused(self, data: object) -> None:
        state = msgpack.unpackb(pack_episode(with_tuples("a", 3)), object_hook=decode_arrays)
        state["observations"] |= {"data": data, "space": tuple_space([box(2), box(2)])}
        with pytest.raises(OfflineDataError, match="observations"):
            unpack_episode(pack_message(state))

    def test_lists_nested_too_deeply_are_refused(self) -> None:
        deep: Any = np.zeros(4)
        for _ in range(100):
            deep = [deep]
        state = msgpack.unpackb(pack_episode(toy("a", 3)), object_hook=decode_arrays)
        state["observations"]["data"] = deep
        with pytest.raises(OfflineDataError, match=r"observations.*deeply"):
            unpack_episode(pack_message(state))

    @pytest.mark.parametrize("name", ["a.parquet", "a.msgpack"])
    def test_recurrent_states_come_back_with_serialized_episodes(
        self, tmp_path: Path, name: str
    ) -> None:
        episode = toy("a", 5)
        state = ({"h": np.arange(3, dtype=np.float32)}, np.float64(0.5))
        episode.in_states = {0: state, 4: state}
        write_episodes([episode], tmp_path / name, layout="episodes")
        (back,), _ = read(tmp_path / name)
        assert [0, 4] == list(back.in_states)
        for held, scale in back.in_states.values():
            assert (np.float32, [0, 1, 2]) == (held["h"].dtype, held["h"].tolist())
            assert 0.5 == scale

    @pytest.mark.parametrize("hostile", [5, [1], [["0", 1]], [[0, "text"]], [[0, [[]] * 2 + [1]]]])
    def test_recurrent_states_of_another_kind_are_reported(
        self, tmp_path: Path, hostile: object
    ) -> None:
        state = msgpack.unpackb(pack_episode(toy("a", 2)), strict_map_key=False)
        state["custom_data"] = {"in_states": hostile}
        (tmp_path / "a.msgpack").write_bytes(msgpack.packb(state))
        episodes, dataset = read(tmp_path / "a.msgpack")
        assert [] == episodes
        (finding,) = dataset.report.findings
        assert (FindingKind.MALFORMED, "item") == (finding.kind, finding.column)
        assert "in_states" in finding.why

    def test_a_recurrent_state_nested_too_deeply_is_reported(self, tmp_path: Path) -> None:
        deep: object = 1
        for _ in range(200):
            deep = [deep]
        state = msgpack.unpackb(pack_episode(toy("a", 2)), strict_map_key=False)
        state["custom_data"] = {"in_states": [[0, deep]]}
        (tmp_path / "a.msgpack").write_bytes(msgpack.packb(state))
        assert [] == read(tmp_path / "a.msgpack")[0]

    def test_an_episode_may_span_files(self, tmp_path: Path) -> None:
        whole = toy("a", 6)
        for number, bounds in enumerate([(0, 2), (2, 5), (5, 6)]):
            write_episodes([whole.slice(*bounds)], tmp_path / f"part-{number}.parquet")
        (back,), _ = read(tmp_path)
        assert whole.content_digest() == back.content_digest()

    def test_nothing_is_left_of_a_file_that_was_not_finished(self, tmp_path: Path) -> None:
        with pytest.raises(SchemaError, match="columns"):
            write_episodes([toy("a", 2), camera("b", 2)], tmp_path / "a.parquet")
        assert [] == list(tmp_path.iterdir())

    def test_an_empty_export_is_an_empty_dataset(self, tmp_path: Path) -> None:
        write_episodes([], tmp_path / "a.parquet")
        assert [] == read(tmp_path / "a.parquet")[0]

    def test_rows_as_json_lines(self, tmp_path: Path) -> None:
        lines = [
            {
                "eps_id": "a",
                "t": t,
                "obs": [float(t), 0.5],
                "new_obs": [float(t + 1), 0.5],
                "actions": t,
                "rewards": 1.0,
                "terminateds": t == 2,
            }
            for t in range(3)
        ]
        path = tmp_path / "a.jsonl"
        path.write_text("\n".join(json.dumps(line) for line in lines))
        (episode,), _ = read(path, batch_rows=2)
        assert (3, True) == (len(episode), episode.terminated)
        assert [0, 1, 2, 3] == episode.observations[:, 0].tolist()

    def test_old_stack_json_lines_with_packed_observations(self, tmp_path: Path) -> None:
        def pack(array: np.ndarray) -> str:
            return base64.b64encode(lz4.frame.compress(pickle.dumps(array))).decode()

        obs = np.arange(8, dtype=np.float32).reshape(4, 2)
        line = {
            "type": "SampleBatch",
            "eps_id": [4, 4, 4],
            "obs": pack(obs[:-1]),
            "new_obs": pack(obs[1:]),
            "actions": [0, 1, 0],
            "rewards": [1.0, 2.0, 3.0],
            "dones": [False, False, True],
        }
        path = tmp_path / "output.json"
        path.write_text(json.dumps(line) + "\n" + json.dumps({**line, "eps_id": [5] * 3}))
        episodes, _ = read(path)
        assert ["4", "5"] == [episode.id for episode in episodes]
        np.testing.assert_array_equal(obs, episodes[0].observations)
        assert [True, True] == [episode.terminated for episode in episodes]


class TestArrow:
    def test_lists_of_one_length_become_an_axis(self) -> None:
        batch = pa.record_batch({"x": [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]})
        assert [[[1, 2], [3, 4]], [[5, 6], [7, 8]]] == columns_of(batch)["x"].tolist()

    def test_lists_of_other_lengths_become_arrays_of_their_own(self) -> None:
        held = columns_of(pa.record_batch({"x": [[1.0], [2.0, 3.0], []]}))["x"]
        assert [[1.0], [2.0, 3.0], []] == [each.tolist() for each in held]

    def test_slices_of_a_table_are_read_from_their_start(self) -> None:
        batch = pa.record_batch({"x": [[1, 2], [3, 4], [5, 6]], "y": [{"a": i} for i in range(3)]})
        held = columns_of(batch.slice(1, 2))
        assert ([[3, 4], [5, 6]], [1, 2]) == (held["x"].tolist(), held["y"]["a"].tolist())

    def test_fixed_lists_of_a_slice_are_read_from_their_start(self) -> None:
        array = pa.FixedSizeListArray.from_arrays(pa.array(range(6)), 2)
        held = columns_of(pa.record_batch({"x": array}).slice(1, 2))
        assert [[2, 3], [4, 5]] == held["x"].tolist()

    def test_tensors_of_data_libraries_get_their_shape(self) -> None:
        tensor = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12).reshape(2, 2, 3))
        assert (2, 2, 3) == columns_of(pa.record_batch({"x": tensor}))["x"].shape
        field = pa.field("x", pa.list_(pa.int64()), metadata={"ARROW:extension:metadata": "[2, 3]"})
        batch = pa.record_batch([pa.array([list(range(6))] * 2)], schema=pa.schema([field]))
        assert (2, 2, 3) == columns_of(batch)["x"].shape

    def test_nulls_stay_visible(self) -> None:
        assert [True, None] == columns_of(pa.record_batch({"x": [True, None]}))["x"].tolist()


class TestHostileFiles:
    @pytest.mark.parametrize("part", [0.0, 0.3, 0.6, 0.9, 0.999])
    @pytest.mark.parametrize("name", ["a.parquet", "a.msgpack"])
    def test_a_truncated_file_is_named(self, tmp_path: Path, name: str, part: float) -> None:
        path = tmp_path / name
        write_episodes([toy("a", 50), toy("b", 50)], path)
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * part)])
        if not path.stat().st_size and name.endswith("msgpack"):
            assert [] == read(path)[0]
            return
        with pytest.raises(OfflineDataError, match=name):
            read(path)

    @pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.msgpack"])
    def test_garbage_is_named(self, tmp_path: Path, name: str) -> None:
        path = tmp_path / name
        path.write_bytes(b"\xc1\x00garbage" * 100)
        with pytest.raises(OfflineDataError, match=name):
            read(path)

    @pytest.mark.parametrize("head", [b"\xc6", b"\xdd", b"\xdf", b"\xdb"])
    def test_a_huge_declared_size_in_msgpack_is_refused(self, tmp_path: Path, head: bytes) -> None:
        path = tmp_path / "a.msgpack"
        path.write_bytes(head + struct.pack(">I", 2**32 - 1) + b"\x00" * 10)
        with pytest.raises(OfflineDataError, match=r"a\.msgpack"):
            read(path)

    def test_a_huge_declared_size_in_parquet_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "a.parquet"
        write_episodes([toy("a", 500)], path)
        limits = DataLimits(row_group_bytes_max=100)
        with pytest.raises(OfflineDataError, match=r"row group 0 states \d+ bytes"):
            read(path, mapping=MappingOptions(limits=limits))

    def test_nothing_in_a_packed_column_is_executed(self, tmp_path: Path) -> None:
        marker = tmp_path / "executed"
        hostile = base64.b64encode(lz4.frame.compress(pickle.dumps(Executes(marker)))).decode()
        good = base64.b64encode(lz4.frame.compress(pickle.dumps(np.zeros(2)))).decode()
        rows = {
            "eps_id": ["a"] * 3,
            "t": [0, 1, 2],
            "obs": [good, good, hostile],
            "new_obs": [good] * 3,
            "actions": [0] * 3,
            "rewards": [1.0] * 3,
            "terminateds": [False, False, True],
        }
        path = tmp_path / "a.parquet"
        parquet.write_table(pa.table(rows), path)
        with pytest.raises(OfflineDataError, match=r"a\.parquet, row 2, column 'obs': .*system"):
            read(path)
        assert not marker.exists()

    def test_nothing_in_a_serialized_episode_is_executed(self, tmp_path: Path) -> None:
        marker = tmp_path / "executed"
        array = {
            b"nd": True,
            b"type": b"|O",
            b"kind": b"O",
            b"shape": [1],
            b"data": pickle.dumps(Executes(marker)),
        }
        path = tmp_path / "a.parquet"
        items = [pack_episode(toy("a", 2)), msgpack.packb({"id_": "b", "observations": array})]
        parquet.write_table(pa.table({"item": pa.array(items, pa.binary())}), path)
        episodes, dataset = read(path)
        assert ["a"] == [episode.id for episode in episodes]
        (finding,) = dataset.report.findings
        assert (FindingKind.MALFORMED, 1) == (finding.kind, finding.row)
        assert "would execute code" in finding.why
        assert str(path) == finding.file
        assert not marker.exists()

    def test_nan_and_null_flags_name_file_row_and_column(self, tmp_path: Path) -> None:
        path = tmp_path / "a.parquet"
        for flag in (float("nan"), None):
            rows = {
                "obs": [[0.0]] * 3,
                "new_obs": [[0.0]] * 3,
                "actions": [0] * 3,
                "rewards": [1.0] * 3,
                "terminateds": pa.array([0.0, 0.0, flag], pa.float64()),
            }
            parquet.write_table(pa.table(rows), path)
            with pytest.raises(OfflineDataError, match=r"a\.parquet, row 2, column 'terminateds'"):
                read(path, batch_rows=2)

    def test_missing_columns_name_the_file(self, tmp_path: Path) -> None:
        path = tmp_path / "a.parquet"
        parquet.write_table(pa.table({"obs": [1.0], "rewards": [1.0]}), path)
        with pytest.raises(OfflineDataError, match=r"a\.parquet, column 'actions': is missing"):
            read(path)

    def test_a_json_line_of_another_type_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "a.jsonl"
        path.write_text('{"obs": 1}\n{"obs": "x"}\n{broken')
        with pytest.raises(OfflineDataError, match=r"a\.jsonl"):
            read(path)

    @pytest.mark.parametrize("path", ["absent", "absent.parquet", "empty", "minari:absent/name-v0"])
    def test_a_path_without_data_is_refused(self, tmp_path: Path, path: str) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "empty" / "notes.txt").write_text("nothing")
        where = path if path.startswith("minari:") else str(tmp_path / path)
        with pytest.raises(UnsupportedDatasetError):
            list(Dataset(where).episodes())


def pictures(count: int, *shape: int, seed: int = 0) -> np.ndarray:
    """Frames of noise, so that a value that is moved or rounded shows."""
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), np.uint8)


def with_frames(episode_id: str, length: int, **leaves: tuple[int, ...]) -> Episode:
    return Episode(
        id=episode_id,
        observations={name: pictures(length + 1, *shape) for name, shape in leaves.items()},
        actions=np.arange(length),
        rewards=np.arange(length, dtype=np.float32),
        terminated=True,
    )


IMAGES = {"grey": (9, 8, 1), "colour": (8, 11, 3), "layers": (10, 8, 4)}
NUMBERS = {"flat": (9, 8), "first": (4, 9, 8), "two": (8, 8, 2), "small": (7, 8, 3)}


@pytest.mark.parametrize("encoding", ["DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY", "PLAIN"])
def test_long_columns_of_text_are_read_in_every_encoding(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "a.parquet"
    texts = [np.random.default_rng(at).bytes(50).hex() for at in range(2000)]
    table = pa.table({"said": texts})
    parquet.write_table(table, path, use_dictionary=False, column_encoding={"said": encoding})
    limits = DataLimits.within(1 << 26)
    held = parquet.read_metadata(path).row_group(0).column(0)
    assert held.num_values * held.total_uncompressed_size > limits.array_bytes_max

    batches = read_file(path, limits=limits)
    assert texts == [str(each) for batch in batches for each in batch.columns["said"]]


class TestImages:
    def test_frames_become_images_and_come_back_as_written(self, tmp_path: Path) -> None:
        path = tmp_path / "a.parquet"
        written = [with_frames(name, 5, **IMAGES, **NUMBERS) for name in ("a", "b")]
        write_episodes(written, path)
        obs = parquet.read_schema(path).field("obs").type

        assert digests(written) == digests(read(path)[0])
        image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        assert sorted(IMAGES) == [each.name for each in obs if each.type == image]

    def test_an_image_is_a_png_that_others_can_open(self, tmp_path: Path) -> None:
        path = tmp_path / "a.parquet"
        episode = with_frames("a", 2, colour=(8, 11, 3))
        episode = replace(episode, observations=episode.observations["colour"])
        write_episodes([episode], path)
        held = parquet.read_table(path).to_pylist()

        opened = [np.asarray(Image.open(io.BytesIO(each["obs"]["bytes"]))) for each in held]
        np.testing.assert_array_equal(episode.observations[:2], opened)
        assert [None, None] == [each["obs"]["path"] for each in held]
        # As data sets of Hugging Face name the columns that they show as images.
        named = json.loads(parquet.read_schema(path).metadata[b"huggingface"])
        assert {"_type": "Image"} == named["info"]["features"]["obs"]

    def test_images_of_other_recorders_are_read_whatever_their_sizes_are(self) -> None:
        frames = [pictures(1, 9, 8, 3)[0], pictures(1, 8, 8, 3)[0]]
        held = pa.array([{"bytes": png(each), "path": "a.png"} for each in frames])
        found = columns_of(pa.record_batch({"obs": held}))["obs"]

        assert object == found.dtype
        for frame, own in zip(frames, found, strict=True):
            np.testing.assert_array_equal(frame, own)

    def test_parts_of_an_episode_are_rows_of_one_and_count_once(self, tmp_path: Path) -> None:
        whole = with_frames("a", 9, colour=(8, 8, 3))
        parts = [whole.slice(*bounds) for bounds in ((0, 4), (4, 5), (5, 9))]
        counts = write_episodes([*parts, toy_frames()], tmp_path / "a.parquet")

        assert (2, 11) == (counts.episode_count, counts.step_count)
        assert digests([whole, toy_frames()]) == digests(read(tmp_path / "a.parquet")[0])

    def test_row_groups_are_bounded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("breadbox_offline.files.writers.ROW_GROUP_BYTES", 4096)
        path = tmp_path / "a.parquet"
        written = [with_frames(f"a{at}", 20, flat=(9, 8)) for at in range(3)]
        write_episodes(written, path)
        file = parquet.read_metadata(path)
        sizes = [file.row_group(at).num_rows for at in range(file.num_row_groups)]

        assert digests(written) == digests(read(path)[0])
        assert (60, True) == (sum(sizes), max(sizes) <= 4096 // 144)

    def test_small_episodes_share_a_row_group(self, tmp_path: Path) -> None:
        path = tmp_path / "a.parquet"
        write_episodes([toy_frames(f"b{at}") for at in range(9)], path)

        assert 1 == parquet.read_metadata(path).num_row_groups


def toy_frames(name: str = "b") -> Episode:
    return with_frames(name, 2, colour=(8, 8, 3))


def png(frame: np.ndarray) -> bytes:
    written = io.BytesIO()
    Image.fromarray(frame).save(written, "PNG")
    return written.getvalue()


@growth.marked
def test_each_of_many_episodes_takes_as_long_to_write_as_one_of_few(tmp_path: Path) -> None:
    def writing(count: int) -> Callable[[], object]:
        episodes = [toy("short", 1)] * count
        return lambda: write_episodes(episodes, tmp_path / "a.parquet", layout="episodes")

    growth.check(writing, 2048)
