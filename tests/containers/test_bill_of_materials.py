"""What is in an image, by its own word: listed as CycloneDX, and what uv.lock says."""

import runpy
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from support.composition import Composition

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1200)]

ROOT = Path(__file__).resolve().parents[2]
MAKE_SBOM = runpy.run_path(str(ROOT / "scripts" / "make_sbom.py"))


def locked() -> dict[str, set[str]]:
    """Versions by name."""
    found: dict[str, set[str]] = {}
    for package in tomllib.loads((ROOT / "uv.lock").read_text())["package"]:
        found.setdefault(package["name"], set()).add(package["version"])
    return found


def distributions(bill: dict[str, Any]) -> dict[str, str]:
    return {
        each["name"]: each["version"]
        for each in bill["components"]
        if each["purl"].startswith("pkg:pypi/")
    }


def needs(bill: dict[str, Any], root: str) -> set[str]:
    """Names of distributions that one needs, directly or not, and its own."""
    edges = {each["ref"]: each["dependsOn"] for each in bill["dependencies"]}
    (start,) = [each for each in edges if each.startswith(f"pkg:pypi/{root}@")]
    found, waiting = {start}, [start]
    while waiting:
        new = set(edges[waiting.pop()]) - found
        found |= new
        waiting.extend(new)
    return {each.removeprefix("pkg:pypi/").partition("@")[0] for each in found}


@pytest.mark.parametrize("name", ["server", "rollout-worker", "learner"])
def test_an_image_holds_what_the_lock_says_and_its_bill_lists_it(
    composition: Composition, name: str
) -> None:
    bill = MAKE_SBOM["bill_of"](f"breadbox/{name}:{composition.project}")
    found, versions = distributions(bill), locked()
    free = {"breadbox", "pip", "setuptools", "wheel"}  # Ours, and those of the base image.
    if name != "server":
        free |= needs(bill, "torch")

    assert {"breadbox", "grpcio", "numpy"} <= found.keys()
    assert {} == {
        each: version
        for each, version in found.items()
        if each not in free and version not in versions.get(each, ())
    }
    assert ("torch" in found) == (name != "server")
    assert not {"uv", "hatchling", "pytest"} & found.keys()
    assert "libc6" in {each["name"] for each in bill["components"]}


def test_a_bill_is_what_the_standard_asks_for(composition: Composition) -> None:
    validation = pytest.importorskip(
        "cyclonedx.validation.json", reason="needs the extra `release`: cyclonedx-python-lib"
    )
    from cyclonedx.schema import SchemaVersion

    text = MAKE_SBOM["json"].dumps(MAKE_SBOM["bill_of"](f"breadbox/server:{composition.project}"))
    version = SchemaVersion.from_version(MAKE_SBOM["SPEC_VERSION"])
    assert validation.JsonStrictValidator(version).validate_str(text) is None


def test_an_image_that_is_not_there_is_named(composition: Composition, tmp_path: Path) -> None:
    del composition
    done = subprocess.run(
        ["python3", ROOT / "scripts" / "make_sbom.py", "--out", tmp_path, "breadbox/nothing:none"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert 1 == done.returncode
    assert "breadbox/nothing:none" in done.stderr.splitlines()[-1]
