"""Whole episodes in files: what went in comes out, and failures cost their own episode only."""

import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image

from breadbox.model.errors import InvalidRequestError
from breadbox_policies import PolicyModule, make_policy
from breadbox_rollout.acting.generator import EpisodeGenerator, GeneratorOptions
from breadbox_rollout.acting.inference import Inference
from breadbox_rollout.environments import environments
from breadbox_rollout.environments.environments import EnvSpec, check_frames
from breadbox_rollout.processes.pool import EnvironmentStartError
from breadbox_rollout.recording.media import VideoWriter, with_text
from breadbox_rollout.recording.recording import EpisodeFiles, RecordingOptions, plain
from support.eventually import eventually_sync


def random_policy(observations: Any, actions: Any) -> PolicyModule:
    return make_policy("random", observations, actions)


def on_the_cpu(policy: PolicyModule) -> Inference:
    return Inference(policy, torch.device("cpu"))


@contextmanager
def generating(
    out: Path, script: str, count: int = 2, **options: Any
) -> Iterator[EpisodeGenerator]:
    spec = EnvSpec(name="support.scripted_env:make", options={"script": script})
    wanted = GeneratorOptions(env=spec, out=out, episode_count=count, **options)
    with EpisodeGenerator(
        wanted,
        make_policy=lambda observations, actions: make_policy("random", observations, actions),
        make_inference=lambda policy: Inference(policy, torch.device("cpu")),
    ) as episodes:
        yield episodes


def decoded(path: str) -> list[np.ndarray[Any, Any]]:
    with av.open(path) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def frame_at(time_step: int) -> np.ndarray[Any, Any]:
    """The frame that the scripted environment shows at this time."""
    rows, columns = np.mgrid[0:16, 0:32]
    frame = np.stack([rows * 8 + time_step, columns * 5, rows + columns + 3 * time_step], -1)
    return (frame % 256).astype(np.uint8)


def test_an_episode_decoded_equals_the_frames_that_went_in(tmp_path: Path) -> None:
    with generating(tmp_path, "....t", count=1) as episodes:
        (episode,) = list(episodes)
    frames = decoded(episode["video_path"])
    assert 6 == len(frames)
    for step, frame in enumerate(frames):
        assert np.array_equal(frame_at(step), frame)


def test_an_episode_has_its_files_and_a_line_in_the_manifest(tmp_path: Path) -> None:
    """The ancestor stored neither rewards nor ends, and no manifest."""
    with generating(tmp_path, "..t.c", worker_count=1, task="dig", model_version=7) as episodes:
        first, second = list(episodes)
    assert (True, False) == (first["terminated"], first["truncated"])
    assert (False, True) == (second["terminated"], second["truncated"])
    assert (3, 2) == (first["step_count"], second["step_count"])
    assert first["seed"] != second["seed"]
    lines = [json.loads(line) for line in (tmp_path / "manifest.jsonl").read_text().splitlines()]
    assert [first["episode_id"], second["episode_id"]] == [line["episode_id"] for line in lines]
    assert ("dig", 7, 7) == tuple(
        lines[0][k] for k in ("task", "model_version_min", "model_version_max")
    )
    assert tmp_path / lines[0]["video_path"] == Path(first["video_path"])
    with np.load(first["action_path"], allow_pickle=False) as columns:
        assert [False, False, True] == columns["terminated"].tolist()
        expected = [step + action / 10 for step, action in enumerate(columns["action"].tolist())]
        np.testing.assert_allclose(expected, columns["reward"])
        assert abs(columns["reward"].sum() - first["return_sum"]) < 1e-9
    infos = [json.loads(line) for line in Path(first["info_path"]).read_text().splitlines()]
    assert [0, 1, 2, 3] == [info["step"] for info in infos]
    assert [{}, {"time": 1}, {"time": 2}, {"time": 3}] == [info["info"] for info in infos]
    assert [True] == [info["terminated"] for info in infos if info.get("terminated")]


