"""`breadbox console` as a real process, and a browser that looks at it."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from breadbox.model.fragment import Fragment
from breadbox.model.types import FragmentMetadata, FragmentReference, PayloadReference
from support.server_process import plain_environment

WIDE = {"width": 1400, "height": 900}


@contextmanager
def console(address: str, log: Path, *arguments: str) -> Iterator[str]:
    """Run a console of a server inside the block; gives the URL of its page."""
    with log.open("a") as said:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "breadbox.cli.main", "console", "--server", address),
                *("--console-listen", "127.0.0.1:0", *arguments),
            ],
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            env=plain_environment(),
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("console: http"), log.read_text()
        yield line.split()[1]
    finally:
        process.terminate()
        try:
            assert process.wait(timeout=20) == 0, log.read_text()
        finally:
            process.kill()
            process.stdout.close()


@contextmanager
def browser() -> Iterator[Any]:
    """Run a real Chromium inside the block."""
    sync_api = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("needs Chromium, as of Debian's package `chromium`")
    with sync_api.sync_playwright() as playwright:
        # In a container there is no user namespace to put its sandbox in.
        running = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        try:
            yield running
        finally:
            running.close()


def opened(chromium: Any, url: str, **options: Any) -> Iterator[Any]:
    """A page on which no script fails and nothing is refused by its policy."""
    context = chromium.new_context(**({"viewport": WIDE} | options))
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "console",
        lambda said: problems.append(said.text) if "Content Security Policy" in said.text else None,
    )
    page.goto(url)
    yield page
    context.close()
    assert [] == problems


def played(
    index: int,
    *,
    worker_id: str = "w0",
    session_id: str = "run",
    steps: int = 32,
    ends: tuple[int, ...] = (31,),
    first: bool = True,
    episode_id: int = 0,
    obs: Any = None,
    reward: float = 1.0,
    version: int = 0,
    **fields: Any,
) -> Fragment:
    """A fragment of episodes that end at the given steps."""
    terminated = np.zeros(steps, np.bool_)
    terminated[list(ends)] = True
    starts = np.concatenate([[first], terminated[:-1]])
    before = np.concatenate([[False], terminated[:-1]])
    obs = np.full((steps, 3), index, np.float32) if obs is None else obs
    return Fragment(
        worker_id=worker_id,
        fragment_index=index,
        session_id=session_id,
        model_version_min=version,
        model_version_max=version,
        obs=obs,
        action=np.arange(steps, dtype=np.int64),
        reward=np.full(steps, reward, np.float32),
        terminated=terminated,
        truncated=np.zeros(steps, np.bool_),
        first=starts,
        episode_id=episode_id + np.cumsum(before, dtype=np.int64),
        next_obs={name: leaf[-1] for name, leaf in obs.items()}
        if isinstance(obs, dict)
        else obs[-1],
        log_prob=np.full(steps, -0.5, np.float32),
        value=np.zeros(steps, np.float32),
        **fields,
    )


def film(steps: int = 32, *, start: int = 0, width: int = 64, height: int = 48) -> dict[str, Any]:
    """Observations with a camera whose brightness is the step, and a vector."""
    at = np.arange(start, start + steps)
    image = np.zeros((steps, height, width, 3), np.uint8)
    image[:] = (at % 256).astype(np.uint8)[:, None, None, None]
    return {"camera": image, "state": np.stack([at, -at], 1).astype(np.float32)}


def reference(
    fragment: Fragment, chunk_id: int | None = None, *, uses: int = 0, staleness: int = 0
) -> FragmentReference:
    """The server's reference of a fragment."""
    return FragmentReference(
        metadata=FragmentMetadata(
            worker_id=fragment.worker_id,
            fragment_index=fragment.fragment_index,
            session_id=fragment.session_id,
            model_version_min=fragment.model_version_min,
            model_version_max=fragment.model_version_max,
            payload=PayloadReference("p", 10),
            step_count=fragment.step_count,
            discontinuity=fragment.discontinuity,
        ),
        chunk_id=fragment.fragment_index if chunk_id is None else chunk_id,
        staleness_when_granted=staleness,
        use_count=uses,
    )
