"""`breadbox demo`: watch an agent learn through the server."""

import os
import shutil
import signal
import sys
import tempfile
import time
import webbrowser
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.markup import escape

import breadbox
from breadbox.cli.command import command
from breadbox.cli.settings import Settings, setting
from breadbox.cli.signals import STOPPING, stop_on_signals
from breadbox.local import memory_folder
from breadbox.model.errors import ReplayBufferError
from breadbox.model.paths import naming
from breadbox.shared.extras import missing_module
from breadbox.shared.loopback import loopback_host
from breadbox_demo.processes import ProcessGroup
from breadbox_demo.screen import ProgressLog, Screen, write_report

POLL_S = 0.25
LINE_EVERY_S = 5.0
START_LIMIT_S = 60.0
STOP_GRACE_S = 10.0
INTERRUPTED = 130


class DemoSettings(Settings):
    """Options of the demo. None has an environment variable: those are for other commands."""

    env: str = setting("CartPole-v1", environment=False)
    """Gymnasium environment to learn."""
    target_return: float = setting(195.0, environment=False, gt=0)
    """Stop with exit status 0 at this mean return of the last 100 episodes."""
    time_limit_s: float = setting(300.0, option="time_limit", environment=False, ge=1)
    """Seconds after which to stop with exit status 1."""
    workers: int = setting(2, environment=False, ge=1, le=64)
    """Rollout worker processes."""
    envs_per_worker: int = setting(8, environment=False, ge=1, le=1024)
    """Environments per worker."""
    seed: int = setting(0, environment=False, ge=0)
    """Seed of everything random."""
    out: Path = setting(Path("runs"), environment=False, folder=True)
    """Folder for a folder per run: logs, progress.jsonl, report.png."""
    console: bool = setting(False, environment=False)
    """Also serve the console, a web page that shows the buffer, and open it."""


class DemoFailed(Exception):  # noqa: N818  It ends the demo and is not an error of the library.
    """A process ended that must not; the message names it and its log."""


class Interrupted(Exception):  # noqa: N818
    """The user, or the system, asked the demo to stop."""


def _child_environment() -> dict[str, str]:
    settings = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BREADBOX_")}
    return {**kept, **settings}


def _interrupt(number: int) -> None:
    """End the demo once, and ignore further signals."""
    for each in _ENDING:
        signal.signal(each, signal.SIG_IGN)
    raise Interrupted(signal.Signals(number).name)


_ENDING = (*STOPPING, signal.SIGHUP)
"""Ctrl-C, SIGTERM and a closed terminal."""


