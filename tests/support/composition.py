"""The containers of docker-compose.yml, under a project name and on ports of their own."""

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BUILD_S_MAX = 900.0
COMMAND_S_MAX = 180.0
PORTS = (
    "BREADBOX_PORT",
    "BREADBOX_METRICS_PORT",
    "BREADBOX_STANDBY_PORT",
    "BREADBOX_STANDBY_METRICS_PORT",
    "BREADBOX_REDIS_PORT",
    "BREADBOX_PROMETHEUS_PORT",
)


def compose_command() -> list[str] | None:
    """What starts Compose here: the engine's plug-in, the older program, or nothing."""
    if shutil.which("docker") is None:
        return None
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) is None:
            continue
        done = subprocess.run([*command, "version"], capture_output=True, check=False, timeout=30)
        if done.returncode == 0:
            return command
    return None


def missing_engine() -> str:
    """Why no containers can be started here; empty when they can."""
    if shutil.which("docker") is None:
        return "docker is not installed"
    done = subprocess.run(["docker", "info"], capture_output=True, check=False, timeout=30)
    if done.returncode != 0:
        return "no Docker engine answers"
    if compose_command() is None:
        return "neither `docker compose` nor docker-compose is installed"
    return ""


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


class Composition:
    """One running docker-compose.yml.

    Args:
        overrides: Settings of .env.example to change.
    """

    def __init__(self, overrides: dict[str, str]) -> None:
        command = compose_command()
        assert command is not None
        self.project = f"breadboxtest{secrets.token_hex(4)}"
        ports = _free_ports(len(PORTS))
        self._ports = dict(zip(PORTS, ports, strict=True))
        self._command = [*command, "--project-name", self.project]
        self._environment = {
            **os.environ,
            **{name: str(port) for name, port in self._ports.items()},
            "BREADBOX_TAG": self.project,
            "COMPOSE_PROFILES": "",
            **overrides,
        }

    @property
    def address(self) -> str:
        """Of the server, from this host."""
        return f"127.0.0.1:{self._ports['BREADBOX_PORT']}"

    @property
    def addresses(self) -> str:
        """Of the server and of the profile `ha`'s other one, from this host."""
        return self._environment_of("env", "ha")["BREADBOX_SERVER"]

    @cached_property
    def environment(self) -> dict[str, str]:
        """What a person's command line needs, as `make env` prints it."""
        return self._environment_of("env")

    def _environment_of(self, *command: str) -> dict[str, str]:
        printed = self.compose("run", "--rm", "--no-deps", "-T", "secrets", *command)
        lines = [line for line in printed.splitlines() if line.startswith("export ")]
        return dict(line.removeprefix("export ").split("=", 1) for line in lines)

    @property
    def store_url(self) -> str:
        """Of the payload store, from this host."""
        return self.environment["BREADBOX_STORE_URL"]

    @property
    def token(self) -> str:
        """An administrator's."""
        return self.environment["BREADBOX_TOKEN"]

    def secrets(self) -> list[str]:
        """Every token and every password that was made."""
        printed = self.compose(
            *("run", "--rm", "--no-deps", "-T", "--entrypoint", "sh", "secrets", "-c"),
            "cat /secrets/*/token /secrets/*/password /secrets/server/config.yml",
        )
        found = re.findall(r"bbx_[\w-]{43}|[0-9a-f]{48}", printed)
        assert len(found) == 8, len(found)
        return found

    def compose(self, *arguments: str, within_s: float = COMMAND_S_MAX, **settings: str) -> str:
        """Run one Compose command, with other settings of .env.example; its output.

        Raises:
            AssertionError: It failed; the message ends with what it said.
        """
        return self._run([*self._command, *arguments], within_s, settings)

    def docker(self, *arguments: str) -> str:
        """Run one docker command; its output."""
        return self._run(["docker", *arguments], COMMAND_S_MAX)

    def _run(
        self, command: Sequence[str], within_s: float, settings: Mapping[str, str] | None = None
    ) -> str:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**self._environment, **(settings or {})},
            capture_output=True,
            text=True,
            check=False,
            timeout=within_s,
        )
        said = f"{done.stdout}\n{done.stderr}"
        assert done.returncode == 0, f"{' '.join(command)} failed:\n{said[-4000:]}"
        return done.stdout

    def build(self) -> None:
        """Build the images of the default services."""
        self.compose("build", within_s=BUILD_S_MAX)

    def up(self, *services: str) -> None:
        """Start services, all of them by default, and return once they are started."""
        self.compose("up", "--detach", "--no-build", *services)

    def down(self) -> None:
        """Stop and delete everything of this project but the images. Idempotent."""
        self.compose("--profile", "ha", "down", "--volumes", "--remove-orphans")

    def remove_images(self) -> None:
        """Delete the images that `build` tagged; their layers stay in the engine's cache."""
        tagged = self.docker(
            "images",
            "--format={{.Repository}}:{{.Tag}}",
            f"--filter=reference=breadbox/*:{self.project}",
        )
        # By name: an engine refuses to delete by id what a container of another name runs.
        if names := tagged.split():
            self.docker("image", "rm", "--no-prune", "--force", *names)

    def logs(self, service: str) -> str:
        """What a service has said so far."""
        return self.compose("logs", "--no-color", service)

    def container(self, service: str) -> str:
        """Id of a service's first container."""
        return self.compose("ps", "--quiet", service).split()[0]

    def containers(self, service: str) -> list[str]:
        """Ids of all containers of a service."""
        return self.compose("ps", "--quiet", service).split()

    def inspect(self, service: str) -> dict[str, Any]:
        """What the engine knows of a service's first container."""
        found: dict[str, Any] = json.loads(self.docker("inspect", self.container(service)))[0]
        return found

    def is_healthy(self, service: str) -> bool:
        """Whether the service's own health check passes now."""
        state = self.inspect(service)["State"]
        return bool(state.get("Health", {}).get("Status") == "healthy")

    def stands_by(self, service: str) -> str:
        """Why a server does not serve; empty: it does."""
        status: str = self.inspect(service)["State"]["Status"]
        if status != "running":
            return status
        script = "python -m breadbox_server.maintenance.probe 2>&1 || :"
        return self.docker("exec", self.container(service), "sh", "-c", script).strip()

    def kill(self, service: str) -> None:
        """Kill a service with SIGKILL, as a crash or the kernel would."""
        self.docker("kill", "--signal=KILL", self.container(service))

    def start(self, service: str) -> None:
        """Start a service that was killed."""
        self.compose("start", service)

    def query(self, promql: str) -> list[dict[str, Any]]:
        """Instant vector that Prometheus has for a query."""
        found: list[dict[str, Any]] = self._prometheus("query", {"query": promql})["result"]
        return found

    def rules(self) -> list[dict[str, Any]]:
        """Alert rules as Prometheus runs them."""
        groups = self._prometheus("rules", {})["groups"]
        return [rule for group in groups for rule in group["rules"] if rule["type"] == "alerting"]

    def _prometheus(self, what: str, arguments: dict[str, str]) -> dict[str, Any]:
        address = f"http://127.0.0.1:{self._ports['BREADBOX_PROMETHEUS_PORT']}/api/v1/{what}"
        with urllib.request.urlopen(
            f"{address}?{urllib.parse.urlencode(arguments)}", timeout=10
        ) as reply:
            answer = json.load(reply)
        assert answer["status"] == "success", answer
        data: dict[str, Any] = answer["data"]
        return data

    def metrics(self) -> str:
        """The server's own metrics page."""
        port = self._ports["BREADBOX_METRICS_PORT"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
            text: str = reply.read().decode()
        return text

    def leftovers(self) -> list[str]:
        """Containers, volumes and networks of this project that still exist."""
        label = f"label=com.docker.compose.project={self.project}"
        found = [
            *self.docker("ps", "--all", "--quiet", "--filter", label).split(),
            *self.docker("volume", "ls", "--quiet", "--filter", label).split(),
            *self.docker("network", "ls", "--quiet", "--filter", label).split(),
        ]
        return sorted(found)
