"""The process of a peer: does what it is told to by lines of JSON, and says how long that took.

Runs in the peer's own virtual environment, hence on numpy alone; `python -m bench.peers` starts it
by its module (`bench.peers.reverb` and so on), which ends with `main(Its())`. The lines are
`Order`s; each is answered by one line: nothing of it, or what was done and in what time.
"""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, TextIO, runtime_checkable

import numpy as np

HELD_BYTES = 512 * 2**20
"""Payload bytes that everybody holds of a workload: what memory costs is then the same for all."""
HELD_MAX = 4096
"""Fragments that everybody holds."""

_ANSWER = "answer: "
"""Begins the lines that are meant: libraries write to standard output, too."""


@dataclass(frozen=True)
class Order:
    """What to make ready (`is_ready` False: a few times unmeasured) or to do now."""

    kind: str
    workload: str
    arrays: list[tuple[str, list[int]]]
    """Type and shape of each array of a fragment."""
    group: int
    steps: int = 0
    """Calls, or batches; of a crowd nothing, since it works for a time."""
    seconds: float = 0.0
    processes: int = 0
    threads: int = 0
    is_ready: bool = False


class Caller(Protocol):
    """One user of a peer, for the fragments of one workload."""

    def append(self, count: int) -> None:
        """Put fragments in; return when the peer has said that they are in.

        Those beyond `held_max` leave, by the peer's own means where it has such.
        """

    def batch(self, count: int) -> None:
        """Take fragments out, stack each field of them, and let the peer forget them."""

    def close(self) -> None:
        """Leave."""


@runtime_checkable
class Streaming(Protocol):
    """A caller that has a writer which sends in the background."""

    def put(self) -> None:
        """Hand a fragment to the writer."""

    def flush(self) -> None:
        """Return when the peer has said that all that were handed over are in."""


class Peer(Protocol):
    """How a peer is started, and called."""

    def serve(self) -> AbstractContextManager[str]:
        """Start what it consists of; the block gets its address."""

    def call(self, address: str, workload: str, arrays: Sequence[np.ndarray]) -> Caller:
        """Make a user of it; may be called from any process of this machine."""


def main(peer: Peer) -> None:
    """Do what standard input says, until it ends; `crowd ADDRESS`: as one process of a crowd."""
    if sys.argv[1:2] == ["crowd"]:
        _crowd(peer, sys.argv[2])
        return
    with ExitStack() as stack:
        address = stack.enter_context(peer.serve())
        callers: dict[str, Caller] = {}
        crowds: dict[int, _Crowd] = {}
        _say(sys.stdout, None)
        for line in sys.stdin:
            order = Order(**json.loads(line))
            caller = callers.get(order.workload)
            if caller is None:
                caller = peer.call(address, order.workload, arrays_of(order))
                callers[order.workload] = caller
                stack.callback(caller.close)
            if order.kind in ("crowd", "streams"):
                if order.processes not in crowds:
                    crowds[order.processes] = stack.enter_context(_crowd_of(order, address))
                _say(sys.stdout, crowds[order.processes].tell(order))
            elif order.is_ready:
                _say(
                    sys.stdout, {"amount": order.steps * order.group, "seconds": _do(caller, order)}
                )
            else:
                # Appends find all as it is after as many of them, and batches find what they take.
                if order.kind == "batch":
                    _do(caller, replace(order, kind="append"))
                else:
                    _do(caller, order)
                _say(sys.stdout, None)


def held_max(fragment_bytes: int) -> int:
    """Fragments of a size that everybody holds."""
    return min(HELD_MAX, HELD_BYTES // fragment_bytes)


def arrays_of(order: Order) -> list[np.ndarray]:
    """Arrays of the given types and shapes, of random bytes."""
    rng = np.random.default_rng(0)
    arrays = []
    for dtype, shape in order.arrays:
        if np.dtype(dtype) == np.bool_:
            arrays.append(np.zeros(shape, np.bool_))
        else:
            data = rng.bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize)
            arrays.append(np.frombuffer(data, dtype).reshape(shape))
    return arrays


class Side:
    """Another process of this module's kind: a line goes to it, an answer comes back."""

    def __init__(
        self, command: Sequence[str], cwd: str | None = None, stderr: TextIO | None = None
    ) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=cwd,
        )
        self.pid = self._process.pid

    def tell(self, order: Order) -> None:
        """Send an order."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(order)) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        """Wait for the answer.

        Raises:
            RuntimeError: The process ended instead.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_ANSWER):
                return json.loads(line[len(_ANSWER) :])
        raise RuntimeError(f"it ended with status {self._process.wait()}")

    def close(self, wait_s: float = 30.0) -> None:
        """Let it end; kill it where it does not."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


class _Crowd:
    """Processes with producers."""

    def __init__(self, members: Sequence[Side]) -> None:
        self._members = members

    def tell(self, order: Order) -> dict[str, float]:
        """Have all do the same at once; what they did together."""
        for member in self._members:
            member.tell(order)
        answers = [member.hear() for member in self._members]
        return {
            "amount": sum(each["amount"] for each in answers),
            "seconds": max(each["seconds"] for each in answers),
        }


@contextmanager
def _crowd_of(order: Order, address: str) -> Iterator[_Crowd]:
    spec = sys.modules["__main__"].__spec__
    assert spec is not None, "started by python -m"
    command = [sys.executable, "-m", spec.name, "crowd", address]
    members = [Side(command) for _ in range(order.processes)]
    try:
        yield _Crowd(members)
    finally:
        for member in members:
            member.close()


def _crowd(peer: Peer, address: str) -> None:
    callers: list[Caller] = []
    for line in sys.stdin:
        order = Order(**json.loads(line))
        if not callers:
            arrays = arrays_of(order)
            callers = [peer.call(address, order.workload, arrays) for _ in range(order.threads)]
        counts = [0] * len(callers)
        start = time.perf_counter()
        until = start + order.seconds * (1.0 if order.is_ready else 0.5)
        threads = [
            threading.Thread(target=_produce, args=(order.kind, caller, until, counts, number))
            for number, caller in enumerate(callers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        _say(sys.stdout, {"amount": sum(counts), "seconds": time.perf_counter() - start})
    for caller in callers:
        caller.close()


def _produce(kind: str, caller: Caller, until: float, counts: list[int], number: int) -> None:
    writer = _streaming(caller) if kind == "streams" else None
    while time.perf_counter() < until:
        if writer is None:
            caller.append(1)
        else:
            writer.put()
        counts[number] += 1
    if writer is not None:
        writer.flush()


def _do(caller: Caller, order: Order) -> float:
    start = time.perf_counter()
    if order.kind == "stream":
        writer = _streaming(caller)
        for _ in range(order.steps * order.group):
            writer.put()
        writer.flush()
    else:
        act = caller.append if order.kind == "append" else caller.batch
        for _ in range(order.steps):
            act(order.group)
    return time.perf_counter() - start


def _streaming(caller: Caller) -> Streaming:
    assert isinstance(caller, Streaming), "see `Contender.streams`"
    return caller


def _say(stream: TextIO, answer: object) -> None:
    stream.write(f"{_ANSWER}{json.dumps(answer)}\n")
    stream.flush()
