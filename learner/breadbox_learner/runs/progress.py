"""A record per update and evaluation: to `progress.jsonl`, TensorBoard and Weights & Biases."""

import importlib
import importlib.util
import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, Self

from breadbox.model.errors import InvalidRequestError

_log = logging.getLogger(__name__)

Record = Mapping[str, float | int | str | None]


class Sink(Protocol):
    """Somewhere records go."""

    def write(self, record: Record) -> None:
        """Take one record; `update` in it numbers them."""

    def write_evaluation(self, record: Record) -> None:
        """Take the record of an evaluation, perhaps some updates after that which it is of."""

    def close(self) -> None:
        """Flush and close. Idempotent."""


class JsonLines:
    """Appends one JSON object a line, at once, so that another process can follow.

    Numbers that JSON has no word for (NaN, infinities) become null. A line is there whole or not at
    all, unless the process is killed while writing it.

    Args:
        path: Of the file; made if it is not there.

    Raises:
        OSError: The file cannot be opened; or, of `write`, there is no room for the line.
    """

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
            with suppress(OSError):  # What led here is the error to tell.
                self._file.truncate(start)
            raise

    def write_evaluation(self, record: Record) -> None:
        """Append a line of its own."""
        self.write(record)

    def close(self) -> None:
        """See `Sink.close`."""
        self._file.close()


class Lines:
    """A line for people every few seconds: what `docker logs` or a terminal shows of a run.

    Args:
        echo: Prints one line.
        period_s: Seconds between lines; the first record is always shown.
        clock: Seconds that never go back.
    """

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
        """Show the record, if it is time for one."""
        self._unshown = record
        if self._clock() >= self._next_at:
            self._next_at = self._clock() + self._period_s
            self._show(record)

    def write_evaluation(self, record: Record) -> None:
        """Show it: there are few of them."""
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
        """Show the last record, if it has not been shown."""
        if self._unshown is not None:
            self._show(self._unshown)

    def _show(self, record: Record) -> None:
        self._unshown = None
        mean = record.get("return_mean_100")
        shown = f"{mean:.1f}" if isinstance(mean, int | float) else "-"
        # Over the last 100, as the name says, of which there are fewer at first.
        count = min(100, int(record["episode_count"] or 0))
        self._echo(
            f"update {record['update']}: return {shown} "
            f"(mean of {count} episode{'' if count == 1 else 's'}), "
            f"model version {record['model_version']}, "
            f"staleness {record['staleness_mean']:.1f} of at most {record['staleness_max']}, "
            f"trained on {record['steps']} steps of {record['environment_steps']} made, "
            f"waited {record['fetch_wait_s']:.2f} s for the last batch"
        )


class TensorBoard:
    """Event files in a folder, over environment steps.

    Args:
        folder: Where they go.
        environment_steps: Steps made before the first record; what earlier files say of later ones
            is not shown any more.
    """

    def __init__(self, folder: Path, environment_steps: int = 0) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=environment_steps + 1)

    def write(self, record: Record) -> None:
        """Write each number of the record as a scalar."""
        steps = int(record["environment_steps"] or 0)
        for name, value in record.items():
            if name != "environment_steps" and isinstance(value, int | float):
                self._writer.add_scalar(f"learner/{name}", value, steps)

    def write_evaluation(self, record: Record) -> None:
        """Write its numbers over the environment steps that the version was made of."""
        steps = int(record["environment_steps"] or 0)
        for name, value in _evaluation_of(record).items():
            if isinstance(value, int | float):
                self._writer.add_scalar(f"evaluation/{name}", value, steps)

    def close(self) -> None:
        """See `Sink.close`."""
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases; needs the `wandb` package, and obeys its `WANDB_MODE`.

    Args:
        project: Where the run belongs.
        run_id: Its name; a run of that name is gone on with.
        config: Settings shown beside it.
        folder: Where the package keeps its files.

    Raises:
        InvalidRequestError: The package cannot start a run, such as for want of a key.
    """

    def __init__(self, project: str, run_id: str, config: Mapping[str, Any], folder: Path) -> None:
        wandb = importlib.import_module("wandb")
        try:
            self._run = wandb.init(
                project=project, id=run_id, resume="allow", config=dict(config), dir=str(folder)
            )
        except wandb.Error as error:
            reason = str(error).splitlines()[0]
            raise InvalidRequestError("wandb_project", f"cannot be logged to: {reason}") from error

        # What charts have for an x-axis unless one chooses another.
        self._run.define_metric("*", step_metric="environment_steps")
        self._evaluation_names: set[str] = set()
        self._evaluation_row: int | None = None
        """Row of the last one."""

    def write(self, record: Record) -> None:
        """Log the record under its update's number."""
        self._run.log(dict(record), step=record["update"])

    def write_evaluation(self, record: Record) -> None:
        """Log it beside the newest update, over environment steps of its own."""
        steps = "evaluation/environment_steps"
        named = {f"evaluation/{name}": value for name, value in _evaluation_of(record).items()}
        named |= {f"evaluation/{name}": record[name] for name in ("update", "model_version")}
        for name in named.keys() - self._evaluation_names:
            self._run.define_metric(name, step_metric=steps)
        self._evaluation_names |= named.keys()
        named[steps] = record["environment_steps"]
        # Rows never go back there, so it cannot go to its own update's, and one row holds one of
        # them: the second between two updates opens the next update's. There is never a third, as
        # no more are begun than updates made, and one waits at most.
        if self._evaluation_row == self._run.step:
            self._run.log({}, commit=True)
        self._evaluation_row = self._run.step
        self._run.log(named, commit=False)

    def close(self) -> None:
        """See `Sink.close`."""
        self._run.finish()


def _evaluation_of(record: Record) -> Record:
    """What an evaluation found, by names without the prefix."""
    prefix = "evaluation_"
    return {
        name.removeprefix(prefix): value
        for name, value in record.items()
        if name.startswith(prefix)
    }


def wandb_installed() -> bool:
    """Whether the `wandb` package can be imported."""
    return importlib.util.find_spec("wandb") is not None


class Progress:
    """All sinks of a run, as one. Use it as a context manager, or call `close`.

    A sink that the operating system refuses, such as for want of room, loses records and says so
    once, until it works again: what is trained is worth more than what is written about it.
    """

    def __init__(self, sinks: list[Sink]) -> None:
        self._sinks = sinks
        self._failing: set[Sink] = set()

    def write(self, record: Record) -> None:
        """Give the record to every sink."""
        self._give(lambda sink: sink.write(record))

    def write_evaluation(self, record: Record) -> None:
        """Give the record of an evaluation to every sink."""
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
