"""Which tests stay together when several processes share them.

Tests that start processes wait for most of their time, and a file of them that one process runs
alone is waited for by the others at the end. They are spread one by one, but for those of files
that start something for all of their tests: each process would start it again. Attacks stay
together, too: several at once are one that nobody withstands. So do the other files, since their
tests are many and short.
"""

import re
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from xdist.scheduler import LoadFileScheduling

ROOT = Path(__file__).resolve().parents[2]
_WAITING = re.compile(r"pytest\.mark\.(integration|slow)\b")
_SHARED = re.compile(r"scope=\"(class|module|package|session)\"")


class Spreading(LoadFileScheduling):  # type: ignore[misc]
    """Gives out tests one by one, or a file of them, in their order."""

    def _split_scope(self, nodeid: str) -> str:
        path, _, _ = nodeid.partition("::")
        return nodeid if is_spread(path) else path


@cache
def is_slow(path: str) -> bool:
    """Whether a file has tests that start processes, or that compute for long."""
    return bool(_WAITING.search((ROOT / path).read_text()))


@cache
def is_spread(path: str) -> bool:
    """Whether its tests may be run by several processes."""
    if "hostile" in path or not is_slow(path):
        return False
    return not _SHARED.search((ROOT / path).read_text())


def order(paths: Iterable[str]) -> list[tuple[int, int]]:
    """Sort keys of tests of these files: slow files that stay together, spread tests, the rest.

    What takes long and is begun last is waited for alone. Spread tests that are alike are not
    neighbours, which would load the machine in the same way at the same time.
    """
    seen: Counter[str] = Counter()
    keys = []
    for path in paths:
        seen[path] += 1
        if is_spread(path):
            keys.append((1, seen[path]))
        else:
            keys.append((2 * (not is_slow(path)), 0))
    return keys
