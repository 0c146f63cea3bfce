"""Two servers on one journal, of which one leads; each is started again when it has ended."""

import subprocess
import time
from collections.abc import Callable

import grpc

from breadbox_server.maintenance.probe import probe
from support.server_process import ServerProcess

LEADS_S = 45.0
"""Within which one of them has to lead once nothing is in the way."""
TAKEN = 2
"""Exit status of a server whose journal the other one took."""


class Servers:
    """A leader and its standby, by turns.

    Args:
        servers: Not started; each stands by where the other leads.
        wrong: Takes what is not as it must be.
    """

    def __init__(self, servers: list[ServerProcess], wrong: list[str]) -> None:
        self.servers = servers
        self._wrong = wrong

    @property
    def address(self) -> str:
        """Of all of them, as clients take it."""
        return ",".join(each.address for each in self.servers)

    def start(self) -> None:
        """Start them; the first leads."""
        self.servers[0].start(LEADS_S)
        for server in self.servers[1:]:
            server.start_standby()

    def kill(self) -> None:
        """Kill those that run, and let go of those that have ended."""
        for server in self.servers:
            server.end()

    def leader(self) -> ServerProcess:
        """The one that serves, once there is one."""
        give_up_at = time.monotonic() + LEADS_S
        while time.monotonic() < give_up_at:
            self.mend()
            for server in self.servers:
                if self._serves(server):
                    return server
            time.sleep(0.05)
        raise TimeoutError(f"nobody has led for {LEADS_S} s")

    def standby(self) -> ServerProcess:
        """The other one."""
        leader = self.leader()
        return next(each for each in self.servers if each is not leader)

    def again(self, server: ServerProcess, end: Callable[[], object]) -> None:
        """End one of them, and start it again a moment later."""
        end()
        server.start_standby(LEADS_S)

    def mend(self) -> None:
        """Start those again that have ended by themselves, which only a replaced one may."""
        for server in self.servers:
            status = server.poll()
            if status is None:
                continue
            if status != TAKEN:
                tail = server.log.read_text(errors="replace")[-500:]
                self._wrong.append(f"a server ended by itself with {status}: {tail}")
            try:
                server.wait()
            except subprocess.TimeoutExpired:
                self._wrong.append("a server that has ended is still there")
            server.start_standby(LEADS_S)

    def _serves(self, server: ServerProcess) -> bool:
        try:
            return server.is_running() and probe(server.probe_address, within_s=0.5)[0] == "SERVING"
        except grpc.RpcError:
            return False
