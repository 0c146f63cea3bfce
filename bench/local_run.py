"""Server, rollout workers and learner as processes of this machine, until the learner ends."""

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from breadbox_demo.processes import ProcessGroup

_ROOT = Path(__file__).parents[1]
POLL_S = 0.2
START_LIMIT_S = 60.0


@dataclass(frozen=True)
class LocalRun:
    """What to run; every option is as on the command line."""

    name: str
    learn: Sequence[str]
    serve: Sequence[str] = ()
    rollout: Sequence[str] = ()
    workers: int = 2
    seed: int = 0
    limit_s: float = 600.0


@dataclass(frozen=True)
class Finished:
    """What became of a run."""

    run: LocalRun
    exit_status: int | None
    """The learner's; None: it was stopped at the limit."""
    records: list[dict[str, Any]]
    """One per update."""

    def column(self, name: str) -> list[float]:
        """One number per record; NaN where a record has none."""
        values = (record.get(name) for record in self.records)
        return [float("nan") if value is None else float(value) for value in values]


def run_locally(run: LocalRun, folder: Path) -> Finished:
    """Run it, with logs and `progress.jsonl` in a new folder below *folder*."""
    # Or a SIGTERM would end this process alone, and leave the others running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    place = folder / run.name
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    store = Path(tempfile.mkdtemp(prefix="breadbox-run-", dir=memory))
    processes = ProcessGroup(place)
    try:
        status = _run(run, place, store, processes)
    finally:
        processes.stop(["learner", *_names(run)], 10.0)
        processes.stop(["server"], 10.0)
        processes.close()
        shutil.rmtree(store, ignore_errors=True)
    progress = place / "progress.jsonl"
    lines = progress.read_text().splitlines() if progress.exists() else []
    return Finished(run, status, [json.loads(line) for line in lines])


def _run(run: LocalRun, place: Path, store: Path, processes: ProcessGroup) -> int | None:
    ready = place / "address"
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("BREADBOX_")},
        **{"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        ),
    }
    serve = ("serve", "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0")
    processes.start(
        "server",
        [*serve, "--store", f"file://{store}", "--ready-file", str(ready), *run.serve],
        environment,
    )
    give_up_at = time.monotonic() + START_LIMIT_S
    while not (ready.exists() and (address := ready.read_text().strip())):
        if time.monotonic() > give_up_at or processes.exited():
            raise RuntimeError(f"the server did not start: {place / 'server.log'}")
        time.sleep(POLL_S)
    seed = ("--seed", str(run.seed))
    learn = ("learn", "--server", address, "--run-dir", str(place), "--no-tensorboard", *seed)
    processes.start("learner", [*learn, *run.learn], environment)
    for name in _names(run):
        rollout = ("rollout", "--server", address, "--worker-name", name, *seed)
        processes.start(name, [*rollout, *run.rollout], environment)
    give_up_at = time.monotonic() + run.limit_s
    while (status := processes.return_code("learner")) is None and time.monotonic() < give_up_at:
        time.sleep(POLL_S)
    return status


def _names(run: LocalRun) -> list[str]:
    return [f"worker-{number}" for number in range(run.workers)]
