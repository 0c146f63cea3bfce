"""Programs that run as if some of what is installed here were not."""

import functools
import re
from collections.abc import Iterable, Mapping
from importlib.metadata import packages_distributions, requires

from packaging.requirements import Requirement


def hiding(modules: Iterable[str]) -> str:
    """The beginning of a program in which these top-level modules cannot be found."""
    return (
        "import sys\n"
        "class Hidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] in {sorted(modules)!r}:\n"
        "            raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Hidden())\n"
    )


def modules_beyond(*extras: str) -> set[str]:
    """Modules that are installed here, and that `pip install breadbox[extras]` does not bring."""
    brought = _closure(extras)
    return {
        module
        for module, distributions in _distributions().items()
        if not {_normal(each) for each in distributions} & brought
    }


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    """By top-level module; half a second, since every installed file is looked at."""
    return packages_distributions()


def _closure(extras: Iterable[str]) -> set[str]:
    found = {"breadbox"}
    waiting = [("breadbox", extra) for extra in ("", *extras)]
    seen = set(waiting)
    while waiting:
        distribution, extra = waiting.pop()
        for text in requires(distribution) or ():
            requirement = Requirement(text)
            if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
                continue
            name = _normal(requirement.name)
            found.add(name)
            new = {(name, each) for each in ("", *requirement.extras)} - seen
            seen |= new
            waiting.extend(new)
    return found


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
