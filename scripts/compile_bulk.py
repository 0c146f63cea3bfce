"""Hatch's build hook: compile client/breadbox/stores/_bulk.c into the wheel.

It needs Linux and a C compiler: CC, else cc. Where they are not, the wheel is the one for every
platform, with which payloads are received step by step (`breadbox.stores.bulk`).

BREADBOX_COMPILE=0 makes that wheel in any case, BREADBOX_COMPILE=1 fails without a compiler, and a
platform (manylinux_2_17_x86_64) does so too and names the wheel after it.
"""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = "client/breadbox/stores/_bulk.c"
LIBRARY = "client/breadbox/stores/_bulk.so"
"""Where it stays, too, for an editable installation."""
FLAGS = ("-O2", "-fPIC", "-shared", "-std=gnu11", "-Wall", "-Wextra", "-Wconversion")


def compile_library(root: Path) -> str | None:
    """Compile; return what kept it from that, or None."""
    compiler = shlex.split(os.environ.get("CC") or "cc")
    if sys.platform != "linux" or sys.maxsize < 2**32:
        return "this is no 64-bit Linux"
    if shutil.which(compiler[0]) is None:
        return "there is no C compiler"
    command = [*compiler, *FLAGS, SOURCE, "-o", LIBRARY]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    return done.stderr if done.returncode else None


class CompileBulk(BuildHookInterface[Any]):
    """Adds the compiled library to a wheel, and says in the wheel's name where it runs."""

    PLUGIN_NAME = "compile-bulk"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before hatchling packs; `version` is its word for the kind of wheel."""
        wanted = os.environ.get("BREADBOX_COMPILE", "")
        if wanted == "0":
            return
        failure = compile_library(Path(self.root))
        if failure is not None:
            if wanted:
                raise RuntimeError(f"{SOURCE} cannot be compiled: {failure}")
            self.app.display_warning(f"without a compiled receiver: {failure}")
            return
        if version == "editable":
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform if wanted in ('', '1') else wanted}"
        build_data["force_include"][LIBRARY] = LIBRARY.partition("/")[2]
