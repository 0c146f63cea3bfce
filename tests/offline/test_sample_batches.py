"""Goal: a row of an old-stack SampleBatch is read whatever its recorder put into it."""

from typing import Any

import numpy as np
import pytest

from breadbox_offline.episodes.episode import Episode
from breadbox_offline.errors import MissingColumnError, ValidationError
from breadbox_offline.report import FindingKind, ValidationPolicy, ValidationReport
from breadbox_offline.rows.options import MappingOptions
from breadbox_offline.rows.sample_batches import map_sample_batches


def row(length: int, **changed: Any) -> dict[str, Any]:
    steps = np.arange(length)
    return {
        "obs": steps.astype(np.float32)[:, None],
        "new_obs": (steps + 1).astype(np.float32)[:, None],
        "actions": steps,
        "rewards": (steps + 1).astype(np.float32),
        "terminateds": steps == length - 1,
        **changed,
    }


def read(*rows: dict[str, Any], **how: Any) -> tuple[list[Episode], ValidationReport]:
    columns = {name: [each[name] for each in rows] for name in rows[0]}
    report = ValidationReport(how.pop("policy", ValidationPolicy()))
    return map_sample_batches(columns, MappingOptions(**how), report), report


def test_a_row_of_two_episodes_is_split_and_the_first_is_cut_off() -> None:
    episodes, _ = read(row(3, eps_id=np.array([7, 7, 8]), t=np.array([4, 5, 6])))
    assert [("7", 4, 6, False, True), ("8", 6, 7, True, False)] == [
        (e.id, e.t_started, e.t, e.terminated, e.truncated) for e in episodes
    ]
    assert [0, 1, 2] == episodes[0].observations[:, 0].tolist()


@pytest.mark.parametrize("flags", [np.bool_, np.int8])
def test_every_episode_of_a_row_starts_at_its_own_timestep(flags: type) -> None:
    ids, t = np.array([7, 7, 8]), np.array([4, 5, 0])
    episodes, _ = read(row(3, eps_id=ids, t=t, terminateds=np.zeros(3, flags)))
    assert [4, 0] == [episode.t_started for episode in episodes]


@pytest.mark.parametrize("count", [3, 4])
def test_infos_are_those_of_the_observations_they_came_with(count: int) -> None:
    (episode,), _ = read(row(3, infos=[{"i": index} for index in range(count)]))
    assert ([None] * (4 - count) + list(range(count))) == [i.get("i") for i in episode.infos]


def objects(*values: Any) -> np.ndarray:
    array = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        array[index] = value
    return array


def test_observations_step_by_step_are_stacked_with_their_dtype() -> None:
    images = [np.full((2, 3), index, dtype=np.uint8) for index in range(4)]
    changed = {"obs": objects(*images[:3]), "new_obs": objects(*images[1:])}
    (episode,), _ = read(row(3, **changed))
    assert (np.uint8, (4, 2, 3)) == (episode.observations.dtype, episode.observations.shape)
    assert [0, 1, 2, 3] == episode.observations[:, 1, 2].tolist()


@pytest.mark.parametrize(
    "obs",
    [
        objects(np.zeros(2), np.zeros(1), np.zeros(3)),  # together as long as three of two
        objects(np.zeros((2, 1)), np.zeros((2, 1)), np.zeros((2, 2))),
        objects(np.zeros(1), np.zeros(()), np.zeros(1)),
        objects(np.zeros(1), np.zeros((1, 1)), np.zeros(1)),
        objects(np.zeros(1), None, np.zeros(1)),
        objects(np.zeros(1), "text", np.zeros(1)),
    ],
)
def test_observations_of_other_shapes_are_never_run_together(obs: np.ndarray) -> None:
    episodes, report = read(row(3, obs=obs))
    assert [] == episodes
    (finding,) = report.findings
    assert (FindingKind.MALFORMED, "obs") == (finding.kind, finding.column)


@pytest.mark.parametrize(
    "changed",
    [
        {"actions": np.zeros(2)},
        {"obs": np.zeros((4, 1))},
        {"obs": [np.zeros(1)] * 3},
        {"obs": 5},
        {"obs": "not packed"},
        {"terminateds": np.array([0, np.nan, 1])},
        {"infos": [{}]},
        {"rewards": np.array(["x", "y", "z"])},
    ],
)
def test_a_malformed_row_is_reported_and_the_others_are_used(changed: dict[str, Any]) -> None:
    good = row(2, **{name: row(2).get(name, [{}, {}]) for name in changed})
    episodes, report = read(good, row(3, **changed), good)
    assert [2, 2] == [len(episode) for episode in episodes]
    (finding,) = report.findings
    assert (FindingKind.MALFORMED, 1) == (finding.kind, finding.row)
    assert finding.column is not None


def test_a_malformed_row_can_reject_the_call() -> None:
    with pytest.raises(ValidationError, match="row 0, column 'actions'"):
        read(row(3, actions=np.zeros(2)), policy=ValidationPolicy.strict())


def test_missing_columns_are_named() -> None:
    columns = row(2)
    del columns["actions"]
    with pytest.raises(MissingColumnError, match="'actions'"):
        read(columns)


def test_dtypes_are_kept() -> None:
    (episode,), _ = read(row(3, obs=np.zeros((3, 2), np.uint8), new_obs=np.ones((3, 2), np.uint8)))
    assert np.uint8 == episode.observations.dtype
    assert np.float32 == episode.rewards.dtype
