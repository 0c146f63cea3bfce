"""Goal: blocks of plain rows give the same episodes as reading them row by row (P1), and every
other block is left to the row reader.

Method: map the same rows twice, once with the block reader switched off, and compare everything.
"""

import base64
import pickle  # noqa: TID251 - makes the inputs
from typing import Any

import lz4.frame
import numpy as np
import pytest

from breadbox_offline.episodes.episode import Episode
from breadbox_offline.report import ValidationReport
from breadbox_offline.rows import plain_rows, sample_batches
from breadbox_offline.rows.options import MappingOptions
from breadbox_offline.rows.row_layout import RowLayout
from breadbox_offline.rows.sample_batches import map_sample_batches


def objects(values: Any) -> np.ndarray:
    array = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        array[index] = value
    return array


def pack(array: np.ndarray) -> str:
    return base64.b64encode(lz4.frame.compress(pickle.dumps(array, 5))).decode()


def rows_of(lengths: list[int], **changed: Any) -> dict[str, Any]:
    """Rows of some lengths; a change is a function of a row's number and length."""
    rng = np.random.default_rng(7)
    made: dict[str, Any] = {
        "eps_id": lambda row, n: np.full(n, f"episode {row}"),
        "t": lambda row, n: np.arange(5 * row, 5 * row + n),
        "obs": lambda row, n: rng.normal(size=(n, 3)).astype(np.float32),
        "new_obs": lambda row, n: rng.normal(size=(n, 3)).astype(np.float32),
        "actions": lambda row, n: rng.integers(0, 4, n),
        "rewards": lambda row, n: np.float32(rng.normal(size=n)),
        "terminateds": lambda row, n: np.arange(n) == n - 1 if row % 2 else np.zeros(n, bool),
        "truncateds": lambda row, n: np.arange(n) == n - 1 if row % 3 else np.zeros(n, bool),
        **changed,
    }
    return {
        name: objects([make(row, n) for row, n in enumerate(lengths)])
        for name, make in made.items()
        if make is not None
    }


def split(array: np.ndarray) -> np.ndarray:
    return objects(list(array))


def changing_ids(row: int, n: int) -> np.ndarray:
    return np.array([f"{row}-{step // 2}" for step in range(n)])


