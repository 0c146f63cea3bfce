"""Build the wheels and the sdist of a commit, the same bytes each time, check and try them.

Usage: python scripts/make_dist.py [--commit HEAD] [--out dist] [--python PYTHON ... | --untried]

What is built is what the commit has, not what lies around: uncommitted changes are not in it.
Everything is built twice, in two places, and once more from the sdist, and must be equal byte for
byte; times in the archives are the commit's. One wheel is for every platform; the other has the
compiled receiver (scripts/compile_bulk.py), for Linux on this kind of processor, with the C library
of manylinux or a later one. Then `twine check`, `check-wheel-contents`, and
scripts/try_wheel.py under each Python (default: every python3.11 to python3.14 on the path).

Needs the extra `release`.
"""

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GLIBC_MAX = (2, 17)
PLATFORM = "manylinux_{}_{}_{}".format(*GLIBC_MAX, platform.machine())
PYTHONS = ("python3.11", "python3.12", "python3.13", "python3.14")


def output_of(*command: str) -> str:
    """Of a command in the repository that must end well."""
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def unpack_commit(commit: str, folder: Path) -> Path:
    """Write the files of a commit into a new folder; the folder."""
    folder.mkdir()
    with subprocess.Popen(["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE) as archive:
        subprocess.run(["tar", "x", "-C", folder], stdin=archive.stdout, check=True)
    if archive.returncode != 0:
        sys.exit(f"git archive {commit} failed")
    return folder


def build(source: Path, out: Path, *, time_s: int, kinds: Sequence[str]) -> dict[str, Path]:
    """Build distributions of a folder, of wheels both; they by name."""
    for compiling, built in (("0", kinds), (PLATFORM, ("--wheel",))):
        subprocess.run(
            [sys.executable, "-m", "build", "--no-isolation", *built, "--outdir", out, source],
            env={**os.environ, "SOURCE_DATE_EPOCH": str(time_s), "BREADBOX_COMPILE": compiling},
            stdout=subprocess.DEVNULL,
            check=True,
        )
    return {path.name: path for path in sorted(out.iterdir())}


def digests(built: dict[str, Path]) -> dict[str, str]:
    """SHA-256 of each file, by name."""
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in built.items()}


def make(commit: str, scratch: Path) -> dict[str, Path]:
    """Build wheels and sdist of a commit below an empty folder; all by name.

    Raises:
        SystemExit: They differ from one time to the next, or the sdist makes another wheel.
    """
    time_s = int(output_of("git", "log", "-1", "--format=%ct", commit))
    both = ("--sdist", "--wheel")
    first, again = (
        build(
            unpack_commit(commit, scratch / place),
            scratch / f"{place}-out",
            time_s=time_s,
            kinds=both,
        )
        for place in ("one", "another-place")
    )
    if digests(first) != digests(again):
        sys.exit(f"built twice, and not the same: {digests(first)}, {digests(again)}")
    (sdist,) = (path for name, path in first.items() if name.endswith(".tar.gz"))
    with tarfile.open(sdist) as archive:
        archive.extractall(scratch / "sdist", filter="data")
    (unpacked,) = (scratch / "sdist").iterdir()
    made_of_sdist = build(unpacked, scratch / "sdist-out", time_s=time_s, kinds=("--wheel",))
    if not digests(made_of_sdist).items() <= digests(first).items():
        sys.exit(f"the sdist makes another wheel: {digests(made_of_sdist)}, {digests(first)}")
    return first


def works(python: str) -> bool:
    """Whether a Python is on the path, and can make environments: not a stand-in for none."""
    command = [python, "-c", "import ensurepip, venv"]
    return (
        bool(shutil.which(python)) and not subprocess.run(command, capture_output=True).returncode
    )


def check_version(built: dict[str, Path]) -> None:
    """See that the module says the version that the distributions have.

    Raises:
        SystemExit: It does not.
    """
    module = (ROOT / "client" / "breadbox" / "__init__.py").read_text()
    (said,) = re.findall(r'^__version__ = "(.+)"$', module, re.MULTILINE)
    names = {f"breadbox-{said}-py3-none-{tag}.whl" for tag in ("any", PLATFORM)}
    names.add(f"breadbox-{said}.tar.gz")
    if names != set(built):
        sys.exit(f"breadbox.__version__ is {said}, and what was built is {sorted(built)}")


def check_c_library(wheel: Path) -> None:
    """See that the compiled receiver needs no later C library than the wheel's name says.

    Raises:
        SystemExit: It does.
    """
    with zipfile.ZipFile(wheel) as archive:
        library = archive.read("breadbox/stores/_bulk.so")
    needed = {tuple(map(int, each.split(b"."))) for each in re.findall(rb"GLIBC_([\d.]+)", library)}
    if not needed or max(needed) > GLIBC_MAX:
        sys.exit(f"{wheel.name} needs a C library of {needed}, and says {GLIBC_MAX}")


def main() -> None:
    """Build, check and try."""
    parser = argparse.ArgumentParser(description="Build, check and try wheel and sdist.")
    parser.add_argument("--commit", default="HEAD")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--python", action="append", help="Try the wheel under this one; repeat.")
    parser.add_argument("--untried", action="store_true", help="Only build and check.")
    options = parser.parse_args()
    if output_of("git", "status", "--porcelain"):
        print("dist: uncommitted changes are not in it", flush=True)
    with tempfile.TemporaryDirectory(prefix="breadbox-dist-") as scratch:
        built = make(options.commit, Path(scratch))
        check_version(built)
        options.out.mkdir(parents=True, exist_ok=True)
        for old in options.out.glob("breadbox-*"):
            old.unlink()
        made = [Path(shutil.copy2(path, options.out)) for path in built.values()]
    for path in made:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        print(f"dist: {path} ({path.stat().st_size:,} bytes, sha256 {digest}), twice the same")
    wheels = [path for path in made if path.suffix == ".whl"]
    (compiled,) = (path for path in wheels if PLATFORM in path.name)
    check_c_library(compiled)
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *made], check=True)
    subprocess.run([sys.executable, "-m", "check_wheel_contents", *wheels], cwd=ROOT, check=True)
    if options.untried:
        return
    pythons = options.python or [each for each in PYTHONS if works(each)]
    for python in pythons:
        # The other one differs in no line of Python.
        for wheel in wheels if python == pythons[0] else [compiled]:
            print(f"dist: trying {wheel.name} with {python}", flush=True)
            subprocess.run([python, ROOT / "scripts" / "try_wheel.py", wheel], check=True)
    if not pythons:
        sys.exit("dist: none of the Pythons is on the path; name one with --python")


if __name__ == "__main__":
    main()
