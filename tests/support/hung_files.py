"""A disk that hangs, without root: calls of the system wait for an event where a test says."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CALLS = ("open", "rename", "unlink", "lstat", "statvfs", "writev")


@contextmanager
def hung(folder: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let calls on paths below a folder hang inside the block, or until the event is set.

    The folder's threads are told apart from the loop's by nothing: any thread that calls hangs.
    """
    thawed = threading.Event()

    def waiting(call: Callable[..., Any]) -> Callable[..., Any]:
        def made(path: Any, *arguments: Any, **options: Any) -> Any:
            if isinstance(path, int) or os.fspath(path).startswith(folder):
                assert thawed.wait(60), "nothing thawed the disk"
            return call(path, *arguments, **options)

        return made

    with monkeypatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, waiting(getattr(os, name)))
        try:
            yield thawed
        finally:
            thawed.set()