def seeded(row: int, n: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(row).normal(size=(n, *shape)).astype(np.float32)


PLAIN: dict[str, dict[str, Any]] = {
    "dense": {},
    "a sample per step": {
        "obs": lambda row, n: split(seeded(row, n, 3)),
        "new_obs": lambda row, n: split(seeded(row + 9, n, 3)),
        "actions": lambda row, n: split(seeded(row, n, 2)),
    },
    "vectors with strides": {
        "obs": lambda row, n: split(seeded(row, n, 3, 2)[:, :, 0]),
        "new_obs": lambda row, n: split(seeded(row + 9, n, 3, 2)[:, :, 1]),
    },
    "vectors without entries": {
        "obs": lambda row, n: split(np.zeros((n, 0))),
        "new_obs": None,
    },
    "dates": {
        "obs": lambda row, n: split(seeded(row, n, 3).astype("M8[s]")),
        "new_obs": None,
    },
    "images": {
        "obs": lambda row, n: split(np.full((n, 4, 5), row, np.uint8)),
        "new_obs": lambda row, n: split(np.full((n, 4, 5), row + 1, np.uint8)),
    },
    "no final observations": {"new_obs": None},
    "several episodes in a row": {"eps_id": changing_ids},
    "several agents in a row": {
        "agent_id": lambda row, n: np.where(np.arange(n) < n // 2, "left", "right"),
        "module_id": lambda row, n: np.where(np.arange(n) < n // 2, "m1", "m2"),
    },
    "ids are numbers": {"eps_id": lambda row, n: np.full(n, 7 * row)},
    "other lengths of ids": {"eps_id": lambda row, n: np.full(n, "x" * (row + 1))},
    "no flags": {"terminateds": None, "truncateds": None},
    "only truncated": {"terminateds": None},
    "old flags": {"terminateds": None, "dones": lambda row, n: np.arange(n) == n - 1},
    "no timesteps": {"t": None},
    "extras": {
        "logits": lambda row, n: seeded(row, n, 2),
        "vf": lambda row, n: seeded(row, n),
        "hidden": lambda row, n: split(seeded(row, n, 2)),
    },
    "packed": {
        "obs": lambda row, n: pack(seeded(row, n, 3)),
        "new_obs": lambda row, n: pack(seeded(row + 9, n, 3)),
        "actions": lambda row, n: pack(seeded(row, n)),
    },
    "infos": {"infos": lambda row, n: [{"i": i} for i in range(n + row % 2)]},
}
UNUSUAL: dict[str, dict[str, Any]] = {
    "flags are numbers": {"terminateds": lambda row, n: (np.arange(n) == n - 1).astype(np.int8)},
    "a malformed row": {"actions": lambda row, n: np.zeros(n + (row == 1))},
    "a short flag column": {"truncateds": lambda row, n: np.zeros(n - (row == 1), bool)},
    "other dtypes in other rows": {
        "obs": lambda row, n: seeded(row, n, 3).astype(np.float64 if row == 1 else np.float32),
        "new_obs": None,
    },
    "another dtype at one step": {
        "obs": lambda row, n: objects([*seeded(row, n - 1, 3), np.zeros(3, np.float64)]),
        "new_obs": None,
    },
    "other shapes in other rows": {
        "obs": lambda row, n: seeded(row, n, 3 + row % 2),
        "new_obs": None,
    },
    "vectors of another byte order": {
        "obs": lambda row, n: split(seeded(row, n, 3).astype(">f4")),
        "new_obs": None,
    },
    "another byte order": {
        "obs": lambda row, n: seeded(row, n, 3).astype(">f4"),
        "new_obs": None,
    },
    "vectors, and one of another number of axes": {
        "obs": lambda row, n: objects([*np.zeros((n - 1, 3)), np.zeros((3, 1))]),
        "new_obs": None,
    },
    "another dtype of the same size at one step": {
        "obs": lambda row, n: objects([*seeded(row, n - 1, 3), np.zeros(3, np.int32)]),
        "new_obs": None,
    },
    "samples of other lengths, together as long": {
        "obs": lambda row, n: objects([np.zeros(2), np.zeros(4), *np.zeros((n - 2, 3))]),
        "new_obs": None,
    },
    "samples are tuples": {
        "obs": lambda row, n: objects([(np.zeros(2), np.ones(3))] * n),
        "new_obs": None,
    },
    "samples are plain tuples": {
        "obs": lambda row, n: objects([(1.0, 2.0)] * n),
        "new_obs": None,
    },
    "samples are dicts": {
        "obs": lambda row, n: objects([{"x": np.zeros(2)}] * n),
        "new_obs": None,
    },
    "ids are one of numbers, one of text": {
        "eps_id": lambda row, n: np.full(n, row, np.uint64 if row else np.int64)
    },
    "ids are not there": {"eps_id": lambda row, n: np.full(n, np.nan)},
    "an id for the whole row": {"eps_id": lambda row, n: f"row {row}"},
    "too many infos": {"infos": lambda row, n: [{}] * (n + 2)},
    "rewards of another shape": {"rewards": lambda row, n: np.ones((n, 1))},
    "rewards are text": {"rewards": lambda row, n: np.array(["x"] * n)},
    "timesteps are floats": {"t": lambda row, n: np.arange(n) + (0.5 if row else 0.0)},
    "packed damaged": {"obs": lambda row, n: pack(seeded(row, n, 3))[: None if row else -5]},
    "packed one by one": {
        "obs": lambda row, n: objects([pack(each) for each in seeded(row, n, 3)]),
        "new_obs": None,
    },
    "lists": {"actions": lambda row, n: [1] * n},
    "empty rows": {"eps_id": None},
}


def facts(episodes: list[Episode]) -> list[tuple[Any, ...]]:
    return [
        (
            *(each.id, each.agent_id, each.module_id, each.t_started, each.t),
            *(each.terminated, each.truncated, each.content_digest()),
            None if each.infos is None else list(each.infos),
            sorted(each.extra_model_outputs),
        )
        for each in episodes
    ]


def map_both(
    columns: dict[str, Any], monkeypatch: pytest.MonkeyPatch, **how: Any
) -> tuple[list[Any], list[Any]]:
    """What the blocks give, and what reading row by row does: episodes and findings."""
    outcomes = []
    for is_off in (False, True):
        if is_off:
            monkeypatch.setattr(sample_batches, "read_plain_rows", lambda *_: None)
        report = ValidationReport()
        episodes = map_sample_batches(columns, MappingOptions(**how), report)
        outcomes.append([facts(episodes), report.findings])
    return outcomes[0], outcomes[1]


LENGTHS = [5, 3, 8, 4]


@pytest.mark.parametrize("block_bytes", [1, 1 << 22])
@pytest.mark.parametrize("name", PLAIN)
def test_a_block_gives_what_single_rows_give(
    name: str, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = rows_of(LENGTHS, **PLAIN[name])
    monkeypatch.setattr(plain_rows, "_BLOCK_BYTES", block_bytes)
    layout = RowLayout.of(columns, MappingOptions())
    assert None is not plain_rows.read_plain_rows(columns, layout, 0, len(LENGTHS))
    in_blocks, row_by_row = map_both(columns, monkeypatch)
    assert row_by_row == in_blocks
    assert len(LENGTHS) <= len(in_blocks[0])


@pytest.mark.parametrize("name", UNUSUAL)
def test_other_blocks_are_left_to_the_row_reader(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [0, 3] if name == "empty rows" else LENGTHS
    columns = rows_of(lengths, **UNUSUAL[name])
    layout = RowLayout.of(columns, MappingOptions())
    assert None is plain_rows.read_plain_rows(columns, layout, 0, len(lengths))


def test_one_id_per_row_is_that_of_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = rows_of(LENGTHS) | {"eps_id": np.array([4, 4, 5, 6])}
    in_blocks, row_by_row = map_both(columns, monkeypatch)
    assert row_by_row == in_blocks
    assert ["4", "4", "5", "6"] == [each[0] for each in in_blocks[0]]


def test_final_observations_can_be_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = rows_of(LENGTHS)
    in_blocks, row_by_row = map_both(columns, monkeypatch, ignore_final_observation=True)
    assert row_by_row == in_blocks


def test_an_episode_shares_no_memory_with_those_of_other_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plain_rows, "_BLOCK_BYTES", 1)
    episodes = map_sample_batches(rows_of(LENGTHS), MappingOptions(), ValidationReport())
    bases = [episode.observations.base for episode in episodes]
    assert [len(episode) + 1 for episode in episodes] == [len(base) for base in bases]
