"""Make a virtual environment with Breadbox and torch in it, with venv and pip.

Usage: python scripts/setup_venv.py .venv [EXTRA]          (default: dev)
       python scripts/setup_venv.py --torch-only PYTHON    (into an interpreter that exists)

Where pip is configured with no sources of its own, it installs uv, and uv installs the rest.
Standard library only, and readable by old Pythons: it runs before anything is installed, and
reports a Python that is too old.

Torch is installed first and separately, because PyPI's build for Linux depends on gigabytes of
CUDA, which neither the demo nor the tools need: from the wheel folders that pip is configured with,
if they hold it; else, on Linux, from PyTorch's own index of CPU builds, if that answers within
seconds and pip is not configured with another index than PyPI; else from pip's index. The index in
BREADBOX_TORCH_INDEX_URL, where it is set, comes before all of these.
"""

import os
import re
import shutil
import subprocess
import sys
import urllib.request

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PYTHON_MINIMUM = (3, 11)
IS_RECENT = f"import sys; sys.exit(sys.version_info < {PYTHON_MINIMUM})"
PYTHONS = ("python3.14", "python3.13", "python3.12", "python3.11")
"""Tried in this order where the Python that runs this is too old."""
TORCH = "torch>=2.4"
CPU_INDEX_URL = "https://download.pytorch.org/whl/cpu"
ANSWER_S = 5.0
"""Seconds that PyTorch's index gets to answer."""


def say(text: str) -> None:
    """Print a line of progress."""
    print("setup: " + text, flush=True)


def succeeds(*command: str) -> bool:
    """Run a command silently; return whether its exit status is 0."""
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


def sources(python: str) -> "list[tuple[str, str]]":
    """Return from where pip is configured to install: options such as index-url, and values."""
    command = [python, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, stdout=subprocess.PIPE).stdout.decode(errors="replace")
    pattern = r"^[^=]*\.(index-url|extra-index-url|find-links|no-index)='(.*)'$"
    return re.findall(pattern, listed, re.MULTILINE)


def has_own_index(python: str) -> bool:
    """Return whether pip is configured with another index than PyPI, or with none."""
    options = ("index-url", "no-index")
    return any(name in options and "pypi.org" not in value for name, value in sources(python))


def install(python: str, *arguments: str) -> bool:
    """Install with uv if it is in the environment, else with pip; return whether that went well."""
    uv = os.path.join(os.path.dirname(python), "uv")
    if not sources(python) and succeeds(uv, "--version"):
        command = [uv, "pip", "install", "--python", python]
        if subprocess.run([*command, *arguments], cwd=ROOT).returncode == 0:
            return True
        say("uv failed; trying pip")
    # An older release that needs no compiler comes before a newer one that does.
    command = [python, "-m", "pip", "--disable-pip-version-check", "install", "--prefer-binary"]
    return subprocess.run([*command, *arguments], cwd=ROOT).returncode == 0


def answers(url: str, within_s: float = ANSWER_S) -> bool:
    """Return whether a web server answers a request for a page in time."""
    try:
        with urllib.request.urlopen(url, timeout=within_s):
            return True
    except (OSError, ValueError):
        return False


def install_torch(python: str) -> bool:
    """Install torch from the best source there is; return whether that went well."""
    if succeeds(python, "-c", "import torch"):
        return True
    # One whose installation was interrupted counts as installed.
    wanted = ("--force-reinstall", TORCH)
    index_url = os.environ.get("BREADBOX_TORCH_INDEX_URL")
    if index_url:
        return install(python, "--index-url", index_url, *wanted)
    if succeeds(python, "-m", "pip", "install", "--no-index", "--no-deps", *wanted):
        say("torch: taken from pip's configured wheel folder")
        return True
    if sys.platform == "linux" and not has_own_index(python):
        say("torch: asking PyTorch's own index for a CPU build (about 200 MB)")
        from_there = ("--index-url", CPU_INDEX_URL, *wanted)
        if answers(CPU_INDEX_URL + "/torch/") and install(python, *from_there):
            return True
        say("torch: taking it from PyPI, with all of CUDA: 3 GB to download, 6 GB on the disk")
    return install(python, *wanted)


def make_environment(folder: str) -> bool:
    """Make the virtual environment, unless one is there that works; return whether it works."""
    if succeeds(os.path.join(folder, "bin", "python"), "-c", "import pip; " + IS_RECENT):
        return True
    say("making " + folder)
    if subprocess.run([sys.executable, "-m", "venv", "--clear", folder]).returncode == 0:
        return True
    say("this Python cannot make virtual environments; on Debian and Ubuntu, install the package")
    say("python{}.{}-venv".format(*sys.version_info))
    return False


def set_up(folder: str, extra: str) -> int:
    """Make an environment with an extra of Breadbox; return the exit status."""
    folder = os.path.abspath(folder)
    python = os.path.join(folder, "bin", "python")
    if not make_environment(folder):
        return 1
    # The system's folder of temporary files may be memory, of fewer bytes than torch has.
    scratch = os.environ["TMPDIR"] = os.path.join(folder, "tmp")
    os.makedirs(scratch, exist_ok=True)
    try:
        # It takes a third of pip's time, and knows nothing of how pip is configured.
        if not sources(python):
            succeeds(python, "-m", "pip", "install", "uv")
        if install_torch(python) and install(python, "-e", f".[{extra}]"):
            say(folder + " is ready")
            return 0
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    say("that failed; the reason is above. Running it again continues from here")
    return 1


def main() -> int:
    """Make the environment named on the command line."""
    if len(sys.argv) == 3 and sys.argv[1] == "--torch-only":
        python = sys.argv[2]
        # A wheel folder gave it without what it depends on.
        return int(not (install_torch(python) and install(python, "-q", TORCH)))
    if len(sys.argv) not in (2, 3):
        print(__doc__)
        return 2
    if sys.version_info < PYTHON_MINIMUM:
        found = sys.version.split()[0]
        for newer in filter(None, map(shutil.which, PYTHONS)):
            if succeeds(newer, "-c", IS_RECENT):
                say(f"{sys.executable} is {found}; taking {newer}")
                os.execv(newer, [newer, *sys.argv])
        say(f"Python 3.11 or newer is needed; this is {found}. Install one, and name it if it")
        say("is not on the path: `make PYTHON=/path/to/python3.11 ...`")
        return 2
    return set_up(*sys.argv[1:], *["dev"][len(sys.argv) - 2 :])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        say("interrupted; running it again continues from here")
        sys.exit(130)
