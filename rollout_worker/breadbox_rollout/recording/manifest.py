"""The list of recorded episodes: one JSON line each, appended whole."""

from pathlib import Path
from typing import Any

from breadbox_rollout.recording.episode_files import append_line, remove_partial
from breadbox_rollout.recording.recording import RecordingOptions

MANIFEST = "manifest.jsonl"
"""One line per finished episode; names of files are relative to its folder."""
FAILURES = "failures.jsonl"
"""One line per failure."""
PATH_KEYS = ("info_path", "action_path", "video_path", "base_image_path")


class Recordings:
    """The folder that environment processes record into, seen from the worker."""

    def __init__(self, options: RecordingOptions, details: dict[str, Any]) -> None:
        self.options = options
        self._folder = Path(options.folder)
        self._details = details

    def add(self, episode: dict[str, Any]) -> dict[str, Any]:
        """Append a line for a finished episode; returns it with full paths."""
        entry = {key: value for key, value in episode.items() if key != "env"} | self._details
        append_line(self._folder / MANIFEST, entry)
        paths = {key: str(self._folder / entry[key]) for key in PATH_KEYS if key in entry}
        return {**entry, **paths}

    def add_failure(self, failure: dict[str, Any]) -> None:
        """Append a line for a failure."""
        append_line(self._folder / FAILURES, failure)

    def clean(self, env_index: int | None = None) -> None:
        """Remove what a process that is gone had begun, or, given None, what any of ours had."""
        prefix = self.options.partial_prefix
        remove_partial(self._folder, prefix if env_index is None else f"{prefix}-{env_index}")
