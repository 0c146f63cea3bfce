"""What a deployable imports, its extra installs, or its image dies of a missing module."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

from breadbox.shared.extras import MODULES

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OURS = {
    Path(root).name for root in PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
}
OPTIONAL = {"ale_py"}
"""Imported by what only another extra brings into use."""
NEEDING_MORE = {"offline/breadbox_offline/training/cloning.py"}
"""Modules whose users bring what they import: here a policy, and with it torch."""
DISTRIBUTION_OF = {
    "PIL": "pillow",
    "google": "googleapis-common-protos",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "grpc_status": "grpcio-status",
    "prometheus_client": "prometheus-client",
    "yaml": "pyyaml",
}
"""Where it is not the module's own name."""


def installed_with(extra: str | None) -> set[str]:
    """Distributions that `breadbox[extra]` names; those of all without one."""
    project = PROJECT["project"]
    wanted = project["dependencies"] + project["optional-dependencies"].get(extra, [])
    return {re.split(r"[\[<>=~! ]", each)[0].lower() for each in wanted}


def imported_by(folder: Path) -> dict[str, str]:
    """Modules of others that are imported at the top of a module below `folder`, and by which."""
    found = {}
    for path in folder.rglob("*.py"):
        if path.relative_to(ROOT).as_posix() in NEEDING_MORE:
            continue
        for node in ast.parse(path.read_text()).body:
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            for name in names:
                found[name.split(".")[0]] = path.name
    return {
        name: where
        for name, where in found.items()
        if name not in OURS and name not in sys.stdlib_module_names
    }


@pytest.mark.parametrize(
    ("folder", "extra"),
    [
        ("server/breadbox_server", "server"),
        ("rollout_worker/breadbox_rollout", "rollout-worker"),
        ("learner/breadbox_learner", "learner"),
        ("policies/breadbox_policies", "rollout-worker"),
        ("policies/breadbox_policies", "learner"),
        ("offline/breadbox_offline", "offline"),
        ("demo/breadbox_demo", "demo"),
        ("console/breadbox_console", "console"),
        ("client/breadbox/stores", "server"),
    ],
)
def test_what_a_deployable_imports_its_extra_installs(folder: str, extra: str) -> None:
    installed = installed_with(extra)
    missing = {
        name: where
        for name, where in imported_by(ROOT / folder).items()
        if DISTRIBUTION_OF.get(name, name) not in installed | OPTIONAL
    }

    assert {} == missing


@pytest.mark.parametrize("extra", MODULES)
def test_what_is_looked_for_before_a_command_is_called_installed_is_what_its_extra_brings(
    extra: str,
) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = set(project["optional-dependencies"][extra])
    for each in [each for each in wanted if each.startswith("breadbox[")]:
        wanted.remove(each)
        for inner in each[len("breadbox[") : -1].split(","):
            wanted |= set(project["optional-dependencies"][inner])
    distributions = {re.split(r"[\[<>=~!; ]", each)[0].lower() for each in wanted}
    distributions -= {"hiredis", "uvloop"}  # Server and redis-py go on without them.

    assert distributions == {DISTRIBUTION_OF.get(name, name) for name in MODULES[extra]}


def test_a_server_of_ones_own_is_refused_where_one_of_its_modules_is_missing() -> None:
    base = installed_with(None)
    beyond = {
        name
        for name in imported_by(ROOT / "server/breadbox_server")
        if DISTRIBUTION_OF.get(name, name) not in base
    }

    assert beyond == {*MODULES["server"]}
