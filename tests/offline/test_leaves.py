"""Text, absent values and empty containers go through an export and an import; objects do not."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from breadbox.model import trees
from breadbox.model.fragment import Fragment
from breadbox.payload import encode_tree
from breadbox_offline import Dataset
from breadbox_offline.episodes.episode import Episode
from breadbox_offline.errors import OfflineDataError
from breadbox_offline.files.writers import write_episodes
from breadbox_offline.service import FragmentCutter, FragmentReader

COUNT = 8
TEXT = np.array(["up", "left"] * (COUNT // 2))
FORMATS = {"steps": "a.parquet", "episodes": "b.parquet", "msgpack": "c.msgpack"}
"""Names of files by how they are written; by the layout `steps` unless they say `episodes`."""


def fragment(obs: Any, **extras: Any) -> Fragment:
    """An episode that terminates with its last step."""
    flags = np.zeros((2, COUNT), np.bool_)
    flags[0, 0] = flags[1, -1] = True
    return Fragment(
        worker_id="w",
        fragment_index=0,
        session_id="s",
        model_version_min=0,
        model_version_max=0,
        obs=obs,
        action=np.zeros(COUNT, np.int64),
        reward=np.zeros(COUNT, np.float32),
        terminated=flags[1],
        truncated=np.zeros(COUNT, np.bool_),
        first=flags[0],
        episode_id=np.zeros(COUNT, np.int64),
        next_obs=trees.row(obs, 0),
        final_obs=trees.rows(obs, 1, 2),
        final_obs_step=np.array([COUNT - 1], np.int32),
        extras=extras,
    )


def exported(folder: Path, how: str, *fragments: Fragment) -> str:
    """The file that an export of fragments writes."""
    reader = FragmentReader()
    episodes: list[Episode] = [each for held in fragments for each in reader.add(held)]
    path = folder / FORMATS[how]
    write_episodes(
        [*episodes, *reader.finish()], path, layout="episodes" if how == "episodes" else "steps"
    )
    return str(path)


def imported(path: str, step_count: int = COUNT) -> Fragment:
    """The fragment that an import of a file appends."""
    dataset = Dataset(path)
    cutter = FragmentCutter(step_count=step_count, worker_id="w", session_id="s")
    cut = [made for episode in dataset.episodes() for made in cutter.add(episode)]
    (made,) = [*cut, *cutter.finish()]
    assert not dataset.report.findings
    return made


TREES: dict[str, Any] = {
    "text": TEXT,
    "bytes": TEXT.astype("S"),
    "text beside numbers": {"said": TEXT, "seen": np.zeros((COUNT, 2), np.float32)},
    "text in tuples": ((TEXT, np.arange(COUNT)), TEXT),
    "nothing beside text": {"said": TEXT, "heard": None},
    "nothing first in a tuple": (None, TEXT),
    "empty containers": {"a": {}, "b": (), "c": {"d": None}, "e": np.ones(COUNT)},
}


@pytest.mark.parametrize("how", FORMATS)
@pytest.mark.parametrize("name", TREES)
def test_what_a_buffer_holds_comes_back_from_its_export(
    tmp_path: Path, name: str, how: str
) -> None:
    tree = TREES[name]
    back = imported(exported(tmp_path, how, fragment(tree, said=tree)))

    structure, leaves = trees.flatten_leaves(tree)
    for got in (back.obs, back.extras["said"]):
        got_structure, got_leaves = trees.flatten_leaves(got)
        assert structure == got_structure
        for wanted, found in zip(leaves, got_leaves, strict=True):
            assert wanted.dtype == found.dtype
            np.testing.assert_array_equal(wanted, found)
        assert b"".join(encode_tree(got))


@pytest.mark.parametrize("how", FORMATS)
def test_what_is_absent_is_absent_in_its_export(tmp_path: Path, how: str) -> None:
    back = imported(exported(tmp_path, how, fragment(TEXT, heard=None)))

    assert "heard" not in back.extras


@pytest.mark.parametrize("how", FORMATS)
@pytest.mark.parametrize(
    "leaf",
    [np.array(["a", None] * 4, object), np.zeros(COUNT, "M8[s]"), np.zeros(COUNT, [("x", "f4")])],
    ids=["objects", "dates", "structures"],
)
def test_an_export_that_nothing_could_read_fails_and_names_the_path(
    tmp_path: Path, how: str, leaf: Any
) -> None:
    with pytest.raises(OfflineDataError, match=r"column 'seen\.at': cannot be exported") as caught:
        exported(tmp_path, how, fragment(TEXT, seen={"at": leaf}))

    assert FORMATS[how] in str(caught.value)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "leaf", [np.zeros(COUNT, np.complex64), np.zeros((COUNT, 0))], ids=["complex", "no elements"]
)
def test_what_only_whole_episodes_can_hold_says_so(tmp_path: Path, leaf: Any) -> None:
    with pytest.raises(OfflineDataError, match=r"column 'seen\.at': .*--layout episodes"):
        exported(tmp_path, "steps", fragment(TEXT, seen={"at": leaf}))
    back = imported(exported(tmp_path, "episodes", fragment(TEXT, seen={"at": leaf})))

    np.testing.assert_array_equal(leaf, back.extras["seen"]["at"])


@pytest.mark.parametrize("how", FORMATS)
def test_what_differs_from_episode_to_episode_is_told_and_no_crash(
    tmp_path: Path, how: str
) -> None:
    without, with_text = fragment(TEXT, said={"a": None}), fragment(TEXT, said={"a": TEXT})
    with_text.fragment_index, with_text.episode_id = 1, with_text.episode_id + 1
    with pytest.raises(OfflineDataError, match="said"):
        imported(exported(tmp_path, how, without, with_text), 2 * COUNT)
