"""Write a run's folder, and its records: to `progress.jsonl`, TensorBoard, Weights & Biases."""

import importlib
import importlib.util
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, Self

from breadbox.model.errors import InvalidRequestError, ReplayBufferError
from breadbox_learner.settings import LearnSettings

_log = logging.getLogger(__name__)

EVENT_FILES = "events.out.tfevents.*"


class RunFolderError(ReplayBufferError):
    """The folder of a run, or a file in it, cannot be used; names it and the reason."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(f"{path}: {error.strerror or error}")
        self.path = path


class RunFolder:
    """The files of one run, made by `open`. A second learner must not use the same folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.progress = path / "progress.jsonl"
        """One JSON object per update."""
        self.checkpoint = path / "checkpoint.safetensors"
        """The last checkpoint, complete or absent."""
        self.settings = path / "settings.yaml"
        """The settings, seed and all, of the process that wrote last."""
        self.session = path / "session"
        """Id of the session, with which a run that is resumed before its first checkpoint goes on:
        a new one would have to take it over from the workers."""

    @classmethod
    def open(cls, settings: LearnSettings) -> "RunFolder":
        """Create or find the folder; with `overwrite`, delete the run in it."""
        cls.check(settings)
        folder = cls(
            settings.run_dir or _new_folder(Path("runs") / time.strftime("%Y-%m-%d-%H%M%S"))
        )
        with _named(folder.path):
            folder.path.mkdir(parents=True, exist_ok=True)
            if not os.access(folder.path, os.W_OK):
                raise PermissionError(0, "cannot be written to")
            if settings.overwrite:
                files = (folder.checkpoint, folder.progress, folder.session)
                for path in (*files, *folder.path.glob(EVENT_FILES)):
                    path.unlink(missing_ok=True)
            folder.settings.write_text(settings.as_yaml())
        return folder

    @classmethod
    def check(cls, settings: LearnSettings) -> None:
        """Refuse a folder that has another run, or cannot be read; change nothing."""
        if settings.resume and settings.overwrite:
            raise InvalidRequestError("resume", "and overwrite contradict each other: set one")
        if settings.run_dir is None or settings.resume or settings.overwrite:
            return
        folder = cls(settings.run_dir)
        with _named(folder.path):
            holds_run = folder.checkpoint.exists() or (
                folder.progress.exists() and folder.progress.stat().st_size > 0
            )
        if holds_run:
            raise InvalidRequestError(
                "run_dir",
                f"{folder.path} holds a run: --resume continues it, --overwrite deletes it "
                "and starts anew",
            )

    def read_checkpoint(self) -> bytes:
        """Return the checkpoint, or empty bytes without one."""
        with _named(self.checkpoint):
            return self.checkpoint.read_bytes() if self.checkpoint.exists() else b""

    def read_session(self) -> str:
        """Return the id of the session that the run started last, or ""."""
        with _named(self.session):
            return self.session.read_text().strip() if self.session.is_file() else ""

    def write_session(self, session_id: str) -> None:
        """Note the id of the run's session."""
        with _named(self.session):
            self.session.write_text(session_id)

    def write_checkpoint(self, data: bytes) -> None:
        """Replace the checkpoint atomically; after a crash or a full disk the old one is there."""
        partial = self.checkpoint.with_suffix(".partial")
        with _named(self.checkpoint):
            with partial.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self.checkpoint)
            # The rename is durable only with its folder.
            folder = os.open(self.path, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def drop_records_after(self, update: int) -> None:
        """Delete records of updates after the checkpoint, which will be made again."""
        with _named(self.progress):
            if not self.progress.is_file():
                return
            kept = [
                line
                for line in self.progress.read_bytes().splitlines(keepends=True)
                if _update_of(line) <= update
            ]
            partial = self.progress.with_suffix(".partial")
            partial.write_bytes(b"".join(kept))
            partial.replace(self.progress)


def _new_folder(wanted: Path) -> Path:
    path, number = wanted, 1
    with _named(wanted):
        while True:
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                path = wanted.with_name(f"{wanted.name}-{number}")
                number += 1
            else:
                return path


def _update_of(line: bytes) -> float:
    """Return the number of a record's update, or infinity for a line that a kill cut short."""
    try:
        return int(json.loads(line)["update"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunFolderError(path, error) from error


Record = Mapping[str, float | int | str | None]


class Sink(Protocol):
    """A destination of records."""

    def write(self, record: Record) -> None:
        """Write one record; its `update` numbers it."""

    def write_evaluation(self, record: Record) -> None:
        """Write the record of an evaluation, possibly some updates after its own."""

    def close(self) -> None:
        """Flush and close. Idempotent."""


class JsonLines:
    """Append one JSON object a line, atomically; NaN becomes null; OSError if there is no room."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def write(self, record: Record) -> None:
        """Append one line."""
        plain = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in record.items()
        }
        left = memoryview((json.dumps(plain) + "\n").encode())
        start = self._file.tell()
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            with suppress(OSError):  # The first error is the one to raise.
                self._file.truncate(start)
            raise

    def write_evaluation(self, record: Record) -> None:
        """Append a line."""
        self.write(record)

    def close(self) -> None:
        self._file.close()


class Lines:
    """Log a line every few seconds, and for the first record."""

    def __init__(
        self,
        echo: Callable[[str], None],
        period_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._echo = echo
        self._period_s = period_s
        self._clock = clock
        self._next_at = -math.inf
        self._unshown: Record | None = None

    def write(self, record: Record) -> None:
        """Log the record, if it is time for a line."""
        self._unshown = record
        if self._clock() >= self._next_at:
            self._next_at = self._clock() + self._period_s
            self._show(record)

    def write_evaluation(self, record: Record) -> None:
        """Log it: there are few of them."""
        low, high = record["evaluation_return_low"], record["evaluation_return_high"]
        known = isinstance(low, int | float) and isinstance(high, int | float)
        within = f" (95%: {low:.1f} to {high:.1f})" if known else ""
        self._echo(
            f"evaluation of update {record['update']}: "
            f"return {record['evaluation_return_mean']:.1f}{within}, "
            f"mean of {record['evaluation_episode_count']} greedy episodes of "
            f"{record['evaluation_length_mean']:.1f} steps, "
            f"model version {record['model_version']}, took {record['evaluation_s']:.1f} s"
        )

    def close(self) -> None:
        """Log the last record, if it was not logged."""
        if self._unshown is not None:
            self._show(self._unshown)

    def _show(self, record: Record) -> None:
        self._unshown = None
        mean = record.get("return_mean_100")
        shown = f"{mean:.1f}" if isinstance(mean, int | float) else "-"
        # Over the last 100 episodes; at first there are fewer.
        count = min(100, int(record["episode_count"] or 0))
        stale = f", {record['left_out']} fragments too stale" if record.get("left_out") else ""
        excluded = record.get("workers_left_out")
        left_out = f"hardly on those of {excluded} environments, " if excluded else ""
        self._echo(
            f"update {record['update']}: return {shown} "
            f"(mean of {count} episode{'' if count == 1 else 's'}), "
            f"model version {record['model_version']}, "
            f"staleness {record['staleness_at_grant_mean']:.1f} when granted, "
            f"{record['staleness_mean']:.1f} when trained (largest {record['staleness_max']}), "
            f"trained on {record['steps']} steps of {record['environment_steps']} made{stale}, "
            f"{left_out}"
            f"waited {record['fetch_wait_s']:.2f} s for the last batch"
        )


class TensorBoard:
    """Write event files over environment steps; hide later steps of earlier files."""

    def __init__(self, folder: Path, environment_steps: int = 0) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=environment_steps + 1)

    def write(self, record: Record) -> None:
        """Write each number of the record as a scalar."""
        self._add("learner", record, record["environment_steps"])

    def write_evaluation(self, record: Record) -> None:
        """Write its numbers over the environment steps of its version."""
        self._add("evaluation", _evaluation_of(record), record["environment_steps"])

    def _add(self, group: str, numbers: Record, steps: Any) -> None:
        for name, value in numbers.items():
            if name != "environment_steps" and isinstance(value, int | float):
                self._writer.add_scalar(f"{group}/{name}", value, int(steps or 0))

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases, continued by its id; obeys the package's `WANDB_MODE`."""

    def __init__(self, project: str, run_id: str, config: Mapping[str, Any], folder: Path) -> None:
        wandb = importlib.import_module("wandb")
        try:
            self._run = wandb.init(
                project=project, id=run_id, resume="allow", config=dict(config), dir=str(folder)
            )
        except wandb.Error as error:
            reason = str(error).splitlines()[0]
            raise InvalidRequestError("wandb_project", f"cannot be logged to: {reason}") from error

        # The default x-axis of charts.
        self._run.define_metric("*", step_metric="environment_steps")
        self._evaluation_names: set[str] = set()
        self._evaluation_row: int | None = None

    def write(self, record: Record) -> None:
        """Log the record under its update's number."""
        self._run.log(dict(record), step=record["update"])

    def write_evaluation(self, record: Record) -> None:
        """Log it beside the newest update, over its own environment steps."""
        steps = "evaluation/environment_steps"
        named = {f"evaluation/{name}": value for name, value in _evaluation_of(record).items()}
        named |= {f"evaluation/{name}": record[name] for name in ("update", "model_version")}
        for name in named.keys() - self._evaluation_names:
            self._run.define_metric(name, step_metric=steps)
        self._evaluation_names |= named.keys()
        named[steps] = record["environment_steps"]
        # Rows are append-only, so it cannot be in its own update's, and a row has room for one: a
        # second one between two updates opens the next update's row. There is never a third,
        # because there are no more evaluations than updates, and at most one waits.
        if self._evaluation_row == self._run.step:
            self._run.log({}, commit=True)
        self._evaluation_row = self._run.step
        self._run.log(named, commit=False)

    def close(self) -> None:
        self._run.finish()


def _evaluation_of(record: Record) -> Record:
    prefix = "evaluation_"
    return {
        name.removeprefix(prefix): value
        for name, value in record.items()
        if name.startswith(prefix)
    }


def wandb_installed() -> bool:
    """Return True if the `wandb` package can be imported."""
    return importlib.util.find_spec("wandb") is not None


class Progress:
    """All sinks of a run, as a context manager; a failing sink loses records, logged once."""

    def __init__(self, sinks: list[Sink]) -> None:
        self._sinks = sinks
        self._failing: set[Sink] = set()

    def write(self, record: Record) -> None:
        """Write the record to every sink."""
        self._give(lambda sink: sink.write(record))

    def write_evaluation(self, record: Record) -> None:
        """Write the record of an evaluation to every sink."""
        self._give(lambda sink: sink.write_evaluation(record))

    def _give(self, write: Callable[[Sink], None]) -> None:
        for sink in self._sinks:
            try:
                write(sink)
            except OSError as error:
                if sink not in self._failing:
                    _log.error("records are being lost (%s): %s", type(sink).__name__, error)
                self._failing.add(sink)
            else:
                self._failing.discard(sink)

    def close(self) -> None:
        """Close every sink. Idempotent."""
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            try:
                sink.close()
            except OSError as error:
                _log.error("records may be lost (%s): %s", type(sink).__name__, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
