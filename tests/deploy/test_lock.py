"""uv.lock is what images and continuous tests install: current, hashed, and from PyPI alone."""

import re
import shutil
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
BUILD_TOOLS = ROOT / "deploy" / "build-tools.txt"


def lock() -> dict[str, Any]:
    return tomllib.loads((ROOT / "uv.lock").read_text())


def locked(name: str) -> dict[str, Any]:
    (found,) = [each for each in lock()["package"] if each["name"] == name]
    return dict(found)


def named(texts: list[str]) -> set[tuple[str, str, frozenset[str]]]:
    """Requirements as name, range and extras."""
    parsed = [Requirement(text) for text in texts]
    return {
        (re.sub(r"[-_.]+", "-", each.name).lower(), str(each.specifier), frozenset(each.extras))
        for each in parsed
    }


def test_the_lock_is_of_the_project_as_it_stands() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = locked("breadbox")
    said = [
        f"{each['name']}[{','.join(each.get('extras', []))}]{each.get('specifier', '')}"
        for each in ours["metadata"]["requires-dist"]
    ]
    wanted = [
        *project["dependencies"],
        *chain.from_iterable(project["optional-dependencies"].values()),
    ]

    assert named(wanted) == named(said), "run `make lock`"
    assert sorted(project["optional-dependencies"]) == sorted(ours["metadata"]["provides-extras"])
    assert project["requires-python"] == lock()["requires-python"]


def test_all_that_is_locked_is_from_pypi_and_has_a_hash() -> None:
    for package in lock()["package"]:
        if package["name"] == "breadbox":
            continue
        assert {"registry": "https://pypi.org/simple"} == package["source"]
        files = [*package.get("wheels", []), *filter(None, [package.get("sdist")])]
        assert files, package["name"]
        for each in files:
            assert "files.pythonhosted.org" == urlsplit(each["url"]).hostname
            assert re.fullmatch(r"sha256:[0-9a-f]{64}", each["hash"])


def test_the_images_first_stages_install_what_the_lock_says() -> None:
    for name, version in re.findall(r"^([\w-]+)==([\w.]+)", BUILD_TOOLS.read_text(), re.MULTILINE):
        assert version == locked(name)["version"], "run `make lock`"
    assert "--hash=sha256:" in BUILD_TOOLS.read_text()


@pytest.mark.parametrize("extras", ["server", "rollout-worker", "rollout-worker,atari", "learner"])
def test_the_lock_gives_an_image_all_but_torch(extras: str) -> None:
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if uv is None:
        pytest.skip("needs uv, which the extra `release` installs")
    options = [word for extra in extras.split(",") for word in ("--extra", extra)]
    exported = subprocess.run(
        [*(uv, "export", "-q", "--frozen", "--no-emit-project", "--prune", "torch"), *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = set(re.findall(r"^([\w-]+)==", exported, re.MULTILINE))

    assert {"grpcio", "numpy", "redis"} <= found
    assert not {"torch", "triton"} & found
    assert not any(name.startswith("nvidia") for name in found)


def test_every_action_is_named_by_its_commit_and_says_which_version_that_is() -> None:
    """A tag of somebody else's can be moved, and what it names sees the secrets of a release."""
    folder = ROOT / ".github" / "workflows"
    named = [
        line.strip()
        for path in sorted(folder.glob("*.yml"))
        for line in path.read_text().splitlines()
        if "uses:" in line
    ]
    form = re.compile(r"- uses: [\w.-]+/[\w./-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+")
    assert named
    assert [] == [line for line in named if not form.fullmatch(line)]