class Demo:
    """The demo's processes and its screen. Call `run()` once."""

    def __init__(self, options: DemoSettings, run_dir: Path, console: Console) -> None:
        self._options = options
        self._run_dir = run_dir
        self._console = console
        self._log = ProgressLog(run_dir / "progress.jsonl")
        self._screen = Screen(
            title=f"Breadbox demo: {options.env}, {options.workers} workers, one learner",
            target_return=options.target_return,
            time_limit_s=options.time_limit_s,
        )
        self._worker_names = [f"worker-{number}" for number in range(options.workers)]

    def run(self) -> int:
        """Train until the target, the time limit or an interrupt; return the exit status."""
        store = Path(tempfile.mkdtemp(prefix="breadbox-demo-", dir=memory_folder()))
        processes = ProcessGroup(self._run_dir)
        status = 1
        try:
            with stop_on_signals(_interrupt, _ENDING):
                try:
                    status = self._run(processes, store)
                except Interrupted as interrupt:
                    self._console.print(f"{interrupt}: stopping")
                    status = INTERRUPTED
                except DemoFailed as failure:
                    self._console.print(f"[red]{escape(str(failure))}[/]", highlight=False)
                # Producers first, so that they never call a server that is gone.
                processes.stop(["learner", *self._worker_names], STOP_GRACE_S)
                processes.stop(["console", "server"], STOP_GRACE_S)
        finally:
            processes.close()
            shutil.rmtree(store, ignore_errors=True)
        self._finish()
        return status

    def _run(self, processes: ProcessGroup, store: Path) -> int:
        options, environment = self._options, _child_environment()
        ready = self._run_dir / "server.address"
        free = f"{loopback_host()}:0"
        serve = [
            *("serve", "--listen", free, "--metrics-listen", free),
            # Ephemeral, because the server clears the memory even if this process is killed.
            *("--store", f"file://{store}", "--ephemeral", "--ready-file", str(ready)),
            *("--seed", str(options.seed)),
        ]
        processes.start("server", serve, environment)
        address = self._await_start(
            processes, "server", lambda: ready.read_text().strip() if ready.exists() else ""
        )
        common = ["--server", address, "--env", options.env, "--seed", str(options.seed)]
        learn = [
            *("learn", *common, "--target-return", str(options.target_return)),
            *("--time-limit-s", str(options.time_limit_s), "--run-dir", str(self._run_dir)),
        ]
        processes.start("learner", learn, environment)
        if options.console:
            self._open_console(processes, address, environment)
        for name in self._worker_names:
            envs = ["--num-envs", str(options.envs_per_worker), "--worker-name", name]
            processes.start(name, ["rollout", *common, *envs], environment)
        with breadbox.connect(address) as client:
            return self._watch(processes, client)

    def _open_console(
        self, processes: ProcessGroup, address: str, environment: dict[str, str]
    ) -> None:
        arguments = ("console", "--server", address, "--console-listen", f"{loopback_host()}:0")
        processes.start("console", arguments, environment)
        said = self._await_start(
            processes, "console", lambda: "".join(processes.last_lines("console", 1))
        )
        url = said.removeprefix("console: ")
        self._console.print(f"console: {url}", highlight=False)
        if self._console.is_terminal:
            webbrowser.open(url)

    def _await_start(self, processes: ProcessGroup, name: str, look: Callable[[], str]) -> str:
        """Return what `look` finds once a process has started."""
        give_up_at = time.monotonic() + START_LIMIT_S
        while not (found := look()):
            self._fail_if_ended(processes, expected=())
            if time.monotonic() > give_up_at:
                raise DemoFailed(f"the {name} did not start within {START_LIMIT_S:.0f} s")
            time.sleep(0.02)
        return found

    def _fail_if_ended(self, processes: ProcessGroup, expected: tuple[str, ...]) -> None:
        for process in processes.exited():
            if process.name in expected:
                continue
            log = self._run_dir / f"{process.name}.log"
            tail = "\n  ".join(process.last_lines)
            raise DemoFailed(
                f"{process.name} ended with exit status {process.return_code}; "
                f"{log} ends:\n  {tail}"
            )

    def _watch(self, processes: ProcessGroup, client: "breadbox.Client") -> int:
        give_up_at = time.monotonic() + self._options.time_limit_s
        self._screen.stage = "the learner and the workers to start"
        line_at = time.monotonic()
        with Live(console=self._console, auto_refresh=False) as live:
            while True:
                self._observe(processes, client)
                if self._console.is_terminal:
                    live.update(self._screen.frame(self._log), refresh=True)
                elif time.monotonic() >= line_at:
                    line = self._screen.line(self._log)
                    self._console.print(line, highlight=False, soft_wrap=True)
                    line_at += LINE_EVERY_S
                if self._reached_target():
                    return 0
                if time.monotonic() > give_up_at:
                    self._console.print("time limit reached before the target return")
                    return 1
                # The learner ends by itself at the target or its time limit.
                learner_done = processes.return_code("learner") == 0
                self._fail_if_ended(processes, expected=("learner",) if learner_done else ())
                if learner_done:
                    self._log.poll()
                    return 0 if self._reached_target() else 1
                time.sleep(POLL_S)

    def _observe(self, processes: ProcessGroup, client: "breadbox.Client") -> None:
        self._log.poll()
        try:
            self._screen.observe(client.get_buffer(), time.monotonic())
        except ReplayBufferError as error:
            self._fail_if_ended(processes, expected=())
            raise DemoFailed(f"the server does not answer: {error}") from error

    def _reached_target(self) -> bool:
        mean_return = self._log.latest("return_mean_100")
        episodes = self._log.latest("episode_count") or 0
        return (
            mean_return is not None
            and episodes >= 100
            and mean_return >= self._options.target_return
        )

    def _finish(self) -> None:
        self._log.poll()
        options = self._options
        if not self._log.records:
            self._console.print(f"no update was made; the logs are in {self._run_dir}")
            return
        path = self._run_dir / "report.png"
        mean_return = self._log.latest("return_mean_100")
        reached = f"mean return {float('nan') if mean_return is None else mean_return:.1f}"
        title = f"{options.env}: {reached} after {len(self._log.records)} updates"
        write_report(self._log, path, title=title, target_return=options.target_return)
        self._console.print(
            f"{reached} over the last 100 episodes, {len(self._log.records)} model versions, "
            f"{self._screen.elapsed_s:.0f} s",
            highlight=False,
        )
        self._console.print(f"report: {path}", highlight=False, soft_wrap=True)


@command(DemoSettings)
def demo(settings: DemoSettings) -> None:
    """Watch an agent learn through the service.

    Starts a server with an embedded store, rollout workers and a PPO learner as separate
    processes, which exchange fragments, batches and weights through the server alone. Ends at the
    target return (exit status 0) or the time limit (1), and leaves a report.png. Ctrl-C stops
    everything.
    """
    # Checked before anything starts, for all of the processes.
    for extra in ("demo", *(["console"] if settings.console else [])):
        if name := missing_module(extra):
            raise ModuleNotFoundError(name, name=name)
    started_at = time.strftime("%Y-%m-%d-%H%M%S")
    run_dir, number = settings.out / started_at, 1
    while run_dir.exists():
        number += 1
        run_dir = run_dir.with_name(f"{started_at}-{number}")
    run_dir.mkdir(parents=True)
    run_dir = run_dir.resolve()
    with naming(run_dir):
        status = Demo(settings, run_dir, Console()).run()
    sys.exit(status)