def test_jpeg_frames_are_one_file_each(tmp_path: Path) -> None:
    with generating(tmp_path, "..t", count=1, media="jpeg") as episodes:
        (episode,) = list(episodes)
    folder = Path(episode["base_image_path"])
    assert {"0.jpeg", "1.jpeg", "2.jpeg", "3.jpeg"} == {path.name for path in folder.iterdir()}
    with Image.open(folder / "2.jpeg") as image:
        difference = np.asarray(image).astype(int) - frame_at(2)
    assert np.abs(difference).mean() < 20


def test_exactly_so_many_episodes_are_finished_by_any_number_of_workers(tmp_path: Path) -> None:
    with generating(tmp_path, "....t", count=5, worker_count=3, media="none") as episodes:
        found = list(episodes)
    assert 5 == len(found)
    assert 5 == len((tmp_path / "manifest.jsonl").read_text().splitlines())
    assert 5 == len(list(tmp_path.glob("action_*.npz")))
    assert [] == list(tmp_path.glob(".partial*"))


@pytest.mark.parametrize(
    ("script", "kind"), [("..t.!", "step_raised"), ("..t.x", "died"), ("..t.h", "step_hung")]
)
def test_a_failure_costs_its_episode_only(tmp_path: Path, script: str, kind: str) -> None:
    """The ancestor's generator ended, and with it every other worker's episode."""
    # On a busy machine any step may take long, so only the one that hangs is hurried.
    step_s_max = 0.5 if "h" in script else 30.0
    with generating(tmp_path, script, count=3, step_s_max=step_s_max) as episodes:
        found = list(episodes)
    assert [3, 3, 3] == [episode["step_count"] for episode in found]
    assert episodes.failures[kind] >= 2
    failures = [json.loads(line) for line in (tmp_path / "failures.jsonl").read_text().splitlines()]
    assert kind in {failure["kind"] for failure in failures}
    assert [] == list(tmp_path.glob(".partial*"))
    assert 3 == len(list(tmp_path.glob("video_*.mp4")))


def test_a_worker_that_always_fails_ends_the_generator_with_its_reason(tmp_path: Path) -> None:
    """The ancestor's limit on restarts was without effect."""
    with (
        generating(tmp_path, ".!", restarts_max=2) as episodes,
        pytest.raises(EnvironmentStartError, match="more than 2 times; last: step_raised"),
    ):
        list(episodes)
    assert 3 == episodes.failures.total()


def test_the_step_limit_ends_an_episode(tmp_path: Path) -> None:
    with generating(tmp_path, ".", count=1, episode_steps_max=4) as episodes:
        (episode,) = list(episodes)
    assert (4, False, True) == (episode["step_count"], episode["terminated"], episode["truncated"])


def test_ending_early_keeps_what_is_finished_and_nothing_else(tmp_path: Path) -> None:
    with generating(tmp_path, "..t" + "." * 10_000, count=10) as episodes:
        episode = next(iter(episodes))
    assert 3 == episode["step_count"]
    assert 1 == len((tmp_path / "manifest.jsonl").read_text().splitlines())
    assert [] == list(tmp_path.glob(".partial*"))
    assert 1 == len(list(tmp_path.glob("video_*.mp4")))


def test_workers_run_ahead_of_the_consumer_but_not_without_limit(tmp_path: Path) -> None:
    """The ancestor's worker idled until the consumer came back."""
    with generating(tmp_path, "t", count=50, media="none", ready_max=3) as episodes:
        iterator = iter(episodes)
        next(iterator)
        manifest = tmp_path / "manifest.jsonl"

        def finished() -> int:
            return len(manifest.read_text().splitlines())

        eventually_sync(lambda: finished() >= 5, within_s=30.0)
        # One was taken, three wait, and one is offered.
        assert 5 == finished()
        assert 49 == len(list(iterator))


def test_a_relative_folder_means_the_same_in_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ancestor's processes each resolved it where they happened to be."""
    monkeypatch.chdir(tmp_path)
    with generating(Path("out"), "..t", count=1, media="none") as episodes:
        monkeypatch.chdir("/")
        (episode,) = list(episodes)
    assert Path(episode["info_path"]).is_absolute()
    assert (tmp_path / "out" / Path(episode["info_path"]).name).exists()
    assert (tmp_path / "out" / "manifest.jsonl").exists()


