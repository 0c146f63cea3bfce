"""Check the health of a running server.

`python -m breadbox_server.maintenance.probe [--alive | --ready] [HOST:PORT]`

For health checks of containers and Kubernetes. Exit code 0: serving; 1: not serving, with the
reason on standard error; 2: no such option. `--alive` also accepts a standby, which must not be
restarted; `--ready` a standby that has read the journal, so the leader may end. The default address
is BREADBOX_LOCAL_SOCKET, where no certificate is needed, or else BREADBOX_LISTEN.
"""

import os
import sys
from collections.abc import Mapping
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from breadbox.shared.loopback import loopback_host
from breadbox_server.rpc.health import REASON_KEY, WARM_KEY

PROBE_S = 4.0
"""Seconds for one probe; below the 10 s of the images' health checks."""
ALIVE: Final = "--alive"
READY: Final = "--ready"
HELP: Final = "--help"
ANY_ADDRESS = {"0.0.0.0": loopback_host(), "[::]": "[::1]", "": loopback_host()}


def local_address(environment: Mapping[str, str]) -> str:
    """Return the address at which the server with these variables is reached on its own machine."""
    if path := environment.get("BREADBOX_LOCAL_SOCKET"):
        return f"unix:{path}"
    host, _, port = environment.get("BREADBOX_LISTEN", f"{loopback_host()}:50051").rpartition(":")
    return f"{ANY_ADDRESS.get(host, host)}:{port}"


def probe(address: str, within_s: float = PROBE_S) -> tuple[str, str]:
    """Return a server's status and its reason; raise RpcError without an answer in time."""
    status, details = _ask(address, within_s)
    return status, details.get(REASON_KEY, "")


def _ask(address: str, within_s: float) -> tuple[str, dict[str, str]]:
    # The server is beside the probe, even where `http_proxy` names a way to the web.
    with grpc.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),)) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        reply, call = check.with_call(
            health_pb2.HealthCheckRequest(), timeout=within_s, wait_for_ready=True
        )
        details = {name: str(value) for name, value in call.trailing_metadata() or ()}
    # A call that ended without its message says nothing: UNKNOWN.
    status = 0 if reply is None else reply.status
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(status)), details


def main(arguments: list[str]) -> int:
    """Probe once; return 0 if the server serves, or has the state that the arguments accept."""
    if HELP in arguments:
        sys.stdout.write(f"{__doc__}\n")
        return 0
    addresses = [each for each in arguments if each not in (ALIVE, READY)]
    if unknown := [each for each in addresses if each.startswith("-")]:
        sys.stderr.write(f"no option is named {unknown[0]}; {HELP} shows all\n")
        return 2
    address = addresses[0] if addresses else local_address(os.environ)
    try:
        status, details = _ask(address, PROBE_S)
    except grpc.RpcError as error:
        sys.stderr.write(f"{address} does not answer: {error.code().name}\n")
        return 1
    reason = details.get(REASON_KEY, "")
    is_enough = (ALIVE in arguments and bool(reason)) or (
        READY in arguments and details.get(WARM_KEY) == "true"
    )
    if status == "SERVING" or is_enough:
        return 0
    sys.stderr.write(f"{address} is {status}{': ' if reason else ''}{reason}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
