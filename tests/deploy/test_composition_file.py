"""docker-compose.yml and what stands beside it, without an engine."""

import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.command_options import command_options

ROOT = Path(__file__).resolve().parents[2]
SECRETS_SCRIPT = ROOT / "deploy" / "compose" / "secrets.sh"
DOCKERFILES = sorted(ROOT.glob("*/Dockerfile"))
VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")


def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())[
        "services"
    ]
    return found


def example_settings() -> dict[str, str]:
    lines = (ROOT / ".env.example").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def test_every_setting_has_a_line_with_its_default_in_the_example() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    used = dict(VARIABLE.findall(text))

    assert used == {
        name: value for name, value in example_settings().items() if name != "COMPOSE_PROFILES"
    }


def test_a_setting_has_the_same_default_wherever_it_is_used() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    defaults: dict[str, set[str]] = {}
    for name, default in VARIABLE.findall(text):
        defaults.setdefault(name, set()).add(default)

    assert {} == {name: values for name, values in defaults.items() if len(values) > 1}


def test_settings_are_options_of_the_command_that_runs() -> None:
    for name, service in services().items():
        given = {key for key in service.get("environment", {}) if key.startswith("BREADBOX_")}
        if given:
            command = service["command"][0]
            if "entrypoint" in service:
                assert given <= set(re.findall(r"BREADBOX_\w+", SECRETS_SCRIPT.read_text()))
                continue
            assert given <= command_options(command), f"{name} sets what {command} does not read"


def test_ports_are_published_on_the_loopback_address_only() -> None:
    published = [port for service in services().values() for port in service.get("ports", [])]

    assert [] == [port for port in published if not port.startswith("127.0.0.1:")]
    assert published


def test_every_container_is_confined() -> None:
    """What may be written is a volume or in memory; capabilities are those that are named here."""
    added = {name: service.get("cap_add", []) for name, service in services().items()}
    for name, service in services().items():
        assert service.get("read_only") is True, name
        assert ["ALL"] == service.get("cap_drop"), name
        assert ["no-new-privileges:true"] == service.get("security_opt"), name

    assert {"redis": ["CHOWN", "DAC_OVERRIDE", "SETGID", "SETUID"]} == {
        name: names for name, names in added.items() if names
    }


def test_every_container_has_a_bound_of_memory_and_processes() -> None:
    for name, service in services().items():
        assert service.get("mem_limit"), name
        assert service.get("pids_limit"), name


def test_nothing_secret_is_a_setting() -> None:
    """Else somebody's default would be everybody's password."""
    text = (ROOT / "docker-compose.yml").read_text() + (ROOT / ".env.example").read_text()

    assert [] == re.findall(r"\w*(?:PASSWORD|SECRET|TOKEN)\w*=", text)
    for name, service in services().items():
        for key, value in service.get("environment", {}).items():
            if re.search(r"PASSWORD|SECRET|TOKEN|STORE", key):
                assert str(value).lstrip("@").startswith("/secrets/"), (name, key)


def test_each_service_mounts_the_secrets_of_one_reader_and_can_change_none() -> None:
    mounted = {
        name: [volume for volume in service.get("volumes", []) if "/secrets/" in volume]
        for name, service in services().items()
        if name != "secrets"
    }
    for name, volumes in mounted.items():
        assert all(volume.endswith(":ro") for volume in volumes), name
    readers = {
        name: [volume.split("/")[2].split(":")[0] for volume in volumes]
        for name, volumes in mounted.items()
    }
    expected = {"redis": ["redis"], "server": ["server"], "standby": ["server"], "prometheus": []}
    expected["grafana"] = ["dashboards"]
    expected["console"] = ["viewer"]
    for name in services():
        for prefix, reader in (
            *(("rollout_worker", "producer"), ("learner", "learner"), ("buffer", "admin")),
        ):
            if name.startswith(prefix):
                expected[name] = [reader]
    assert expected == readers


def test_prometheus_finds_every_worker_where_it_serves_its_metrics() -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    (job,) = [each for each in config["scrape_configs"] if each["job_name"] == "rollout"]
    (found,) = job["dns_sd_configs"]
    workers = {
        name: each for name, each in services().items() if each.get("command") == ["rollout"]
    }

    assert {*found["names"]} == {*workers}
    assert {f"0.0.0.0:{found['port']}"} == {
        each["environment"]["BREADBOX_METRICS_LISTEN"] for each in workers.values()
    }
    assert {"service"} <= {*services()["prometheus"]["networks"]}
    assert all("service" in each["networks"] for each in workers.values())
    # A worker that went is no server that is down.
    alerts = (ROOT / "deploy/prometheus/alerts.yml").read_text()
    jobs = re.findall(r'job=~"([^"]+)"', alerts)
    assert jobs
    assert not any(re.fullmatch(each, job["job_name"]) for each in jobs)


def test_a_later_up_keeps_the_number_of_workers_as_the_page_says() -> None:
    """A number by `--scale` lasts until the next `up`; no recipe but that of a profile has one."""
    page = (ROOT / "docs/operate.md").read_text()
    scaled = [line for line in page.splitlines() if "compose" in line and "--scale" in line]

    assert "`BREADBOX_WORKERS=4` in `.env`" in page
    assert [] == [line for line in scaled if "--profile" not in line and "next `up`" not in line]
    for name, service in services().items():
        if name in ("rollout_worker", "rollout_worker_atari"):
            assert "${BREADBOX_WORKERS:-2}" == service["scale"]


