"""Ask a running server for its health.

`python -m breadbox_server.maintenance.probe [--alive | --ready] [HOST:PORT]`

For health checks of containers and Kubernetes. Exit code 0: serving; 1: not, and a line on standard
error says why. `--alive` also accepts a standby, which is not to be restarted; `--ready` one that
has read the journal, so that the leader may be ended. The default address is BREADBOX_LOCAL_SOCKET,
where no certificate is needed, else BREADBOX_LISTEN.
"""

import os
import sys
from collections.abc import Mapping
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from breadbox_server.rpc.health import REASON_KEY, WARM_KEY

PROBE_S = 4.0
"""Below the 10 s after which the images' health checks give up."""
ALIVE: Final = "--alive"
READY: Final = "--ready"
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "": "127.0.0.1"}


def local_address(environment: Mapping[str, str]) -> str:
    """Return the address of the server with these settings, as seen from its own machine."""
    if path := environment.get("BREADBOX_LOCAL_SOCKET"):
        return f"unix:{path}"
    host, _, port = environment.get("BREADBOX_LISTEN", "127.0.0.1:50051").rpartition(":")
    return f"{ANY_ADDRESS.get(host, host)}:{port}"


def probe(address: str, within_s: float = PROBE_S) -> tuple[str, str]:
    """Return a server's serving status, and why it does not serve; RpcError: none in `within_s`."""
    status, details = _ask(address, within_s)
    return status, details.get(REASON_KEY, "")


def _ask(address: str, within_s: float) -> tuple[str, dict[str, str]]:
    with grpc.insecure_channel(address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        reply, call = check.with_call(
            health_pb2.HealthCheckRequest(), timeout=within_s, wait_for_ready=True
        )
        details = {name: str(value) for name, value in call.trailing_metadata() or ()}
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)), details


def main(arguments: list[str]) -> int:
    """Probe once; 0 when it serves, or is what the arguments are content with."""
    addresses = [each for each in arguments if each not in (ALIVE, READY)]
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
