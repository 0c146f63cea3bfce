"""The Kubernetes manifests: as Kubernetes' own schemas want them, and wired to one another.

A schema does not see what breaks silently: a selector that selects nothing, a port, volume, secret
or setting that nobody has, a metric that nobody records.
"""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from breadbox.model.options import ClientOptions, channel_options
from breadbox_server.access.credentials import TOKENS, write_secrets
from breadbox_server.maintenance.probe import ALIVE, READY
from support.command_options import command_options

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "deploy" / "kubernetes" / "base"
GPU = ROOT / "deploy" / "kubernetes" / "gpu"
Manifest = dict[str, Any]
CERTIFICATE_SECRET = "breadbox-server-tls"
"""Made by cert-manager or by hand, not by kustomize."""
KUBERNETES_VERSIONS = ("1.27", "newest")
"""The oldest that the manifests are meant for, and the newest whose schemas are at hand."""


def kustomization(folder: Path = BASE) -> Manifest:
    found: Manifest = yaml.safe_load((folder / "kustomization.yaml").read_text())
    return found


def manifests() -> list[Manifest]:
    return [
        document
        for name in kustomization()["resources"]
        for document in yaml.safe_load_all((BASE / name).read_text())
    ]


def workloads() -> Iterator[tuple[Manifest, Manifest]]:
    """Every object that makes pods, and its pods' template."""
    for manifest in manifests():
        template = manifest.get("spec", {}).get("template")
        if template:
            yield manifest, template


def containers() -> Iterator[tuple[str, Manifest]]:
    for manifest, template in workloads():
        for container in template["spec"]["containers"]:
            yield manifest["metadata"]["name"], container


def patched() -> list[Manifest]:
    """What is applied with GPUs: the base with each patch in it, as kustomize makes it."""
    changed = copy.deepcopy(manifests())
    for patch in kustomization(GPU)["patches"]:
        wanted = (patch["target"]["kind"], patch["target"]["name"])
        (manifest,) = [
            each for each in changed if (each["kind"], each["metadata"]["name"]) == wanted
        ]
        for operation in yaml.safe_load(patch["patch"]):
            assert "add" == operation["op"]
            *keys, last = [
                key.replace("~1", "/").replace("~0", "~")
                for key in operation["path"].removeprefix("/").split("/")
            ]
            place: Any = manifest
            for key in keys:
                place = place[int(key)] if isinstance(place, list) else place[key]
            if isinstance(place, list):
                place.insert(len(place) if last == "-" else int(last), operation["value"])
            else:
                place[last] = operation["value"]
    return changed


def validate(manifest: Manifest, version: str = KUBERNETES_VERSIONS[0]) -> None:
    """Strictly: a field that the schema does not have is an error, not a thing to ignore."""
    # Seconds, which everybody who collects tests would spend.
    import kubernetes_validate

    if version == "newest":
        version = kubernetes_validate.latest_version()
    kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
@pytest.mark.parametrize("made", [manifests, patched], ids=["base", "gpu"])
def test_kubernetes_knows_every_field_and_every_value_has_its_type(made: Any, version: str) -> None:
    for manifest in made():
        validate(manifest, version)


def test_a_misspelt_field_would_be_found() -> None:
    (scaler,) = [each for each in manifests() if each["kind"] == "HorizontalPodAutoscaler"]
    scaler["spec"]["maxReplica"] = scaler["spec"].pop("maxReplicas")
    from kubernetes_validate import ValidationError

    with pytest.raises(ValidationError):
        validate(scaler)


def test_every_file_of_the_folder_is_part_of_it() -> None:
    listed = kustomization()
    files = {name for each in listed["configMapGenerator"] for name in each["files"]}
    there = {path.name for path in BASE.iterdir() if path.is_file()}

    assert {*listed["resources"], *files, "kustomization.yaml"} == there


def test_every_object_has_a_kind_a_version_and_a_name_of_its_own() -> None:
    seen = [(each["apiVersion"], each["kind"], each["metadata"]["name"]) for each in manifests()]

    assert len(seen) == len(set(seen))
    assert {
        ("apps/v1", "Deployment", "server"),
        ("apps/v1", "StatefulSet", "redis"),
        ("apps/v1", "Deployment", "rollout-worker"),
        ("autoscaling/v2", "HorizontalPodAutoscaler", "rollout-worker"),
        ("batch/v1", "Job", "learner"),
    } <= set(seen)


