"""Make a client from the environment variables of every command line."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypedDict

from breadbox.model.errors import InvalidRequestError

if TYPE_CHECKING:
    from breadbox.client import Client
    from breadbox.model.options import Tls

DEFAULT_SERVER = "localhost:50051"


class Settings(TypedDict):
    """Arguments of `breadbox.connect`."""

    address: str
    buffer: str
    tls: "Tls | None"
    token: str | None
    store_url: str | None


_TRUE = frozenset({"1", "true", "t", "yes", "y", "on"})
_FALSE = frozenset({"", "0", "false", "f", "no", "n", "off"})


def connect_from_environment(
    *,
    server: str | None = None,
    buffer: str | None = None,
    reconnect_s: float = 30.0,
    environment: Mapping[str, str] = os.environ,
) -> "Client":
    """Return a client as `breadbox.connect` does. Arguments that are None come from variables.

    Reads `BREADBOX_SERVER` (HOST:PORT, several with commas; else localhost:50051),
    `BREADBOX_BUFFER`, `BREADBOX_TOKEN` (bearer token, or `@FILE`), `BREADBOX_TLS` (1: encrypt),
    `BREADBOX_TLS_CA`, `BREADBOX_TLS_CERT`, `BREADBOX_TLS_KEY` (PEM files; naming one encrypts) and
    `BREADBOX_STORE_URL` (the payload store as seen from here).

    Raises:
        InvalidRequestError: A value is malformed, or a certificate cannot be read.
    """
    # A command's help, which names the default address, needs no gRPC.
    from breadbox.client import connect

    settings = settings_from_environment(server, buffer, environment)
    return connect(reconnect_s=reconnect_s, **settings)


def settings_from_environment(
    server: str | None, buffer: str | None, environment: Mapping[str, str] = os.environ
) -> "Settings":
    """Return arguments of `breadbox.connect` and `breadbox.aio.connect` from variables.

    Raises as `connect_from_environment` does, which says which variables.
    """
    return {
        "address": server or environment.get("BREADBOX_SERVER") or DEFAULT_SERVER,
        "buffer": buffer or environment.get("BREADBOX_BUFFER") or "default",
        "tls": _tls(environment),
        "token": environment.get("BREADBOX_TOKEN") or None,
        "store_url": environment.get("BREADBOX_STORE_URL") or None,
    }


def seconds_from_environment(
    name: str, environment: Mapping[str, str] = os.environ
) -> float | None:
    """Return a number of seconds, or None if the variable is not set or empty."""
    text = environment.get(name, "").strip()
    try:
        return float(text) if text else None
    except ValueError:
        raise InvalidRequestError(name, f"must be a number of seconds, got {text!r}") from None


def _tls(environment: Mapping[str, str]) -> "Tls | None":
    from breadbox.model.options import Tls

    files = [environment.get(f"BREADBOX_TLS_{name}") or None for name in ("CA", "CERT", "KEY")]
    wanted = environment.get("BREADBOX_TLS", "").strip().lower()
    if wanted not in _TRUE | _FALSE:
        raise InvalidRequestError("BREADBOX_TLS", f"must be 1 or 0, got {wanted!r}")
    return Tls(*files) if wanted in _TRUE or any(files) else None
