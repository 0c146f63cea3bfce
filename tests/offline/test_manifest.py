"""Goal: what `breadbox generate` records can be learnt from, and a broken recording is only left
out.
"""

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from breadbox_offline.episodes.episode import Episode
from breadbox_offline.files.dataset import Dataset
from breadbox_offline.limits import DataLimits
from breadbox_offline.report import FindingKind
from breadbox_offline.rows.options import MappingOptions
from breadbox_rollout.recording.recording import EpisodeFiles, RecordingOptions, append_line

STEPS = 3


def record(folder: Path, episode_id: str, obs: Any, *, media: str = "none") -> dict[str, Any]:
    """Record an episode as an environment process does; `obs(k)` is its k-th observation."""
    files = EpisodeFiles(RecordingOptions(folder=str(folder), media=media), episode_id, ".partial")
    for step in range(STEPS + 1):
        if step:
            is_last = step == STEPS
            files.add_step(
                {"move": np.int64(step)},
                {
                    "reward": np.float64(step),
                    "terminated": np.bool_(is_last),
                    "truncated": np.bool_(False),
                    "value": np.float32(step),
                },
            )
        files.add_observation(obs(step))
        if files.wants_frames:
            files.add_frame(frame(step))
    entry = {"episode_id": episode_id, "terminated": True, **files.finish()}
    append_line(folder / "manifest.jsonl", entry)
    return entry


def frame(step: int) -> np.ndarray:
    return np.full((16, 16, 3), 16 * step, dtype=np.uint8)


def read(folder: Path, **how: Any) -> tuple[list[Episode], Dataset]:
    dataset = Dataset(str(folder), **how)
    return list(dataset.episodes()), dataset


def test_vector_observations_come_back(tmp_path: Path) -> None:
    record(tmp_path, "a", lambda k: np.array([k, -k], np.float32))
    (episode,), dataset = read(tmp_path)
    assert [[0, 0], [1, -1], [2, -2], [3, -3]] == episode.observations.tolist()
    assert ([1, 2, 3], [1, 2, 3]) == (
        episode.actions["move"].tolist(),
        episode.rewards.tolist(),
    )
    assert (True, False, {"value"}) == (
        episode.terminated,
        episode.truncated,
        set(episode.extra_model_outputs),
    )
    assert not dataset.report.counts


@pytest.mark.parametrize("media", ["h264", "jpeg"])
def test_images_come_back_from_the_frames(tmp_path: Path, media: str) -> None:
    record(tmp_path, "a", lambda k: {"image": frame(k), "level": np.int64(k)}, media=media)
    record(tmp_path, "b", frame, media=media)
    (mixed, pure), _ = read(tmp_path)
    assert [0, 1, 2, 3] == mixed.observations["level"].tolist()
    for images in (mixed.observations["image"], pure.observations):
        assert (STEPS + 1, 16, 16, 3) == images.shape
        for step, image in enumerate(images):
            np.testing.assert_allclose(frame(step), image, atol=3)


def break_action(folder: Path, entry: dict[str, Any]) -> None:
    (folder / entry["action_path"]).write_bytes(b"garbage")


def break_pickle(folder: Path, entry: dict[str, Any]) -> None:
    np.savez(folder / entry["action_path"], action=np.array([object()], dtype=object))


def break_length(folder: Path, entry: dict[str, Any]) -> None:
    np.savez(folder / entry["obs_path"], obs=np.zeros((2, 2)))


def break_line(folder: Path, _entry: dict[str, Any]) -> None:
    (folder / "manifest.jsonl").write_text("{broken\n")


def break_path(folder: Path, entry: dict[str, Any]) -> None:
    line = json.dumps({**entry, "action_path": "../../etc/passwd"})
    (folder / "manifest.jsonl").write_text(line + "\n")


def break_absent(folder: Path, entry: dict[str, Any]) -> None:
    (folder / entry["obs_path"]).unlink()


@pytest.mark.parametrize(
    "damage",
    [break_action, break_pickle, break_length, break_line, break_path, break_absent],
    ids=lambda damage: damage.__name__,
)
def test_a_broken_recording_is_reported_and_others_are_used(tmp_path: Path, damage: Any) -> None:
    entry = record(tmp_path, "a", lambda k: np.array([k], np.float32))
    damage(tmp_path, entry)
    record(tmp_path, "b", lambda k: np.array([k], np.float32))
    episodes, dataset = read(tmp_path)
    assert ["b"] == [episode.id for episode in episodes]
    (finding,) = dataset.report.findings
    assert (FindingKind.MALFORMED, 0) == (finding.kind, finding.row)
    assert str(tmp_path / "manifest.jsonl") == finding.file


def test_a_huge_declared_array_is_refused(tmp_path: Path) -> None:
    entry = record(tmp_path, "a", lambda k: np.array([k], np.float32))
    with zipfile.ZipFile(tmp_path / entry["obs_path"], "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("obs.npy", bytes(5_000_000))
    limits = DataLimits(array_bytes_max=1_000_000)
    episodes, dataset = read(tmp_path, mapping=MappingOptions(limits=limits))
    assert [] == episodes
    assert "5000000 bytes" in dataset.report.findings[0].why
