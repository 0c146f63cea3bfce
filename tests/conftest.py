"""Hypothesis profiles: `ci` repeats itself; HYPOTHESIS_PROFILE=nightly looks far and wide.

`quick` is that of `make test-quick`.

Where a process has several event loops, gRPC wakes all of them for one event, and asyncio logs for
each but the first that there was nothing to read (grpc/grpc#25364), or that the event was of a loop
which a test before had closed: that harms nobody, and no test of logs should see it.

Torch computes with one thread here, and in every process that a test starts: the threads of several
processes, each as many as there are cores, wait for each other by spinning, and a small network
then took three times the time of the processor that it needs.

Several processes share the tests as `support.spreading` has it.
"""

import logging
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from support import warm_start
from support.spreading import Spreading, order

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Also gRPC's and urllib's own clients of the tests call what runs here themselves.
for _name in ("no_proxy", "NO_PROXY"):
    os.environ[_name] = ",".join(
        filter(None, (os.environ.get(_name), "localhost,127.0.0.1,127.0.0.2,127.0.0.3,::1"))
    )

settings.register_profile(
    "ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("quick", settings.get_profile("ci"), max_examples=20)
settings.register_profile(
    "nightly",
    max_examples=100_000,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


warm_start.install()


@pytest.fixture
def cold_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every command start anew; see `support.warm_start`."""
    monkeypatch.setenv(warm_start.COLD, "1")


LONG_TIMEOUT_S = 300
"""Of a test that is long by nature, unless it says so itself."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_TIMEOUT_S))
    if hasattr(config, "workerinput"):
        keys = order(str(item.path.relative_to(config.rootpath)) for item in items)
        turns = {id(item): key for item, key in zip(items, keys, strict=True)}
        items.sort(key=lambda item: turns[id(item)])


def pytest_collection_finish(session: pytest.Session) -> None:
    is_shared = hasattr(session.config, "workerinput")
    if is_shared and any(item.get_closest_marker("integration") for item in session.items):
        warm_start.begin()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Take the place of `--dist loadfile`."""
    return Spreading(config, log) if config.getvalue("dist") == "loadfile" else None


def _tells_something(record: logging.LogRecord) -> bool:
    """Whether a record of asyncio is not that of a loop which gRPC woke for nothing."""
    error = record.exc_info[1] if record.exc_info else None
    woken_in_vain = isinstance(error, BlockingIOError) or str(error) == "Event loop is closed"
    return not (woken_in_vain and "PollerCompletionQueue" in record.getMessage())


logging.getLogger("asyncio").addFilter(_tells_something)
