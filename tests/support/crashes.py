"""Processes that end, and functions that something comes in between of, at a chosen call."""

import fcntl
import os
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from breadbox.stores import groups

_CALLS = (
    *("open", "utime", "rename", "ftruncate", "writev", "close", "unlink"),
    *("pread", "pwrite", "stat", "lstat", "listdir"),
)
STEPS: Sequence[tuple[Any, str]] = (
    *[(os, name) for name in _CALLS],
    (fcntl, "flock"),
    (groups, "_punch"),
)
CRASHED = 77


def in_child(act: Callable[[], None]) -> int:
    """Run a function in a copy of this process; return its exit code."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        act()
    except BaseException:  # noqa: BLE001 - it is this process's end
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def crash_at(step: int, act: Callable[[], None], begin: Callable[[], object] = lambda: None) -> int:
    """Begin in a copy of this process, then act; it ends before its n-th call of files in that."""

    def crashing() -> None:
        begin()
        left = step

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                nonlocal left
                left -= 1
                if left < 0:
                    os._exit(CRASHED)
                return original(*arguments, **options)

            return call

        for owner, name in STEPS:
            setattr(owner, name, wrap(getattr(owner, name)))
        act()

    return in_child(crashing)


def on_first_call(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, act: Callable[[], object]
) -> None:
    """Act once, just before a function is called for the first time."""
    original = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(owner, name, original)
        act()
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, call)
