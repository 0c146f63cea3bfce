"""A process that has imported commands of ours, and makes copies of itself that run one each.

Usage: python -P warmed_process.py SOCKET MODULE...; started and asked by `support.warm_start`.
"""

import gc
import importlib
import json
import os
import signal
import socket
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

MESSAGE_BYTES = 1 << 18
STANDARD_FILES = 3
ENTRY = "breadbox.cli.main"


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    # Ctrl-C in the terminal is for the tests, and for the copies.
    interrupted = signal.signal(signal.SIGINT, signal.SIG_IGN)
    entry = importlib.import_module(ENTRY)
    for name in sys.argv[2:]:
        importlib.import_module(name)
    # A thread would be missing in the copies, a file would be closed in them.
    assert 1 == len(os.listdir("/proc/self/task")), os.listdir("/proc/self/task")
    gc.collect()
    gc.freeze()
    while True:
        text, files, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, STANDARD_FILES)
        if not text:
            return
        if _is_copy(connection):
            break
        for each in files:
            os.close(each)
    signal.signal(signal.SIGINT, interrupted)
    _become(json.loads(text), files, entry)


def _is_copy(connection: socket.socket) -> bool:
    """Copy this process. In the copy, true, once it is a child of the process that asked.

    Orphans go to the nearest ancestor that asked the kernel for them: the copy's parent ends at
    once, and the process that asked for the copy has asked for orphans, too, until it is told.
    """
    wait, go = os.pipe()
    between = os.fork()
    if between == 0:
        copy = os.fork()
        if copy:
            connection.send(str(copy).encode())
            os._exit(0)
        os.close(go)
        os.read(wait, 1)
        return True
    os.waitpid(between, 0)
    connection.send(b"adopted")
    os.close(wait)
    os.close(go)
    return False


def _become(command: dict[str, Any], files: list[int], entry: ModuleType) -> None:
    """Take over what a new process of the command would have, and run it."""
    if command["start_new_session"]:
        os.setsid()
    for number, each in enumerate(files):
        os.dup2(each, number)
    os.closerange(STANDARD_FILES, max(map(int, os.listdir("/proc/self/fd"))) + 1)
    os.environ.clear()
    os.environ.update(command["environment"])
    os.chdir(command["folder"])
    if not command["is_safe_path"]:
        sys.path.insert(0, os.getcwd())
    sys.argv = [str(Path(str(entry.__file__)).resolve()), *command["arguments"]]
    sys.modules["__main__"] = entry
    entry.main()


if __name__ == "__main__":
    main()
