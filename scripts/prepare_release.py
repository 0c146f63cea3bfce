"""Write a version, and its section of the changelog, into every file that names the version.

Usage: python scripts/prepare_release.py VERSION [--date YYYY-MM-DD]

What is "Unreleased" in CHANGELOG.md becomes the version's section. Nothing is committed or tagged.
"""

import argparse
import re
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = r"\d+\.\d+\.\d+"


def places(version: str, date: str) -> dict[str, list[tuple[str, str]]]:
    """Return what is replaced in each file: a pattern that must be found, and its replacement."""
    minor = version.rpartition(".")[0]
    named = f"## [Unreleased]\n\n## [{version}] - {date}\n"
    return {
        "pyproject.toml": [(rf'^version = "{VERSION}"$', f'version = "{version}"')],
        "uv.lock": [
            (rf'(?<=^name = "breadbox"\n)version = "{VERSION}"$', f'version = "{version}"')
        ],
        "client/breadbox/__init__.py": [
            (rf'^__version__ = "{VERSION}"$', f'__version__ = "{version}"')
        ],
        "deploy/helm/breadbox/Chart.yaml": [
            (rf"^version: {VERSION}$", f"version: {version}"),
            (rf'^appVersion: "{VERSION}"$', f'appVersion: "{version}"'),
        ],
        "deploy/kubernetes/base/kustomization.yaml": [
            (rf'newTag: "{VERSION}"$', f'newTag: "{version}"')
        ],
        "deploy/kubernetes/gpu/kustomization.yaml": [
            (rf"newTag: {VERSION}-cuda$", f"newTag: {version}-cuda")
        ],
        "docs/deploy.md": [(rf"(?<=/breadbox-server:){VERSION}\b", version)],
        "docs/upgrade.md": [
            (r"^(\| (?:Python API|command line|metrics) \| .+? \|) [\d.]+ \|", rf"\1 {minor} |")
        ],
        "README.md": [
            (
                r"^Status: [\d.]+, beta(?:, not released)?\. Within [\d.]+ ",
                f"Status: {version}, beta. Within {minor} ",
            )
        ],
        "CHANGELOG.md": [
            (r"^(?:There is no release yet: .*\n)?(?=\n## \[Unreleased\])", ""),
            (r"^## \[Unreleased\]\n", named),
        ],
    }


def prepare(root: Path, version: str, date: str) -> None:
    """Write the version into the files below a folder, all of them or none.

    Raises:
        SystemExit: The version is not one, or is in the changelog already, or a file has no place
            for it.
    """
    if not re.fullmatch(VERSION, version):
        sys.exit(f"release: {version!r} is not MAJOR.MINOR.PATCH")
    if f"\n## [{version}]" in (root / "CHANGELOG.md").read_text():
        sys.exit(f"release: CHANGELOG.md has a section of {version}")
    written = {}
    for name, replacements in places(version, date).items():
        text = (root / name).read_text()
        for pattern, replacement in replacements:
            text, count = re.subn(pattern, replacement, text, flags=re.MULTILINE)
            if not count:
                sys.exit(f"release: {name} has nothing like {pattern}")
        written[name] = text
    for name, text in written.items():
        (root / name).write_text(text)
    print(f"release: {version} is in {', '.join(written)}")
    print(f"release: read CHANGELOG.md, commit all as it is, and tag the commit v{version}")


def main() -> None:
    """Prepare the release named on the command line."""
    parser = argparse.ArgumentParser(description="Write a version into every file that names it.")
    parser.add_argument("version")
    parser.add_argument("--date", default=time.strftime("%Y-%m-%d", time.gmtime()))
    options = parser.parse_args()
    prepare(ROOT, options.version, options.date)


if __name__ == "__main__":
    main()
