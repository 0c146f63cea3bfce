"""Recorded episodes by name, whatever order of keys each of them has."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from breadbox.model.errors import UnsupportedArrayError
from breadbox_offline.episodes.episode import Episode
from breadbox_offline.files.dataset import Dataset
from breadbox_offline.files.minari_dataset import write_minari
from breadbox_offline.files.writers import write_episodes
from breadbox_offline.service import FragmentCutter, FragmentReader
from support.key_orders import ORDERS, made, wrong_leaves


def episode(number: int, *, length: int = 5) -> Episode:
    steps = np.arange(length + 1) + 10 * number
    turns = [ORDERS[(number + turn) % len(ORDERS)] for turn in range(4)]
    return Episode(
        id=str(number),
        observations=made("obs", steps, turns[0]),
        actions=made("action", steps[:-1], turns[1]),
        rewards=steps[:-1].astype(np.float32),
        terminated=True,
        extra_model_outputs={
            "more": made("extras", steps[:-1], turns[2]),
            "state_in": made("in_state", steps[:-1], turns[3]),
        },
    )


EPISODES = [episode(number) for number in range(2 * len(ORDERS))]


def wrong_in(episodes: list[Episode]) -> list[str]:
    return [
        each
        for found in episodes
        for each in (
            wrong_leaves("obs", found.observations) + wrong_leaves("action", found.actions)
        )
    ]


def test_fragments_of_episodes_in_all_orders_have_each_leaf_by_its_name() -> None:
    cutter = FragmentCutter(step_count=4, worker_id="w", session_id="s")
    fragments = [each for one in EPISODES for each in cutter.add(one)]
    fragments += cutter.finish()

    for fragment in fragments:
        for name, tree in (("obs", fragment.obs), ("obs", fragment.next_obs)):
            assert [] == wrong_leaves(name, tree)
        assert [] == wrong_leaves("action", fragment.action)
        assert [] == wrong_leaves("extras", fragment.extras["more"])
        assert [] == wrong_leaves("in_state", fragment.in_state)
        if fragment.final_obs_step is not None:
            assert [] == wrong_leaves("obs", fragment.final_obs)

    reader = FragmentReader()
    back = [each for fragment in fragments for each in reader.add(fragment)]
    assert [] == wrong_in(back)
    assert [each.rewards.tolist() for each in EPISODES] == [
        each.rewards.tolist() for each in back[: len(EPISODES)]
    ]


def test_an_episode_in_another_order_of_keys_has_the_same_digest() -> None:
    one = Episode(
        id="a",
        observations={"x": np.zeros(3), "y": np.ones(3)},
        actions={"u": np.zeros(2), "v": np.ones(2)},
        rewards=np.zeros(2),
    )
    other = Episode(
        id="a",
        observations=dict(reversed(one.observations.items())),
        actions=dict(reversed(one.actions.items())),
        rewards=np.zeros(2),
    )
    assert one.content_digest() == other.content_digest()


@pytest.mark.parametrize(
    ("file", "layout"), [("a.parquet", "steps"), ("a.parquet", "episodes"), ("a.msgpack", "steps")]
)
def test_files_of_episodes_in_all_orders_come_back_by_name(
    tmp_path: Path, file: str, layout: str
) -> None:
    write_episodes(EPISODES, tmp_path / file, layout=layout)

    back = list(Dataset(str(tmp_path / file)).episodes())
    assert len(EPISODES) == len(back)
    assert [] == wrong_in(back)


@pytest.fixture
def minari(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))
    pytest.importorskip("h5py", reason="needs h5py, of the extra breadbox[minari]")
    return pytest.importorskip("minari", reason="needs minari, of the extra breadbox[minari]")


def test_minari_gives_episodes_in_all_orders_back_by_name(minari: Any) -> None:
    write_minari(iter(EPISODES), "minari:orders-v0")

    assert [] == wrong_in(list(Dataset("minari:orders-v0").episodes()))


def test_text_of_a_minari_dataset_is_as_wide_as_its_space_in_every_episode(minari: Any) -> None:
    from gymnasium import spaces

    space = spaces.Dict({"mission": spaces.Text(12), "x": spaces.Box(-9, 9, (1,))})
    buffers = [
        minari.data_collector.EpisodeBuffer(
            observations={"mission": [word] * 4, "x": np.zeros((4, 1), np.float32)},
            actions=np.zeros(3, np.int64),
            rewards=np.zeros(3),
            terminations=np.array([False, False, True]),
            truncations=np.zeros(3, np.bool_),
        )
        for word in ("go", "go left", "stop")
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Of an author that is missing, and the like.
        minari.create_dataset_from_buffers(
            "words-v0",
            buffers,
            observation_space=space,
            action_space=spaces.Discrete(2),
            jpeg_encoding=False,
        )

    missions = [each.observations["mission"] for each in Dataset("minari:words-v0").episodes()]
    assert ["go", "go left", "stop"] == [each[0] for each in missions]
    assert {"<U12"} == {each.dtype.str for each in missions}
    cutter = FragmentCutter(step_count=2, worker_id="w", session_id="s")
    fragments = [each for one in Dataset("minari:words-v0").episodes() for each in cutter.add(one)]
    assert {"<U12"} == {
        np.asarray(tree["mission"]).dtype.str
        for fragment in fragments
        for tree in (fragment.obs, fragment.next_obs)
    }


def test_a_masked_array_is_refused_because_its_mask_would_be_lost() -> None:
    masked = np.ma.masked_array(np.zeros(2), True)
    with pytest.raises(UnsupportedArrayError, match=r"actions.*mask apart"):
        Episode(id="a", observations=np.zeros(3), actions=masked, rewards=np.zeros(2))
    with pytest.raises(UnsupportedArrayError, match=r"actions\.x.*mask apart"):
        Episode(id="a", observations=np.zeros(3), actions={"x": masked}, rewards=np.zeros(2))
