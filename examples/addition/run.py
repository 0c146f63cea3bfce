"""Teach a transformer to add two-digit numbers by GRPO, with rewards from a verifier.

    python examples/addition/run.py            # a server, two generators, a verifier, the learner

Each process may be killed at any time: it is started again, and the run goes on. So does the whole
program, by the same command. With a `breadbox serve` somewhere, the same on any machines:

    python examples/addition/run.py learn HOST:50051
    python examples/addition/run.py verify HOST:50051
    python examples/addition/run.py generate HOST:50051    # as often as you like
"""

import argparse
import multiprocessing
import os
import signal
import sys
import threading
import time
from multiprocessing.context import SpawnProcess
from pathlib import Path

from roles import Run, generate, learn, verify

from breadbox.local import ServerProcess, start_server

FAILURES_MAX = 5
"""Failures of a role in a row, each within seconds, after which the program ends."""


class Role:
    """A process that is started again when it has ended."""

    def __init__(self, name: str, function, *arguments) -> None:
        self.name = name
        self._function, self._arguments = function, arguments
        self._failures = 0
        self.start()

    def start(self) -> None:
        self._started_at = time.monotonic()
        self.process: SpawnProcess = multiprocessing.get_context("spawn").Process(
            target=run_role, args=(self._function, *self._arguments), name=self.name
        )
        self.process.start()
        print(f"{self.name}: process {self.process.pid}", flush=True)

    def is_done(self) -> bool:
        """Start the process again if it was killed or has failed; True if it has ended by itself.

        Raises:
            SystemExit: It fails whenever it is started.
        """
        if self.process.is_alive() or self.process.exitcode == 0:
            return self.process.exitcode == 0
        is_early = time.monotonic() - self._started_at < 10
        self._failures = self._failures + 1 if is_early and self.process.exitcode > 0 else 0
        if self._failures == FAILURES_MAX:
            raise SystemExit(f"{self.name} fails at its start; its error is above")
        print(f"{self.name} ended with exit code {self.process.exitcode}", flush=True)
        self.start()
        return False


def run_role(function, *arguments) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its roles.
    threading.Thread(target=end_with_parent, daemon=True).start()
    function(*arguments)


def end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def watch(server: ServerProcess, roles: list[Role]) -> None:
    """Start again what has ended, until the learner, the first of the roles, is done."""
    while not roles[0].is_done():
        if server.process_id is None:
            server.restart()
            print(f"server: process {server.process_id}, again", flush=True)
        for role in roles[1:]:
            role.is_done()
        time.sleep(0.2)


def run(options: argparse.Namespace) -> None:
    # A shell's background jobs begin with it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    goal = options.seed, options.versions, options.target
    roles: list[Role] = []
    # Payloads and journal are in the folder, so that a killed server finds all that it had.
    store = f"file://{folder.resolve() / 'store'}"
    with start_server(store=store, start_limit_s=300) as server:
        try:
            print(f"server: process {server.process_id}, {server.address}", flush=True)
            roles.append(Role("learner", learn, server.address, folder, *goal))
            roles.append(Role("verifier", verify, server.address))
            for number in range(1, options.generators + 1):
                roles.append(Role(f"generator {number}", generate, server.address))
            watch(server, roles)
        except KeyboardInterrupt:
            print(f"stopped; to go on with {folder}, start it again", flush=True)
            sys.exit(130)
        finally:
            for role in roles:
                role.process.kill()  # Any of them may be killed at any time.
                role.process.join()
    finished = Run(folder, options.seed)
    plot(finished)
    sys.exit(finished.accuracies[-1][1] < options.target)


def plot(run: Run) -> None:
    """Draw accuracy by version into the run's folder, if matplotlib is installed."""
    try:
        from matplotlib import pyplot
    except ModuleNotFoundError:
        print("no plot, since matplotlib is not installed: pip install matplotlib")
        return
    pyplot.switch_backend("agg")
    pyplot.plot(*zip(*run.accuracies, strict=True))
    pyplot.xlabel("version of the weights")
    pyplot.ylabel("share of held-out sums answered rightly")
    pyplot.ylim(0, 1)
    pyplot.savefig(run.path.with_name("accuracy.png"))
    print(f"plot: {run.path.with_name('accuracy.png')}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("role", nargs="?", choices=["generate", "verify", "learn"])
    parser.add_argument("address", nargs="?", help="HOST:PORT of the server of a role")
    parser.add_argument("--folder", type=Path, default=Path("runs/addition"))
    parser.add_argument("--seed", type=int, default=0, help="of a new run")
    parser.add_argument("--versions", type=int, default=600, help="at which the run ends")
    parser.add_argument("--target", type=float, default=0.6, help="accuracy at which it ends")
    parser.add_argument("--generators", type=int, default=2, help="processes of this program")
    options = parser.parse_args()
    if (options.role is None) != (options.address is None):
        parser.error("a role needs the address of its server, such as `learn localhost:50051`")
    if options.role == "generate":
        generate(options.address)
    elif options.role == "verify":
        verify(options.address)
    elif options.role == "learn":
        learn(options.address, options.folder, options.seed, options.versions, options.target)
    else:
        run(options)


if __name__ == "__main__":
    main()
