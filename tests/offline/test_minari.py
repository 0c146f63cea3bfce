"""Goal: episodes come out of a Minari dataset as they went in; what cannot be written is said in
one line and leaves nothing behind.

Method: the real package minari, with its datasets in a temporary folder.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from breadbox.shared.extras import how_to_install
from breadbox_offline.episodes.episode import Episode
from breadbox_offline.errors import (
    SchemaError,
    SpaceMismatchError,
    UnsupportedDatasetError,
)
from breadbox_offline.files.dataset import Dataset
from breadbox_offline.files.minari_dataset import write_minari
from support.rllib_cases import make_toy_episode

NAME = "minari:toys/mixed-v0"


@pytest.fixture
def minari(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))
    pytest.importorskip("h5py", reason="needs h5py, of the extra breadbox[minari]")
    return pytest.importorskip("minari", reason="needs minari, of the extra breadbox[minari]")


def toys(count: int) -> list[Episode]:
    return [
        make_toy_episode(str(i), 3 + i % 5, terminated=i % 2 == 0, truncated=i % 2 == 1)
        for i in range(count)
    ]


def camera(length: int) -> Episode:
    rng = np.random.default_rng(7)
    return Episode(
        id="camera",
        observations={  # in the order of their names, as Minari gives them back
            "door": rng.random(length + 1) > 0.5,
            "image": rng.integers(0, 256, (length + 1, 32, 32, 3), dtype=np.uint8),
            "parts": (rng.normal(size=(length + 1, 2)), rng.random((length + 1, 3)) > 0.5),
        },
        actions=rng.normal(size=(length, 2)).astype(np.float32),
        rewards=np.arange(length, dtype=np.float32),
        truncated=True,
    )


def cartpoles(count: int) -> list[Episode]:
    return [
        Episode(
            id=str(number),
            observations=np.full((6, 4), number / 100, dtype=np.float32),
            actions=np.array([0, 1, 0, 1, 1]),
            rewards=np.ones(5, dtype=np.float32),
            terminated=True,
        )
        for number in range(count)
    ]


def holds_a_dataset(root: Path) -> bool:
    return any(root.rglob("main_data*"))


def test_episodes_come_back_as_written(minari: ModuleType) -> None:
    episodes = toys(150)  # more than are written at a time
    counts = write_minari(iter(episodes), NAME)
    assert (150, sum(map(len, episodes))) == (counts.episode_count, counts.step_count)
    back = list(Dataset(NAME).episodes())
    assert len(episodes) == len(back)
    for before, after in zip(episodes, back, strict=True):
        assert before.observations.dtype == after.observations.dtype
        np.testing.assert_array_equal(before.observations, after.observations)
        np.testing.assert_array_equal(before.actions, after.actions)
        np.testing.assert_array_equal(before.rewards, after.rewards)
        assert (before.terminated, before.truncated) == (after.terminated, after.truncated)
    assert counts.step_count == minari.load_dataset("toys/mixed-v0").total_steps


def test_images_and_nested_observations_lose_nothing(minari: ModuleType) -> None:
    episode = camera(6)
    write_minari([episode], NAME)
    (back,) = Dataset(NAME).episodes()
    assert episode.content_digest() == back.content_digest()


def test_an_unfinished_episode_is_truncated(minari: ModuleType) -> None:
    write_minari([make_toy_episode("a", 4, terminated=False, truncated=False)], NAME)
    held = minari.load_dataset("toys/mixed-v0")[0]
    assert [False] * 3 + [True] == held.truncations.tolist()
    assert [False] * 4 == held.terminations.tolist()


def test_an_environment_gives_its_spaces_and_can_be_recovered(minari: ModuleType) -> None:
    write_minari(cartpoles(3), NAME, env_id="CartPole-v1")
    dataset = minari.load_dataset("toys/mixed-v0")
    assert 2 == dataset.action_space.n
    with dataset.recover_environment() as env:
        assert "CartPole-v1" == env.spec.id


def test_an_episode_that_does_not_fit_leaves_no_dataset(minari: ModuleType, tmp_path: Path) -> None:
    wide = camera(3)
    with pytest.raises(SpaceMismatchError, match="the observation of episode 'camera'"):
        write_minari([*toys(70), wide], NAME)
    assert not holds_a_dataset(tmp_path)
    with pytest.raises(SpaceMismatchError, match="the observation of episode '0'"):
        write_minari(toys(1), NAME, env_id="CartPole-v1")
    assert not holds_a_dataset(tmp_path)


def test_what_fails_while_reading_leaves_no_dataset(minari: ModuleType, tmp_path: Path) -> None:
    def broken() -> Iterator[Episode]:
        yield from toys(65)
        raise KeyError("the server went away")

    with pytest.raises(KeyError):
        write_minari(broken(), NAME)
    assert not holds_a_dataset(tmp_path)


def test_a_dataset_is_never_overwritten(minari: ModuleType) -> None:
    write_minari(toys(2), NAME)
    with pytest.raises(UnsupportedDatasetError, match=r"toys/mixed-v0.* already exists"):
        write_minari(toys(3), NAME)
    assert 2 == minari.load_dataset("toys/mixed-v0").total_episodes


@pytest.mark.parametrize("path", ["minari:", "minari:no good name", "minari:../outside"])
def test_a_name_that_is_no_dataset_id_is_refused(
    minari: ModuleType, tmp_path: Path, path: str
) -> None:
    with pytest.raises(UnsupportedDatasetError, match="cannot be written"):
        write_minari(toys(1), path)
    assert not holds_a_dataset(tmp_path)


def test_nothing_to_take_the_spaces_from_is_refused(minari: ModuleType) -> None:
    with pytest.raises(SchemaError, match="no episodes"):
        write_minari([], NAME)
    text = camera(2)
    text.actions = np.array(["left", "right"])
    with pytest.raises(SchemaError, match="no Minari space for arrays of <U5"):
        write_minari([text], NAME)


def test_an_unknown_environment_is_named(minari: ModuleType) -> None:
    with pytest.raises(UnsupportedDatasetError, match="'NoSuchGame-v9' cannot be made"):
        write_minari(toys(1), NAME, env_id="NoSuchGame-v9")


def test_without_minari_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "minari", None)
    remedy = f"minari:toys/mixed-v0: needs .*{re.escape(how_to_install('minari'))}"
    with pytest.raises(UnsupportedDatasetError, match=remedy):
        write_minari(toys(1), NAME)
    with pytest.raises(UnsupportedDatasetError, match=remedy):
        list(Dataset(NAME).episodes())