def test_frames_that_are_missing_are_told(tmp_path: Path) -> None:
    spec = EnvSpec(name="CartPole-v1", options={"render_mode": None})
    options = GeneratorOptions(env=spec, out=tmp_path, episode_count=1, restarts_max=0)
    with (
        EpisodeGenerator(
            options,
            make_policy=lambda observations, actions: make_policy("random", observations, actions),
            make_inference=lambda policy: Inference(policy, torch.device("cpu")),
        ) as episodes,
        pytest.raises(EnvironmentStartError, match="frame must be uint8"),
    ):
        list(episodes)


def test_frames_that_nothing_installed_can_draw_are_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "is_installed", lambda package: package != "pygame")
    out = tmp_path / "out"
    for name in ("CartPole-v1", "FrozenLake-v1"):
        options = GeneratorOptions(env=EnvSpec(name=name), out=out, episode_count=1)
        with pytest.raises(
            InvalidRequestError, match=r"draws its frames with pygame.*\[classic-control\]"
        ):
            EpisodeGenerator(options, make_policy=random_policy, make_inference=on_the_cpu)
    assert not out.exists()
    # What is not drawn, or not by pygame, needs none of it.
    check_frames(EnvSpec(name="CartPole-v1", options={"render_mode": None}))
    check_frames(EnvSpec(name="ALE/Pong-v5"))
    check_frames(EnvSpec(name="support.scripted_env:make"))


@pytest.mark.skipif(
    importlib.util.find_spec("pygame") is None,
    reason='needs pygame, which the extra classic-control installs: "gymnasium[classic-control]"',
)
def test_cartpole_is_drawn_into_its_video(tmp_path: Path) -> None:
    options = GeneratorOptions(env=EnvSpec(name="CartPole-v1"), out=tmp_path, episode_count=1)
    with EpisodeGenerator(options, make_policy=random_policy, make_inference=on_the_cpu) as made:
        (episode,) = list(made)
    frames = decoded(episode["video_path"])
    assert episode["step_count"] + 1 == len(frames)
    assert (400, 600, 3) == frames[0].shape
    assert not np.array_equal(frames[0], frames[-1])


def test_nothing_in_the_files_can_be_executed_and_nothing_is_refused(tmp_path: Path) -> None:
    """The ancestor's infos were pickles."""
    files = EpisodeFiles(RecordingOptions(folder=str(tmp_path), media="none"), "e", "partial")
    files.add_info(
        {"odd": object, "nan": float("nan"), "big": np.zeros(1000), "small": np.arange(2)}
    )
    files.add_step({"camera": np.zeros(2), "buttons": np.int64(3)}, {"reward": np.float64(1.0)})
    names = files.finish()
    line = json.loads((tmp_path / names["info_path"]).read_text())
    assert ("<class 'object'>", None, "float64[1000]", [0, 1]) == tuple(line.values())
    with np.load(tmp_path / names["action_path"], allow_pickle=False) as columns:
        assert {"action.camera", "action.buttons", "reward"} == set(columns.files)
        assert ((1, 2), [3]) == (columns["action.camera"].shape, columns["action.buttons"].tolist())
    assert not (tmp_path / "partial").exists()


def test_a_lossy_video_of_odd_size_has_its_frames_and_an_empty_one_is_no_error(
    tmp_path: Path,
) -> None:
    """The ancestor's writer died without frames, and its environment then hung."""
    VideoWriter(tmp_path / "empty.mp4", 30).close()
    writer = VideoWriter(tmp_path / "odd.mp4", 30, crf=20)
    for step in range(7):
        writer.add(frame_at(step)[:15, :31])
    writer.close()
    frames = decoded(str(tmp_path / "odd.mp4"))
    assert (7, (16, 32, 3)) == (len(frames), frames[0].shape)


def test_the_overlay_changes_a_corner_of_a_copy() -> None:
    frame = np.zeros((64, 64, 3), np.uint8)
    drawn = with_text(frame, "V 1.5")
    assert 0 == frame.max()
    assert drawn[:16].max() > 200
    assert 0 == drawn[32:].max()


def test_plain_keeps_what_json_can_hold() -> None:
    assert {"1": [True, 2, 0.5, "x", None]} == plain(
        {1: (True, np.int8(2), np.float32(0.5), "x", None)}
    )
