"""Other projects' packages, installed for a test and gone with it.

Without their dependencies: a simulator, a cluster or gigabytes of wheels are not what is tested. A
test puts small stand-ins of these on the path, and says which.
"""

import importlib
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import pytest

INSTALL_LIMIT_S = 240.0

# Not `CI`, which services of continuous integration set for every command: `make test` collects
# these modules also, and leaves their tests out.
IS_REQUIRED = "BREADBOX_PEERS_REQUIRED"


def install(requirement: str, folder: Path) -> Path:
    """Install one package from pip's index, without dependencies, and return where it lies.

    Skips the test where there is no index, or nothing that fits in it; but fails it where
    `BREADBOX_PEERS_REQUIRED` is set, so that nobody takes a tier that never ran for one that
    passed.

    Args:
        requirement: With its exact version, such as "minestudio==1.1.6".
        folder: Gets a folder of its own for the package.
    """
    target = folder / requirement.replace("=", "-")
    command = [
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"),
        *("--no-deps", "--no-compile", "--retries", "1", "--target", str(target), requirement),
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=INSTALL_LIMIT_S
        )
        problem = done.stderr.strip().splitlines()[-1:] if done.returncode else []
    except subprocess.TimeoutExpired:
        problem = [f"pip was not done within {INSTALL_LIMIT_S:.0f} s"]
    if problem or not target.is_dir():
        give_up(f"{requirement} cannot be installed: {' '.join(problem) or 'pip made nothing'}")
    return target


def environment_beside(folder: Path, *requirements: str) -> Path:
    """Make an environment with exactly these packages, and this one's for whatever else they need.

    So what pip resolves is real, and torch is not installed once more. Skips the test, or fails it,
    as `install` does.

    Args:
        folder: Gets the environment.
        requirements: As pip takes them.

    Returns:
        Its interpreter.
    """
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python*/site-packages")
    # Behind its own packages, which are found first.
    (packages / "beside.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    done = subprocess.run(
        [
            *(str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"),
            *("--no-compile", "--retries", "1", *requirements),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=INSTALL_LIMIT_S,
    )
    if done.returncode:
        give_up(f"{' '.join(requirements)} cannot be installed: {done.stderr.strip()[-2000:]}")
    return python


def require(module: str, extra: str) -> ModuleType:
    """Import what an extra of Breadbox brings; without it a module of tests gives up."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        give_up(f'{error.msg}: pip install "breadbox[{extra}]"', is_whole_module=True)


def give_up(reason: str, *, is_whole_module: bool = False) -> NoReturn:
    """Skip the test; but fail it where `BREADBOX_PEERS_REQUIRED` is set."""
    if os.environ.get(IS_REQUIRED):
        pytest.fail(reason)
    pytest.skip(reason, allow_module_level=is_whole_module)


def environment(*paths: Path) -> dict[str, str]:
    """This process' environment without settings of Breadbox, and with paths to import from."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("BREADBOX_")}
    return clean | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONUNBUFFERED": "1"}
