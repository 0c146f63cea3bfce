"""The blocking client is made from the asyncio one, and is what somebody would have written."""

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import breadbox
from breadbox import aio

ROOT = Path(__file__).resolve().parents[2]
PAIRS = [(aio.Client, breadbox.Client), (aio.Lease, breadbox.types.Lease)]


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_the_blocking_client_is_current() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/gen_blocking.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ("", 0) == (done.stdout + done.stderr, done.returncode)


@pytest.mark.parametrize(("awaited", "blocking"), PAIRS)
def test_both_have_the_same_methods_with_the_same_parameters(awaited: Any, blocking: Any) -> None:
    assert public(awaited) - {"open_store"} == public(blocking) - {"store"}
    for name in public(blocking) & public(awaited):
        ours, theirs = getattr(blocking, name), getattr(awaited, name)
        if callable(ours):
            parameters = inspect.signature(ours).parameters
            assert str(parameters) == str(inspect.signature(theirs).parameters), name


@pytest.mark.parametrize("kind", [kind for pair in PAIRS for kind in pair])
def test_every_method_says_what_it_does_where_it_is_called(kind: type) -> None:
    """Not `see the other client`: `help()` and an editor show it whole."""
    for name in public(kind):
        text = inspect.getdoc(inspect.getattr_static(kind, name)) or ""
        assert text, name
        assert not re.search(r"see `breadbox\.(aio\.)?(Client|Lease)\.", text), name
