"""Make a virtual environment with Breadbox, its tools and a CPU build of torch in it.

Usage: python scripts/setup_venv.py .venv
       python scripts/setup_venv.py --torch-only PYTHON    (into an interpreter that exists)

Standard library only: it runs before anything is installed. A CUDA build of torch is several
gigabytes, which nobody wants for a demo, so torch is installed first and on its own: from pip's
configured wheel folders if they hold one, else from the index given in BREADBOX_TORCH_INDEX_URL,
else from pip's index if what it would install there brings no CUDA packages.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON_MINIMUM = (3, 11)
TORCH = "torch>=2.4"


def say(text: str) -> None:
    """Tell the user what is going on."""
    print(f"setup: {text}", flush=True)


def pip(python: Path, *arguments: str, quiet: bool = False) -> bool:
    """Run pip in the environment; False when it fails."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(
        command,
        cwd=ROOT,
        stdout=subprocess.DEVNULL if quiet else None,
        stderr=subprocess.DEVNULL if quiet else None,
        check=False,
    )
    return done.returncode == 0


def cuda_packages_of(python: Path) -> list[str] | None:
    """The CUDA packages that pip's index would bring along with torch; None if pip cannot tell."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        if not pip(python, "install", "--dry-run", "--report", str(report), TORCH, quiet=True):
            return None
        names = [item["metadata"]["name"] for item in json.loads(report.read_text())["install"]]
    return sorted(name for name in names if name.startswith(("nvidia-", "triton")))


def install_torch(python: Path) -> bool:
    """Install a CPU build of torch, or say what to do; False when there is none to be had."""
    if (
        subprocess.run([python, "-c", "import torch"], capture_output=True, check=False).returncode
        == 0
    ):
        return True
    if pip(python, "install", "-q", "--no-index", "--no-deps", TORCH, quiet=True):
        say("torch: taken from pip's configured wheel folder")
        return True
    index_url = os.environ.get("BREADBOX_TORCH_INDEX_URL")
    if index_url:
        say("torch: installing from BREADBOX_TORCH_INDEX_URL")
        return pip(python, "install", "-q", "--index-url", index_url, TORCH)
    cuda = cuda_packages_of(python)
    if cuda == []:
        say("torch: installing from pip's index")
        return pip(python, "install", "-q", TORCH)
    reason = (
        "pip cannot find torch" if cuda is None else f"pip's index brings {len(cuda)} CUDA packages"
    )
    say(f"torch: {reason}, several gigabytes that the demo and the tests do not need.")
    say("torch: set BREADBOX_TORCH_INDEX_URL to the index of CPU builds that pytorch.org names")
    say("torch: for your system, or install torch yourself:")
    say(f"torch:   {python} -m pip install torch ...    and run this again.")
    return False


def main() -> int:
    """Make the environment named on the command line."""
    if len(sys.argv) == 3 and sys.argv[1] == "--torch-only":
        return int(not install_torch(Path(sys.argv[2])))
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    if sys.version_info < PYTHON_MINIMUM:
        wanted = ".".join(map(str, PYTHON_MINIMUM))
        say(f"Python {wanted} or newer is needed; this is {sys.version.split()[0]}.")
        say("Name another one with `make PYTHON=python3.11 ...`.")
        return 2
    folder = Path(sys.argv[1])
    python = folder / "bin" / "python"
    if not python.exists():
        say(f"making {folder}")
        venv.create(folder, with_pip=True)
    if not install_torch(python):
        return 1
    say("installing breadbox and its tools (about a minute)")
    if not pip(python, "install", "-q", "-e", ".[dev]"):
        say("pip failed; its message is above")
        return 1
    (folder / ".ready").touch()
    say(f"{folder} is ready")
    return 0


if __name__ == "__main__":
    sys.exit(main())
