"""Goal: an episode keeps its shape rule through slicing, joining and serialization.

Method: toy episodes whose values say where they belong (obs[k] = [k], action k, reward k + 1).
"""

from typing import Any

import numpy as np
import pytest

from breadbox_offline.decoding.msgpack_codec import pack_message, unpack_message
from breadbox_offline.episodes.episode import Episode
from breadbox_offline.episodes.serialized import pack_episode, unpack_episode
from breadbox_offline.errors import (
    EpisodeJoinError,
    EpisodeShapeError,
    EpisodeStateError,
    OfflineDataError,
)
from support.rllib_cases import make_toy_episode


def toy(length: int = 6, **how: Any) -> Episode:
    return make_toy_episode("e", length, **{"terminated": True, "truncated": False, **how})


def agent(agent_id: str, length: int, **how: Any) -> Episode:
    episode = toy(length, **how)
    episode.agent_id = agent_id
    return episode


class TestShapeRule:
    @pytest.mark.parametrize(
        ("changed", "named"),
        [
            ({"observations": np.zeros((3, 1))}, "observations"),
            ({"actions": np.zeros(4)}, "actions"),
            ({"infos": [{}] * 3}, "infos"),
            ({"extra_model_outputs": {"lp": np.zeros(1)}}, "lp"),
            ({"observations": {"a": np.zeros((4, 1)), "b": np.zeros(5)}}, "observations/b"),
            ({"observations": np.float32(1.0)}, "observations"),
            ({"lookback": 4}, "lookback"),
        ],
    )
    def test_what_does_not_fit_is_refused_by_name(
        self, changed: dict[str, Any], named: str
    ) -> None:
        parts = {"observations": np.zeros((4, 1)), "actions": np.zeros(3), "rewards": np.zeros(3)}
        with pytest.raises(EpisodeShapeError, match=named):
            Episode(id="e", **{**parts, **changed})


class TestSlices:
    def test_carries_the_end_only_if_it_reaches_it(self) -> None:
        assert [False, True] == [toy().slice(0, 5).is_done, toy().slice(3, 6).is_done]

    def test_is_a_view(self) -> None:
        episode = toy()
        assert np.shares_memory(episode.observations, episode.slice(1, 3).observations)

    def test_lookback_is_shortened_at_the_start(self) -> None:
        part = toy().slice(1, 3, lookback=4)
        assert (1, 1, 2) == (part.lookback, part.t_started, len(part))
        assert [0, 1, 2, 3] == part.observations[:, 0].tolist()
        assert [1, 2, 3] == part.own_observations()[:, 0].tolist()
        assert [1, 2] == part.own_actions().tolist()
        assert [1, 2] == part.own_extra_model_outputs()["lp"].tolist()

    def test_slice_of_a_slice_counts_from_its_own_first_step(self) -> None:
        part = toy().slice(2, 6, lookback=1).slice(1, 3, lookback=9)
        assert (3, 2, [3, 4]) == (part.t_started, part.lookback, part.own_actions().tolist())

    @pytest.mark.parametrize("bounds", [(0, 0), (3, 2), (0, 7), (-1, 2)])
    def test_empty_or_foreign_range_is_refused(self, bounds: tuple[int, int]) -> None:
        with pytest.raises(EpisodeShapeError):
            toy().slice(*bounds)


class TestJoins:
    def test_parts_joined_are_the_whole(self) -> None:
        whole = toy()
        joined = whole.slice(0, 2).join(whole.slice(2, 6))
        assert whole.content_digest() == joined.content_digest()

    def test_lookback_of_the_later_part_is_dropped(self) -> None:
        whole = toy()
        joined = whole.slice(0, 2).join(whole.slice(2, 6, lookback=2))
        assert whole.content_digest() == joined.content_digest()

    def test_info_at_the_seam_is_that_of_the_earlier_part(self) -> None:
        front, back = toy().slice(0, 2), toy().slice(2, 6)
        front.infos = [{"i": 0}, {"i": 1}, {"i": 2}]
        joined = front.join(back).infos
        assert joined is not None
        assert [0, 1, 2, None] == [info.get("i") for info in joined[:4]]

    @pytest.mark.parametrize(
        ("later", "why"),
        [
            (toy().slice(3, 6), "starts at step 3"),
            (toy().slice(1, 6), "starts at step 1"),
            (make_toy_episode("x", 3, start=2, terminated=True, truncated=False), "another"),
            (agent("a", 3, start=2), "another episode"),
        ],
    )
    def test_what_does_not_follow_is_refused(self, later: Episode, why: str) -> None:
        with pytest.raises(EpisodeJoinError, match=why):
            toy().slice(0, 2).join(later)

    def test_nothing_follows_an_end(self) -> None:
        with pytest.raises(EpisodeJoinError, match="ended"):
            toy(2).join(toy(3, start=2))

    def test_another_observation_at_the_seam_is_refused(self) -> None:
        later = toy().slice(2, 6)
        later.observations = later.observations + 1
        with pytest.raises(EpisodeJoinError, match="another observation"):
            toy().slice(0, 2).join(later)


