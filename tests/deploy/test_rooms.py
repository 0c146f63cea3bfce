"""Rooms: folders of few modules that say what they own."""

import ast
import subprocess
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (
    *(
        "client",
        "adapters",
        "server",
        "rollout_worker",
        "learner",
        "offline",
        "policies",
        "demo",
        "console",
    ),
)
MODULES_MAX = 13


def modules() -> list[Path]:
    """Every module of the product that is not generated."""
    listed = subprocess.run(
        ["git", "ls-files", "--", *(f"{source}/*.py" for source in SOURCES)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    return [ROOT / name for name in listed if "/v1/" not in name and (ROOT / name).exists()]


def doc_of(room: Path) -> str:
    """The docstring of a room, or nothing."""
    return ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""


def test_no_room_holds_more_modules_than_a_reader_can_or_it_says_why() -> None:
    counts = Counter(module.parent for module in modules())
    crowded = {
        str(room.relative_to(ROOT)): count
        for room, count in counts.items()
        if count > MODULES_MAX and "More than thirteen modules" not in doc_of(room)
    }
    assert {} == crowded


def test_every_room_says_what_it_owns() -> None:
    rooms = {module.parent for module in modules()}
    silent = [str(room.relative_to(ROOT)) for room in sorted(rooms) if not doc_of(room)]
    assert [] == silent


def test_every_room_is_a_package() -> None:
    rooms = {module.parent for module in modules()}
    assert [] == [str(room) for room in rooms if not (room / "__init__.py").exists()]
