"""The loopback address of this machine."""

import ipaddress
import socket
from contextlib import suppress
from functools import cache
from typing import Final

_HOSTS: Final = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))


@cache
def loopback_host() -> str:
    """Return "127.0.0.1", or "[::1]" on a machine with an IPv6 loopback alone."""
    for family, host in _HOSTS:
        with suppress(OSError), socket.socket(family) as probe:
            probe.bind((host, 0))
            return f"[{host}]" if ":" in host else host
    return _HOSTS[0][1]


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach a host's address; of names, only localhost."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
