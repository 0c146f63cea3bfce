"""Commands of ours start as copies of a process that has imported them already.

Nearly all that `python -m breadbox.cli.main serve` computes until it serves is imports, and the
tests start hundreds of servers. Once installed, `subprocess` has such a command made by a process
that has the imports behind it, see `support.warmed_process`. The copy is a child of this process
like any other: its own id, files, environment, folder and exit status. Only its command line in
/proc is another's, and it has imported what a new process would import when it needs it: tests of
these start it anew, by `COLD` in its environment.

Commands whose environment changes the interpreter, or that need more than standard files, start
anew, and all do where there is no Linux.
"""

import atexit
import ctypes
import inspect
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.warmed_process import ENTRY, MESSAGE_BYTES

COLD = "TESTS_START_COLD"
"""Variable of the environment that has every command start anew."""
_SERVICE = (
    *("breadbox_server.main", "breadbox_server.journal.storage.redis_stream", "uvloop"),
    *("breadbox_server.maintenance.fsck", "breadbox.cli.commands.doctor"),
    *("breadbox.cli.commands.buffers", "breadbox.cli.commands.stats", "breadbox.client"),
)
_LEARNING = (
    *("breadbox_learner.app", "breadbox_rollout.app", "breadbox_rollout.acting.generator"),
    *("breadbox_learner.main", "breadbox_rollout.main", "gymnasium.envs.classic_control"),
    *("breadbox_console.main", "breadbox_console.app", "uvicorn"),
    "torch._dynamo",  # Imported by torch when the first optimizer is made.
)
MODULES = {
    **dict.fromkeys(("serve", "fsck", "doctor", "buffers", "stats", "explain"), _SERVICE),
    **dict.fromkeys(("learn", "rollout", "generate", "console"), _LEARNING),
}
"""What a process imports in advance, by command: two kinds of process, since torch takes long.

Not pyarrow, which starts a thread when it is imported.
"""
_OF_THE_INTERPRETER = (
    "PYTHON",
    "LD_",
    "MALLOC_",
    "GLIBC_",
    "LANG",
    "LC_",
    "OPENBLAS_",
    "OMP_",
    "TORCH_",  # TORCHINDUCTOR_CACHE_DIR is set by importing torchrl.
)
_PR_SET_CHILD_SUBREAPER = 36
_cold = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_signature = inspect.signature(_cold)
_libc = ctypes.CDLL(None, use_errno=True)
_lock = threading.Lock()
_own: dict[str, str] = {}
"""What the interpreter of this process was started with."""
_warmed: dict[Sequence[str], "Warmed"] = {}


class Warmed:
    """A process that has imported some modules, and starts copies of itself."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        script = str(Path(__file__).with_name("warmed_process.py"))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", script, str(theirs.fileno()), *modules],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, **_own},
                pass_fds=[theirs.fileno()],
            )

    def start(self, command: Mapping[str, Any], files: Sequence[int]) -> int:
        """Start a copy, a child of this process, and give its id."""
        with _orphans_are_adopted():
            socket.send_fds(self._connection, [json.dumps(command).encode()], files)
            started = self._connection.recv(MESSAGE_BYTES)
            if b"adopted" != self._connection.recv(MESSAGE_BYTES):
                raise ConnectionError("the warmed process has ended")
        return int(started)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def forget(self) -> None:
        """Leave it to the process that this one was forked from."""
        self._connection.close()

    def close(self) -> None:
        """End it; its copies go on."""
        self._connection.close()
        self._process.kill()
        self._process.wait()


@contextmanager
def _orphans_are_adopted() -> Iterator[None]:
    """Have what its parent leaves behind become a child of this process, inside the block."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def install() -> None:
    """Have `subprocess` start commands of ours warm, from now on and in this process."""
    if sys.platform == "linux" and COLD not in os.environ:
        _own.update(_interpreter(os.environ))
        subprocess.Popen._execute_child = _start  # type: ignore[attr-defined]
        os.register_at_fork(after_in_child=_forget)
        atexit.register(_close)