class TestDigest:
    @pytest.mark.parametrize(
        "change",
        [
            {"rewards": np.zeros(6)},
            {"terminated": False},
            {"actions": np.arange(6, dtype=np.int32)},
            {"extra_model_outputs": {}},
        ],
    )
    def test_changes_with_the_content(self, change: dict[str, Any]) -> None:
        other = toy()
        for name, value in change.items():
            setattr(other, name, value)
        assert toy().content_digest() != other.content_digest()

    def test_ignores_lookback_and_id(self) -> None:
        whole = toy(8)
        part = whole.slice(2, 8, lookback=2)
        part.id = "other"
        assert whole.slice(2, 8).content_digest() == part.content_digest()


class TestSerialization:
    def test_comes_back_as_it_was(self) -> None:
        episode = toy(6).slice(2, 6, lookback=1)
        episode.observations = {"pos": episode.observations, "cam": np.zeros((6, 2, 2), np.uint8)}
        episode.infos = [{"k": i} for i in range(6)]
        back = unpack_episode(pack_episode(episode))
        assert episode.content_digest() == back.content_digest()
        assert (episode.key, episode.t_started, 1) == (back.key, back.t_started, back.lookback)
        assert back.infos is not None
        assert list(episode.infos) == list(back.infos)

    def test_an_object_cannot_be_written(self) -> None:
        episode = toy()
        episode.infos = [{"k": object()}] * 7
        with pytest.raises(EpisodeStateError):
            pack_episode(episode)

    @pytest.mark.parametrize("cut", range(0, 1000, 37))
    def test_truncated_bytes_are_refused(self, cut: int) -> None:
        data = pack_episode(toy())
        with pytest.raises(EpisodeStateError):
            unpack_episode(data[: min(cut, len(data) - 1)])

    @pytest.mark.parametrize(
        "array",
        [
            {b"nd": True, b"type": "|O", b"kind": b"O", b"shape": [1], b"data": b"cos\nsystem\n."},
            {b"nd": True, b"type": "|O", b"kind": b"", b"shape": [1], b"data": b"12345678"},
            {b"nd": True, b"type": "i4,O", b"kind": b"V", b"shape": [1], b"data": b""},
            {b"nd": True, b"type": "<f8", b"kind": b"", b"shape": [2**40], b"data": b""},
            {b"nd": True, b"type": "<f8", b"kind": b"", b"shape": [-1], b"data": b"12345678"},
            {b"nd": True, b"type": "<f8", b"kind": b"", b"shape": [2], b"data": b"12345678"},
            {b"nd": True, b"type": "<f8", b"kind": b"", b"data": b"12345678"},
        ],
    )
    def test_hostile_arrays_are_refused(self, array: dict[str, Any]) -> None:
        with pytest.raises(EpisodeStateError):
            unpack_message(pack_message({"rewards": array}))

    @pytest.mark.parametrize("data", [b"", b"\xc1", b"\xff" * 9, b"\x93" * 5000, b"not msgpack"])
    def test_garbage_is_refused(self, data: bytes) -> None:
        with pytest.raises(OfflineDataError):
            unpack_episode(data)

    def test_missing_and_wrong_keys_are_named(self) -> None:
        state = unpack_message(pack_episode(toy()))
        for key in ("id_", "observations", "rewards", "is_terminated", "t"):
            broken = {**state, key: 7.5}
            with pytest.raises(OfflineDataError, match=key):
                unpack_episode(pack_message(broken))
