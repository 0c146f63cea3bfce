"""Compile protos/ into stubs of client and server, or check that the committed ones are current.

Usage: python scripts/gen_protos.py [--check]
"""

from __future__ import annotations

import argparse
import filecmp
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
TARGETS = {
    "breadbox/v1": ("client/breadbox/v1", "Stubs of the wire contract; see protos/."),
    # Clients neither get nor read it.
    "breadbox/journal/v1": (
        "server/breadbox_server/journal/v1",
        "Stubs of what a journal holds; see protos/.",
    ),
}
"""By folder of protos: the package of the stubs, below the root, and what it says of itself."""


def compile_protos(out: Path) -> None:
    """Compile every proto under `protos/` into the packages of `TARGETS`, below `out`."""
    protos = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    services = [name for name in protos if name.endswith("_service.proto")]
    # `python -m` finds google/protobuf/*.proto; grpc_tools.protoc.main() does not.
    protoc = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}"]
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(
            [*protoc, f"--python_out={scratch}", f"--pyi_out={scratch}", *protos], check=True
        )
        subprocess.run([*protoc, f"--grpc_python_out={scratch}", *services], check=True)
        for folder, (target, docstring) in TARGETS.items():
            (out / target).mkdir(parents=True)
            for stub in sorted((Path(scratch) / folder).glob("*.py*")):
                shutil.copy(stub, out / target)
            (out / target / "__init__.py").write_text(f'"""{docstring}"""\n')


def stale_files(fresh: Path, committed: Path) -> list[str]:
    """Names that differ between `fresh` and `committed`, or stand in only one of them."""

    def names(folder: Path) -> set[str]:
        return {path.name for path in folder.glob("*.py*") if path.is_file()}

    both = names(fresh) & names(committed)
    changed = [n for n in both if not filecmp.cmp(fresh / n, committed / n, shallow=False)]
    return sorted([*changed, *(names(fresh) ^ names(committed))])


def main() -> int:
    """Write the stubs, or with --check return 1 and name those that are stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    if find_spec("grpc_tools") is None:
        print(
            "grpcio-tools is missing; its release that makes the stubs is for Python 3.11 to 3.13"
        )
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch)
        compile_protos(fresh)
        is_current = True
        for target, _ in TARGETS.values():
            if check and (stale := stale_files(fresh / target, ROOT / target)):
                print(f"stale stubs in {target}: {', '.join(stale)}; run `make protos`")
                is_current = False
            if not check:
                shutil.rmtree(ROOT / target, ignore_errors=True)
                shutil.copytree(fresh / target, ROOT / target)
    return int(not is_current)


if __name__ == "__main__":
    sys.exit(main())
