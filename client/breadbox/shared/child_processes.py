"""Start child processes with the right environment, and end them with their parent."""

import os
import sys
import threading
from collections.abc import Mapping

_PARENT = "BREADBOX_PARENT_PID"
_POLL_S = 0.2


def child_environment() -> dict[str, str]:
    """Return a child's environment: this one, with this module path, one thread unless set."""
    single = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**dict.fromkeys(single, "1"), **os.environ, "PYTHONPATH": path}


def owned_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a `breadbox` command that ends when this process has ended."""
    return {**environment, _PARENT: str(os.getpid())}


def end_with_parent() -> None:
    """End like on SIGTERM when the parent that the environment names has ended, even by SIGKILL."""
    parent = os.environ.pop(_PARENT, "")  # Removed, because children have another parent.
    if parent.isdecimal():
        threading.Thread(
            target=_end_after, args=(int(parent),), name="breadbox-parent", daemon=True
        ).start()


def _end_after(parent: int) -> None:
    import signal  # Imported here: every command loads this module, and few have such a parent.
    import time

    # Signals to the process are for threads that expect them.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)
