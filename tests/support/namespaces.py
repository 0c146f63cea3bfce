"""Commands in network and mount namespaces of their own, which change nothing of this machine."""

import functools
import subprocess
import sys
from collections.abc import Mapping

import pytest

_ALONE = """
import fcntl, os, socket, struct, sys
with socket.socket() as tool:
    up = struct.pack("16sh", b"lo", 0x41)  # IFF_UP | IFF_RUNNING
    fcntl.ioctl(tool, 0x8914, up)  # SIOCSIFFLAGS
    none = struct.pack("16sH14s", b"lo", socket.AF_INET, bytes(14))
    fcntl.ioctl(tool, 0x8916, none)  # SIOCSIFADDR: no IPv4 address
with socket.socket(socket.AF_INET6) as probe:
    probe.bind(("::1", 0))
os.execvp(sys.argv[1], sys.argv[1:])
"""


def with_ipv6_alone(*command: str) -> list[str]:
    """A command line that runs another where the loopback has ::1, and no 127.0.0.1."""
    return ["unshare", "--net", sys.executable, "-c", _ALONE, *command]


def with_own_mounts(*command: str) -> list[str]:
    """A command line that runs another whose mounts nobody else sees."""
    return ["unshare", "--mount", "--propagation", "private", *command]


@functools.cache
def _why_not(prefix: tuple[str, ...]) -> str:
    try:
        done = subprocess.run([*prefix], capture_output=True, text=True, timeout=30, check=False)
    except OSError as error:
        return str(error)
    return done.stderr.strip() if done.returncode else ""


def run_or_skip(
    command: list[str], *, environment: Mapping[str, str], within_s: float
) -> subprocess.CompletedProcess[str]:
    """Run such a command line to its end; skip the test where there may be no namespaces."""
    plain = with_ipv6_alone("true") if "--net" in command else with_own_mounts("true")
    if reason := _why_not(tuple(plain)):
        pytest.skip(f"no namespace for this test: {reason.splitlines()[-1]}")
    return subprocess.run(
        command,
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=within_s,
        check=False,
    )
