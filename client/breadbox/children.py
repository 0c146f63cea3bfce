"""What processes that a worker or a learner starts inherit from it."""

import os
import sys


def child_environment() -> dict[str, str]:
    """Return the environment of a process: our own, our module path, and one thread.

    What we can import the process can too; and libraries that would start a thread for every core
    of the machine do not, unless the user says so.
    """
    single = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**dict.fromkeys(single, "1"), **os.environ, "PYTHONPATH": path}
