"""The loopback address of this machine."""

import socket
from contextlib import suppress
from functools import cache
from typing import Final

_HOSTS: Final = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))


@cache
def loopback_host() -> str:
    """Return "127.0.0.1", or "[::1]" on a machine whose loopback has IPv6 alone."""
    for family, host in _HOSTS:
        with suppress(OSError), socket.socket(family) as probe:
            probe.bind((host, 0))
            return f"[{host}]" if ":" in host else host
    return _HOSTS[0][1]