def begin() -> None:
    """Have the processes import now, beside the first tests, and not in the time of one."""
    if is_installed():
        with _lock:
            for modules in set(MODULES.values()) - set(_warmed):
                _warmed[modules] = Warmed(modules)


def is_installed() -> bool:
    """Whether commands of ours start warm."""
    return subprocess.Popen._execute_child is _start  # type: ignore[attr-defined]


def warmed() -> Iterable[Warmed]:
    """The processes that have been started for it."""
    return [*_warmed.values()]


def _start(process: Any, *arguments: Any) -> None:
    """Start a command, warm where that is the same to it; in the place of Popen's own method."""
    asked = _signature.bind(process, *arguments).arguments
    modules = _modules(asked)
    if not modules:
        _cold(process, *arguments)
        return
    pairs = (("p2cread", 0), ("c2pwrite", 1), ("errwrite", 2))
    files = [asked[name] if asked[name] != -1 else standard for name, standard in pairs]
    is_safe_path, following = _split(asked["args"])
    environment = os.environ if asked["env"] is None else asked["env"]
    command = {
        "arguments": following,
        "environment": {os.fsdecode(k): os.fsdecode(v) for k, v in environment.items()},
        "folder": os.fsdecode(asked["cwd"] or os.getcwd()),
        "is_safe_path": is_safe_path,
        "start_new_session": asked["start_new_session"],
    }
    try:
        process.pid = _copy(modules, command, files)
    except (OSError, ValueError):
        # What is wrong with this one, the new process says.
        _cold(process, *arguments)
        return
    process._child_created = True
    process._close_pipe_fds(*(asked[name] for name in _PIPES))


def _copy(modules: Sequence[str], command: Mapping[str, Any], files: Sequence[int]) -> int:
    """Start a copy of the process that has imported these modules, and give its id."""
    with _lock:
        warmed = _warmed.get(modules) or Warmed(modules)
        _warmed[modules] = warmed
        try:
            return warmed.start(command, files)
        except BaseException:
            # Also where a test's time is over: what it answers then would be taken for the next.
            _warmed.pop(modules).close()
            raise


_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
_NEEDED = {
    "executable": None,
    "preexec_fn": None,
    "pass_fds": (),
    "close_fds": True,
    "shell": False,
    "gid": None,
    "gids": None,
    "uid": None,
    "umask": -1,
    "process_group": -1,
}
"""Arguments of Popen that a copy takes over as they are by default, and not otherwise."""


def _split(arguments: Any) -> tuple[bool, list[str] | None]:
    """Whether the module path is safe, and what follows our entry; None: it is another command."""
    if isinstance(arguments, (str, bytes, os.PathLike)):
        return False, None
    given = [os.fsdecode(each) for each in arguments]
    is_safe_path = ["-P"] == given[1:2]
    head = [sys.executable, *(["-P"] if is_safe_path else []), "-m", ENTRY]
    return is_safe_path, given[len(head) :] if given[: len(head)] == head else None


def _modules(asked: Mapping[str, Any]) -> Sequence[str]:
    """What the process that this command can start from has imported; empty: it starts anew."""
    _, command = _split(asked["args"])
    environment = os.environ if asked["env"] is None else asked["env"]
    if not command or COLD in os.environ or _interpreter(environment) != _own:
        return ()
    if any(asked.get(name, value) != value for name, value in _NEEDED.items()):
        return ()
    return MODULES.get(command[0], ())


def _interpreter(environment: Mapping[str, str]) -> dict[str, str]:
    """What of an environment is read by the interpreter itself, or by libraries as they load."""
    return {
        name: text for name, text in environment.items() if name.startswith(_OF_THE_INTERPRETER)
    }


def _forget() -> None:
    for each in _warmed.values():
        each.forget()
    _warmed.clear()


def _close() -> None:
    for each in _warmed.values():
        each.close()
    _warmed.clear()
