"""Numbers of the shipped files that have to fit together: with each other, and with the code.

Each is right alone; what nobody sees is that one is longer than another that has to outlast it.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from breadbox.cli.logs import LogSettings
from breadbox.model.options import channel_options
from breadbox.model.sizes import parse_size_bytes
from breadbox.transport.heartbeat import AGE_S_MAX
from breadbox_rollout.settings import RolloutSettings
from breadbox_server import limits
from breadbox_server.access.credentials import ACL, write_secrets
from breadbox_server.base.jobs import CLOSE_S_MAX
from breadbox_server.main import END_S_MAX
from breadbox_server.rpc.leading import FLUSH_S_MAX, STOP_S_MAX
from breadbox_server.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
HELM = DEPLOY / "helm" / "breadbox"
VARIABLE = re.compile(r"\$\{\w+:-([^}]*)\}")
READ_BYTES_PER_S = 100e6
"""At which a Redis that starts reads its append-only file, on a slow disk."""
START_S = 20.0
"""In which its container is started, and found to be healthy."""
RESIDENT_BYTES = 2 * 60 * 2**20
"""Of a server without fragments (docs/deploy.md), and of its compactor."""


@dataclass(frozen=True)
class Shipped:
    """What one way to deploy says."""

    maxmemory_bytes: int
    redis_memory_bytes: int
    server_memory_bytes: int
    grace_s: dict[str, float]
    """Of redis, server, worker and learner, until each is killed."""
    server: dict[str, str]
    """Environment of the server."""
    learner: dict[str, str]
    start_script: str
    """Of Redis."""
    disk_bytes: int | None
    """For Redis' data; None: the host's."""


def size_bytes(text: Any) -> int:
    """A size as Redis, Compose or Kubernetes writes it: all of them mean powers of 1024."""
    number, unit = re.fullmatch(r"(\d+)\s*([kmgt]?)i?b?", str(text).lower()).groups()
    return int(parse_size_bytes(f"{number}{unit}iB" if unit else number))


def seconds(text: Any) -> float:
    return float(str(text).removesuffix("s"))


def of_compose() -> Shipped:
    text = VARIABLE.sub(r"\1", (ROOT / "docker-compose.yml").read_text())
    services = yaml.safe_load(text)["services"]
    names = {"redis": "redis", "server": "server", "worker": "rollout_worker", "learner": "learner"}
    return Shipped(
        maxmemory_bytes=size_bytes(services["redis"]["environment"]["REDIS_MAXMEMORY"]),
        redis_memory_bytes=size_bytes(services["redis"]["mem_limit"]),
        server_memory_bytes=size_bytes(services["server"]["mem_limit"]),
        grace_s={key: seconds(services[name]["stop_grace_period"]) for key, name in names.items()},
        server=services["server"]["environment"],
        learner=services["learner"]["environment"],
        start_script=(DEPLOY / "redis" / "start.sh").read_text(),
        disk_bytes=None,
    )


def of_kubernetes() -> Shipped:
    base = DEPLOY / "kubernetes" / "base"
    pods = {
        name: next(
            each
            for each in yaml.safe_load_all((base / f"{name}.yaml").read_text())
            if "template" in each.get("spec", {})
        )["spec"]
        for name in ("redis", "server", "rollout-worker", "learner")
    }

    def container(name: str) -> Any:
        return pods[name]["template"]["spec"]["containers"][0]

    def environment(name: str) -> dict[str, str]:
        return {each["name"]: each.get("value", "") for each in container(name)["env"]}

    (claim,) = pods["redis"]["volumeClaimTemplates"]
    return Shipped(
        maxmemory_bytes=size_bytes(environment("redis")["REDIS_MAXMEMORY"]),
        redis_memory_bytes=size_bytes(container("redis")["resources"]["limits"]["memory"]),
        server_memory_bytes=size_bytes(container("server")["resources"]["limits"]["memory"]),
        grace_s={
            key.removeprefix("rollout-"): pods[key]["template"]["spec"][
                "terminationGracePeriodSeconds"
            ]
            for key in pods
        },
        server=environment("server"),
        learner=environment("learner"),
        start_script=(base / "start.sh").read_text(),
        disk_bytes=size_bytes(claim["spec"]["resources"]["requests"]["storage"]),
    )


def of_helm() -> Shipped:
    """The values, and what the templates have as it is; Helm itself renders them elsewhere."""
    values = yaml.safe_load((HELM / "values.yaml").read_text())
    texts = {path.stem: path.read_text() for path in (HELM / "templates").glob("*.yaml")}

    def environment(name: str) -> dict[str, str]:
        return dict(re.findall(r'\{name: (\w+), value: "?([^"{}]+)"?\}', texts[name]))

    redis = values["store"]["redis"]
    return Shipped(
        maxmemory_bytes=size_bytes(redis["maxmemory"]),
        redis_memory_bytes=size_bytes(redis["resources"]["limits"]["memory"]),
        server_memory_bytes=size_bytes(values["server"]["resources"]["limits"]["memory"]),
        grace_s={
            key.removeprefix("rollout-"): float(
                re.findall(r"terminationGracePeriodSeconds: (\d+)", texts[key])[0]
            )
            for key in ("redis", "server", "rollout-worker", "learner")
        },
        server=environment("server")
        | {"BREADBOX_CAPACITY_BYTES": values["server"]["capacityBytes"]},
        learner=environment("learner"),
        start_script=(HELM / "files" / "start.sh").read_text(),
        disk_bytes=size_bytes(redis["storage"]),
    )


@pytest.fixture(params=[of_compose, of_kubernetes, of_helm], ids=["compose", "kubernetes", "helm"])
def shipped(request: pytest.FixtureRequest) -> Shipped:
    made: Shipped = request.param()
    return made


def default_of(settings: type[LogSettings], name: str) -> Any:
    return settings.model_fields[name].default


def test_buffers_fit_redis_and_redis_fits_its_container_and_its_disk(shipped: Shipped) -> None:
    capacity_bytes = size_bytes(shipped.server["BREADBOX_CAPACITY_BYTES"])

    # The share beyond which the server promises less than it was told, and warns.
    assert capacity_bytes <= 0.7 * shipped.maxmemory_bytes
    # For copies of pages while the append-only file is rewritten.
    assert shipped.maxmemory_bytes <= 0.7 * shipped.redis_memory_bytes
    if shipped.disk_bytes is not None:
        assert shipped.disk_bytes >= 2 * shipped.maxmemory_bytes


def test_what_callers_can_make_the_server_hold_fits_its_memory(shipped: Shipped) -> None:
    held_bytes = (
        RESIDENT_BYTES
        + limits.UNTAKEN_BYTES_OF["all"]
        + limits.INLINE_PENDING_BYTES_MAX
        + limits.INLINE_RECENT_BYTES_MAX
        + limits.ARRIVALS_MAX * limits.MESSAGE_BYTES_MAX
        + limits.GATEWAY_CALLS_MAX * 2 * limits.PART_BYTES
    )

    assert held_bytes <= 0.75 * shipped.server_memory_bytes


def test_a_learner_waits_for_longer_than_redis_is_restarted(shipped: Shipped) -> None:
    read_s = size_bytes(shipped.server["BREADBOX_CAPACITY_BYTES"]) / READ_BYTES_PER_S
    restart_s = shipped.grace_s["redis"] + START_S + read_s

    assert restart_s <= seconds(shipped.learner["BREADBOX_RECONNECT_S"])


def test_a_learner_that_waits_is_not_taken_for_one_that_hangs(shipped: Shipped) -> None:
    reconnect_s = seconds(shipped.learner["BREADBOX_RECONNECT_S"])

    assert reconnect_s < seconds(shipped.learner.get("BREADBOX_HEARTBEAT_S", AGE_S_MAX))


def test_each_process_ends_by_itself_before_it_is_killed(shipped: Shipped) -> None:
    server_s = default_of(Settings, "drain_grace_s")
    assert STOP_S_MAX + FLUSH_S_MAX + 3 * CLOSE_S_MAX < END_S_MAX
    # An end that hangs says where, and is broken off.
    assert server_s + END_S_MAX < shipped.grace_s["server"]
    # Fragments, reports of episodes, the watch of the model and environments end one after another.
    worker_s = 2 * default_of(RolloutSettings, "drain_s") + 2 * 5.0
    assert worker_s < shipped.grace_s["worker"]
    assert shipped.grace_s["learner"] >= 60


def test_clients_ping_no_more_often_than_the_server_takes() -> None:
    """Twice as seldom: one that was late on its way is followed by one that comes the sooner."""
    for address, is_one_of_many in (("server:1", False), ("one:1", True), ("dns:///a:1", False)):
        options = dict(channel_options(address, is_one_of_many=is_one_of_many))
        assert options["grpc.keepalive_time_ms"] >= 2_000 * limits.PING_INTERVAL_S_MIN, address


def test_redis_reads_its_file_as_a_user_that_may_and_lets_nobody_in_as_that_one(
    shipped: Shipped, tmp_path: Path
) -> None:
    write_secrets(tmp_path, "redis:6379")

    assert "user default off ~* &* +@all" in (tmp_path / ACL).read_text().splitlines()
    assert "aclfile" in shipped.start_script
    assert "appendonly yes" in (DEPLOY / "redis" / "redis.conf").read_text()