def test_what_cannot_be_had_everywhere_sits_behind_a_profile() -> None:
    default = {name for name, service in services().items() if "profiles" not in service}

    assert {"secrets", "redis", "server", "rollout_worker", "learner", "prometheus"} == default


def test_the_other_server_is_as_the_first_but_for_its_ports_and_clients_know_the_name_of_both() -> (
    None
):
    found = services()
    server, standby = found["server"], found["standby"]
    own = {"ports": None, "profiles": None}
    assert server | own == standby | own
    assert ["ha"] == standby["profiles"]
    assert not set(server["ports"]) & set(standby["ports"])
    (name,) = server["networks"]["service"]["aliases"]
    clients = {
        each["environment"]["BREADBOX_SERVER"]
        for each in found.values()
        if "BREADBOX_SERVER" in each.get("environment", {})
    }
    assert {f"dns:///{name}:50051"} == clients
    # Whoever is second is no reason to hold up those who wait for a server.
    assert "--alive" in server["healthcheck"]["test"]


def test_only_those_that_move_payloads_are_on_the_stores_network() -> None:
    on_store = {
        name for name, service in services().items() if "store" in service.get("networks", [])
    }

    assert not {"prometheus", "grafana"} & on_store
    assert ["store"] == services()["redis"]["networks"]


def test_no_secret_stands_in_a_command_line() -> None:
    for service in services().values():
        assert "PASSWORD" not in str(service.get("command", ""))
        assert "PASSWORD" not in str(service.get("entrypoint", ""))


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.parent.name)
def test_an_image_has_a_pinned_base_and_does_not_run_as_root(path: Path) -> None:
    lines = path.read_text().splitlines()

    base = "FROM ${PYTHON_IMAGE}"
    assert [f"{base} AS build", base] == [one for one in lines if one.startswith("FROM")]
    assert f"ARG PYTHON_IMAGE={example_settings()['BREADBOX_PYTHON_IMAGE']}" in lines
    assert "USER breadbox" in lines
    assert "HEALTHCHECK" in path.read_text()


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.parent.name)
def test_an_image_installs_dependencies_before_it_takes_the_source(path: Path) -> None:
    text = path.read_text()

    dependencies, ours = text.index("-r requirements.txt"), text.index("./*.whl\n")
    assert text.index("COPY --from=build /out/requirements.txt .") < dependencies < ours


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.parent.name)
def test_all_that_an_image_installs_but_torch_has_a_hash(path: Path) -> None:
    text = path.read_text().replace("\\\n", " ")
    commands = re.findall(r"pip install (.*)", text)
    unlocked = [one for one in commands if "--require-hashes" not in one]

    assert 2 == len(commands) - len(unlocked)
    assert {"-q --no-deps ./*.whl"} == {one for one in unlocked if "torch" not in one}


def test_every_image_of_others_and_every_base_can_be_pinned_by_its_digest() -> None:
    """Where nobody looks for updates, or must know what runs: one line each of .env."""
    images = {name: service["image"] for name, service in services().items()}
    foreign = {name: each for name, each in images.items() if not each.startswith("breadbox/")}
    pinned = {
        name: re.fullmatch(r"\$\{BREADBOX_(\w+)_IMAGE:-\S+:\S+\}", each)
        for name, each in foreign.items()
    }
    assert {name: name.upper() for name in foreign} == {
        name: match and match[1] for name, match in pinned.items()
    }
    bases = [
        service["build"]["args"]["PYTHON_IMAGE"]
        for service in services().values()
        if "build" in service
    ]
    assert len(bases) == len(images) - len(foreign)
    assert {"${BREADBOX_PYTHON_IMAGE:-python:3.11-slim-bookworm}"} == set(bases)


def test_there_is_one_image_per_deployable() -> None:
    assert ["learner", "rollout_worker", "server"] == [path.parent.name for path in DOCKERFILES]


def test_a_restarted_learner_goes_on_with_a_run_of_its_own() -> None:
    """In a volume, and no two learners in one folder."""
    learners = {name: each for name, each in services().items() if each.get("command") == ["learn"]}
    folders = [each["environment"]["BREADBOX_RUN_DIR"] for each in learners.values()]

    assert 3 == len(set(folders))
    for name, learner in learners.items():
        assert "true" == learner["environment"]["BREADBOX_RESUME"], name
        # A run that has reached its target ends again; another name starts another one.
        assert learner["environment"]["BREADBOX_RUN_DIR"].endswith("/${BREADBOX_RUN:-}"), name
        (volume,) = [each for each in learner["volumes"] if "/secrets/" not in each]
        assert learner["environment"]["BREADBOX_RUN_DIR"].startswith(volume.partition(":")[2]), name


def test_the_health_check_of_the_console_passes_the_proxy_by_that_docker_injects() -> None:
    command = services()["console"]["healthcheck"]["test"]
    assert command[:3] == ["CMD", "python", "-c"]

    class Session(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/api/session" else 404)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Session) as console:
        thread = threading.Thread(target=console.serve_forever)
        thread.start()
        code = command[3].replace("8400", str(console.server_port))
        proxies = dict.fromkeys(("http_proxy", "HTTP_PROXY"), "http://127.0.0.1:1")
        healthy = subprocess.call([sys.executable, "-c", code], env={**os.environ, **proxies})
        sick_code = code.replace("/api/session", "/api/other")
        sick = subprocess.call([sys.executable, "-c", sick_code], env=dict(os.environ))
        console.shutdown()
        thread.join()
    assert (healthy, sick) == (0, 1)