def test_selectors_select_what_is_there() -> None:
    labels = {
        template["metadata"]["labels"]["app.kubernetes.io/name"] for _, template in workloads()
    }
    text = "\n".join(path.read_text() for path in BASE.glob("*.yaml"))
    selected = set(re.findall(r"app\.kubernetes\.io/name: ([\w-]+)", text))

    assert selected == labels
    for manifest, template in workloads():
        selector = manifest["spec"].get("selector")
        if selector:
            assert selector["matchLabels"].items() <= template["metadata"]["labels"].items()


def test_services_and_probes_name_ports_that_containers_have() -> None:
    ports = {
        template["metadata"]["labels"]["app.kubernetes.io/name"]: {
            port["name"]
            for container in template["spec"]["containers"]
            for port in container.get("ports", [])
        }
        for _, template in workloads()
    }
    for service in (each for each in manifests() if each["kind"] == "Service"):
        name = service["spec"]["selector"]["app.kubernetes.io/name"]
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports[name]
    for policy in (each for each in manifests() if each["kind"] == "NetworkPolicy"):
        name = policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/name"]
        allowed = {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
        assert allowed == ports[name]


def test_a_port_with_tls_is_not_said_to_be_in_the_clear() -> None:
    """A gateway would talk HTTP/2 without TLS to it, and be hung up on."""
    service = next(
        each
        for each in manifests()
        if each["kind"] == "Service" and each["metadata"]["name"] == "server"
    )
    grpc_port = next(port for port in service["spec"]["ports"] if port["name"] == "grpc")

    assert "https" == grpc_port["appProtocol"]


def test_the_autoscaler_scales_what_is_there_by_what_prometheus_records() -> None:
    """From the autoscaler to the adapter, to the recording rule; test_monitoring.py goes on."""
    (scaler,) = [each for each in manifests() if each["kind"] == "HorizontalPodAutoscaler"]
    target = scaler["spec"]["scaleTargetRef"]
    (workload,) = [
        manifest
        for manifest, _ in workloads()
        if (manifest["kind"], manifest["metadata"]["name"]) == (target["kind"], target["name"])
    ]
    (source,) = scaler["spec"]["metrics"]
    metric = source["external"]["metric"]
    labels = metric["selector"]["matchLabels"]
    groups = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())["groups"]
    (rule,) = [
        rule for each in groups for rule in each["rules"] if rule.get("record") == metric["name"]
    ]
    kept = {
        name.strip()
        for names in re.findall(r"\bby \(([^)]*)\)", rule["expr"])
        for name in names.split(",")
    }
    (adapter,) = [
        yaml.safe_load(block)
        for block in re.findall(
            r"^```yaml\n(.*?)^```",
            (ROOT / "docs" / "deploy.md").read_text(),
            re.DOTALL | re.MULTILINE,
        )
        if "seriesQuery" in block
    ]
    (offered,) = adapter["rules"]["external"]

    assert "replicas" not in workload["spec"], "it would fight the autoscaler at every apply"
    assert target["apiVersion"] == workload["apiVersion"]
    assert {"buffer"} == labels.keys() == kept
    assert ClientOptions().buffer == labels["buffer"]
    assert metric["name"] == offered["seriesQuery"]
    assert offered["metricsQuery"].endswith("by (buffer)")
    assert offered["resources"] == {"namespaced": False}


def server_of(made: list[Manifest], kind: str) -> Manifest:
    (found,) = [
        each for each in made if (each["kind"], each["metadata"]["name"]) == (kind, "server")
    ]
    return found


