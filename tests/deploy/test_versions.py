"""One version everywhere, and what docs/upgrade.md and CHANGELOG.md say of versions."""

import re
import tomllib
from pathlib import Path

import yaml

import breadbox
from breadbox.payload import FORMAT_VERSION
from breadbox.payload.format import OPEN_FORMAT_VERSION
from breadbox_server.journal.encoding import codec

ROOT = Path(__file__).resolve().parents[2]
HEADINGS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def upgrade_table() -> dict[str, str]:
    """What is versioned, and its version now."""
    rows = re.findall(r"^\| (.+?) \| .+? \| (.+?) \|", (ROOT / "docs/upgrade.md").read_text(), re.M)
    return dict(rows)


def test_the_version_is_the_same_wherever_it_stands() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((ROOT / "deploy/helm/breadbox/Chart.yaml").read_text())
    base, gpu = (
        yaml.safe_load((ROOT / f"deploy/kubernetes/{name}/kustomization.yaml").read_text())
        for name in ("base", "gpu")
    )
    page = (ROOT / "docs/deploy.md").read_text()

    assert {breadbox.__version__} == {
        project["version"],
        chart["version"],
        chart["appVersion"],
        *(each["newTag"] for each in base["images"]),
        *(each["newTag"].removesuffix("-cuda") for each in gpu["images"]),
        *re.findall(r"/breadbox-server:([\w.]+)", page),
    }


def test_the_page_on_upgrades_names_the_formats_that_are_written() -> None:
    table = upgrade_table()

    assert f"{FORMAT_VERSION}; of sequences {OPEN_FORMAT_VERSION}" == table["payload format"]
    assert str(codec.VERSION) == table["journal"]
    assert breadbox.__version__.rpartition(".")[0] == table["Python API"]


def test_what_pins_a_promise_is_there() -> None:
    pins = re.findall(r"`(tests/[\w/.]+)`", (ROOT / "docs/upgrade.md").read_text())

    assert pins
    assert all((ROOT / each).exists() for each in pins)


def test_the_changelog_is_one_of_keep_a_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (.+)$", text, re.M)

    assert "[Unreleased]" == versions[0]
    for each in versions[1:]:
        assert re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", each)
    assert set(re.findall(r"^### (.+)$", text, re.M)) <= HEADINGS


def test_classifiers_name_the_pythons_that_the_workflows_test() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {
        each.rpartition(" :: ")[2]
        for each in project["classifiers"]
        if re.search(r":: 3\.\d+$", each)
    }
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())

    assert named == set(workflow["jobs"]["locked"]["strategy"]["matrix"]["python"])
    assert project["requires-python"] == f">={min(named)}"
