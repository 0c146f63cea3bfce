"""Environments of child processes, and their end with their parent."""

import os
import sys
import threading
from collections.abc import Mapping

_PARENT = "BREADBOX_PARENT_PID"
_LOOK_EVERY_S = 0.2


def child_environment() -> dict[str, str]:
    """Return a process's environment: ours, our module path, one thread unless set."""
    single = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**dict.fromkeys(single, "1"), **os.environ, "PYTHONPATH": path}


def owned_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a `breadbox` command that ends when this process has ended."""
    return {**environment, _PARENT: str(os.getpid())}


def end_with_parent() -> None:
    """End as on SIGTERM when the parent that the environment names has ended, even by SIGKILL."""
    parent = os.environ.pop(_PARENT, "")  # What this one starts in turn has another parent.
    if parent.isdecimal():
        threading.Thread(
            target=_end_after, args=(int(parent),), name="breadbox-parent", daemon=True
        ).start()


def _end_after(parent: int) -> None:
    import signal  # Every command has this module, and few such a parent.
    import time

    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY_S)
    os.kill(os.getpid(), signal.SIGTERM)