def test_one_server_leads_and_another_stands_by_also_during_an_update() -> None:
    spec = server_of(manifests(), "Deployment")["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    env = {each["name"]: each.get("value") for each in container["env"]}

    assert (2, "true") == (spec["replicas"], env["BREADBOX_STANDBY"])
    update = {"maxSurge": 1, "maxUnavailable": 0}
    assert {"type": "RollingUpdate", "rollingUpdate": update} == spec["strategy"]
    (spread,) = spec["template"]["spec"]["topologySpreadConstraints"]
    assert spread["labelSelector"] == spec["selector"], "both on the node that dies"
    assert "ScheduleAnyway" == spread["whenUnsatisfiable"], "a cluster of one node runs both"


def test_probes_leave_a_standby_alone_and_call_it_ready_once_it_could_lead() -> None:
    (container,) = server_of(manifests(), "Deployment")["spec"]["template"]["spec"]["containers"]
    arguments = {
        name: container[f"{name}Probe"]["exec"]["command"][3:]
        for name in ("startup", "readiness", "liveness")
    }

    assert {"startup": [ALIVE], "readiness": [READY], "liveness": [ALIVE]} == arguments


def test_a_drain_leaves_one_server_of_two() -> None:
    """And never waits for one that is not ready; what is allowed counts those that are."""
    budget = server_of(manifests(), "PodDisruptionBudget")["spec"]
    deployment = server_of(manifests(), "Deployment")["spec"]

    assert 1 == budget["maxUnavailable"] < deployment["replicas"]
    assert "AlwaysAllow" == budget["unhealthyPodEvictionPolicy"]
    assert budget["selector"] == deployment["selector"]


def test_clients_find_every_server_behind_the_name_and_ask_each_for_its_health() -> None:
    service = server_of(manifests(), "Service")
    (port,) = [each["port"] for each in service["spec"]["ports"] if each["name"] == "grpc"]
    name = f"dns:///{service['metadata']['name']}:{port}"
    known = {
        variable["value"]
        for _, container in containers()
        for variable in container["env"]
        if variable["name"] == "BREADBOX_SERVER"
    }

    assert "None" == service["spec"]["clusterIP"], "an address of its own leads to a standby, too"
    assert service["spec"]["publishNotReadyAddresses"] is True, "health decides, not readiness"
    assert {name} == known
    assert "round_robin" in dict(channel_options(name, is_one_of_many=False))["grpc.service_config"]


def test_settings_are_options_of_the_command_that_runs() -> None:
    for name, container in containers():
        if "args" not in container:
            continue
        known = command_options(container["args"][0])
        given = {variable["name"] for variable in container["env"]}
        assert given <= known, f"{name} sets what {container['args'][0]} does not read"


def test_secrets_come_from_what_the_command_makes(tmp_path: Path) -> None:
    made = {
        path.relative_to(tmp_path).as_posix() for path in write_secrets(tmp_path / "secrets", "r:1")
    }
    made.add(f"secrets/{TOKENS}")
    generated = {
        each["name"]: {path.rpartition("/")[2]: path for path in each["files"]}
        for each in kustomization()["secretGenerator"]
    }

    assert set() == {path for files in generated.values() for path in files.values()} - made
    for name, container in containers():
        for variable in container.get("env", []):
            if re.search(r"TOKEN$|PASSWORD|STORE$", variable["name"]):
                reference = variable["valueFrom"]["secretKeyRef"]
                assert reference["key"] in generated[reference["name"]], name


def test_every_volume_is_mounted_and_every_mount_has_one() -> None:
    for manifest, template in workloads():
        claimed = manifest["spec"].get("volumeClaimTemplates", [])
        volumes = {volume["name"] for volume in template["spec"].get("volumes", [])}
        volumes |= {claim["metadata"]["name"] for claim in claimed}
        mounts = {
            mount["name"]
            for container in template["spec"]["containers"]
            for mount in container["volumeMounts"]
        }
        assert volumes == mounts


def test_volumes_come_from_what_is_made() -> None:
    listed = kustomization()
    made = {
        each["name"] for key in ("secretGenerator", "configMapGenerator") for each in listed[key]
    }
    claims = {
        each["metadata"]["name"] for each in manifests() if each["kind"] == "PersistentVolumeClaim"
    }
    for _, template in workloads():
        for volume in template["spec"].get("volumes", []):
            if "secret" in volume:
                assert volume["secret"]["secretName"] in made | {CERTIFICATE_SECRET}
            if "configMap" in volume:
                assert volume["configMap"]["name"] in made
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims


def test_pods_satisfy_the_restricted_standard() -> None:
    """The namespace enforces it: a pod that does not would never start."""
    for manifest, template in workloads():
        pod = template["spec"]["securityContext"]
        assert pod["runAsNonRoot"] is True, manifest["metadata"]["name"]
        assert {"type": "RuntimeDefault"} == pod["seccompProfile"]
        assert template["spec"]["automountServiceAccountToken"] is False
    for name, container in containers():
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False, name
        assert context["readOnlyRootFilesystem"] is True, name
        assert {"drop": ["ALL"]} == context["capabilities"], name


def test_everything_is_probed_and_has_room_to_live_in() -> None:
    for name, container in containers():
        assert "livenessProbe" in container, name
        assert "memory" in container["resources"]["limits"], name
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys(), name


def test_images_are_those_that_the_dockerfiles_make() -> None:
    ours = {each["name"] for each in kustomization()["images"]}
    used = {container["image"] for _, container in containers()}

    assert {"breadbox/server", "breadbox/rollout-worker", "breadbox/learner"} == ours
    assert used == ours | {"redis:7-bookworm"}


def test_redis_is_configured_as_in_the_composition() -> None:
    def settings(path: Path) -> list[str]:
        lines = path.read_text().splitlines()
        return [line for line in lines if line and not line.startswith("#")]

    assert settings(ROOT / "deploy" / "redis" / "redis.conf") == settings(BASE / "redis.conf")
