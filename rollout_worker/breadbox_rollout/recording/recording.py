"""Watches the episodes of one environment, inside its process, and writes those that are wanted.

Encoding happens here, beside the environment: it slows that one down, and inference not at all.
"""

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from breadbox.model.errors import InvalidRequestError
from breadbox.model.fragment import Tree
from breadbox_rollout.environments.arrays import GroupArrays
from breadbox_rollout.environments.environments import Environment
from breadbox_rollout.environments.failures import NoFramesError
from breadbox_rollout.environments.units import StepRecord
from breadbox_rollout.recording.episode_files import EpisodeFiles, FileOptions
from breadbox_rollout.recording.media import Frame, as_frame, with_text


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingOptions:
    """Which episodes are written, and how; plain data, sent to the environment processes."""

    folder: str
    """Where the files go; exists."""
    every: int = 1
    """Every so many-th episode of an environment, the first included."""
    env_count: int | None = None
    """Only environments with an index below this, or None for all."""
    overlay: bool = False
    """Write what the policy expects into each frame."""
    media: str = "h264"
    fps: int = 30
    crf: int = 0
    partial_prefix: str = ""
    """Names what belongs to this run, so that another may clean up after a killed process."""


class EpisodeRecorder:
    """A `Recorder` of one environment."""

    def __init__(
        self, options: RecordingOptions, env_index: int, arrays: GroupArrays, row: int
    ) -> None:
        self._options = options
        self._env_index = env_index
        self._arrays = arrays
        self._row = row
        self._seen_count = 0
        self._files: EpisodeFiles | None = None
        self._summary: dict[str, Any] = {}

    def begin(self, env: Environment, obs: Tree, info: dict[str, Any], seed: int | None) -> None:
        """See `Recorder.begin`."""
        self.discard()
        self._seen_count += 1
        count_max = self._options.env_count
        unwanted = count_max is not None and self._env_index >= count_max
        if unwanted or (self._seen_count - 1) % self._options.every:
            return
        episode_id = secrets.token_hex(8)
        folder = Path(self._options.folder)
        name = f".partial-{self._options.partial_prefix}-{self._env_index}-{episode_id}"
        options = FileOptions(
            media=self._options.media, fps=self._options.fps, crf=self._options.crf
        )
        self._files = EpisodeFiles(folder, episode_id, folder / name, options)
        self._summary = {
            "episode_id": episode_id,
            "env_index": self._env_index,
            "seed": seed,
            "step_count": 0,
            "return_sum": 0.0,
        }
        self._files.add_info({"step": 0, "info": _without_frame(info)})
        self._files.add_observation(obs)
        self._add_frame(env, obs, info, value=None)

    def step(self, env: Environment, record: StepRecord) -> None:
        """See `Recorder.step`."""
        if self._files is None:
            return
        summary = self._summary
        version = int(self._arrays.model_version[0])
        summary["step_count"] += 1
        summary["return_sum"] += record.reward
        summary["terminated"] = record.terminated
        summary["truncated"] = record.truncated
        summary.setdefault("model_version_min", version)
        summary["model_version_max"] = version
        self._files.add_step(
            record.action,
            {
                "reward": np.float64(record.reward),
                "terminated": np.bool_(record.terminated),
                "truncated": np.bool_(record.truncated),
                "value": np.float32(record.value),
            },
        )
        self._files.add_info(
            {
                "step": summary["step_count"],
                "reward": record.reward,
                "terminated": record.terminated,
                "truncated": record.truncated,
                "info": _without_frame(record.info),
            }
        )
        self._files.add_observation(record.obs)
        self._add_frame(env, record.obs, record.info, record.value)

    def end(self) -> dict[str, Any] | None:
        """See `Recorder.end`."""
        files, self._files = self._files, None
        return None if files is None else {**self._summary, **files.finish()}

    def discard(self) -> None:
        """See `Recorder.discard`."""
        files, self._files = self._files, None
        if files is not None:
            files.discard()

    def _add_frame(
        self, env: Environment, obs: Tree, info: dict[str, Any], value: float | None
    ) -> None:
        assert self._files is not None
        if not self._files.wants_frames:
            return
        frame = find_frame(env, obs, info)
        if self._options.overlay and value is not None:
            frame = with_text(frame, f"V {value:.3f}")
        self._files.add_frame(frame)


def find_frame(env: Environment, obs: Tree, info: dict[str, Any]) -> Frame:
    """Return what the environment looks like now.

    The info's "pov" (the ancestor's simulator gives one), else what `render` returns, else an
    observation that is an image, or that has one under "image".
    """
    image = info.get("pov")
    if image is None and env.render_mode == "rgb_array":
        image = env.render()
    if image is None:
        image = obs.get("image") if isinstance(obs, dict) else obs
    try:
        return as_frame(image)
    except InvalidRequestError as error:
        raise NoFramesError(error.field, error.problem) from error


def _without_frame(info: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in info.items() if key != "pov"}
