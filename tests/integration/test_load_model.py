"""One actor beside a learner that publishes at every step, wherever the weights are."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import breadbox
from breadbox import payload
from breadbox.model.errors import PayloadMissingError
from breadbox.model.types import PayloadReference
from breadbox.stores.base import PayloadStore
from breadbox.testing import ServerProcess, start_server
from support.callers import KINDS, make_caller
from support.redis_server import RedisServer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

LOADS = 12


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


SIZES = {"small": 16, "of several pieces": 500_000}
"""Numbers in the weights, of 4 bytes each: stored whole, and in pieces."""


@contextmanager
def serving(kind: str, redis_server: RedisServer, folder: Path) -> Iterator[ServerProcess]:
    store = f"file://{folder / 'store'}" if kind == "file" else redis_server.url
    options = ["--gateway"] if kind == "gateway" else []
    with start_server(store=store, options=options) as server:
        yield server


class Learner:
    """Publishes versions 1, 2, ... without a pause; each weight says of which version it is."""

    def __init__(self, address: str, count: int) -> None:
        self._address = address
        self._count = count
        self._stop = threading.Event()
        self._failures: list[Exception] = []
        self.version = 0
        self._published = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="learner")

    def __enter__(self) -> "Learner":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)
        assert [] == self._failures

    def outrun(self, version: int) -> None:
        """Return when another version has followed."""
        with self._published:
            assert self._published.wait_for(lambda: self.version > version, 30)

    def _run(self) -> None:
        try:
            with breadbox.connect(self._address) as client:
                session_id = client.start_session().session_id
                while not self._stop.is_set():
                    following = self.version + 1
                    weights = {"w": np.full(self._count, following, np.float32)}
                    client.publish(session_id, following, weights)
                    with self._published:
                        self.version = following
                        self._published.notify_all()
        except Exception as error:  # noqa: BLE001 - raised where the test waits
            self._failures.append(error)


@pytest.mark.parametrize("size", list(SIZES))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("store", ["redis", "file", "gateway"])
async def test_an_actor_has_whole_and_newer_weights_with_every_load(
    store: str,
    kind: str,
    size: str,
    redis_server: RedisServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever was superseded between the look and the reading, as it is for every third load."""
    read, missed, loads = payload.read_weights, 0, 0
    with (
        serving(store, redis_server, tmp_path) as server,
        Learner(server.address, SIZES[size]) as learner,
    ):

        def read_late(store: PayloadStore, reference: PayloadReference) -> dict[str, Any]:
            nonlocal missed
            while loads // 3 == missed:
                try:
                    read(store, reference)
                except PayloadMissingError:
                    missed += 1
                    raise
                learner.outrun(learner.version)
            return read(store, reference)

        monkeypatch.setattr(payload, "read_weights", read_late)
        known, versions = None, [0]
        async with make_caller(kind, server.address) as actor:
            for loads in range(LOADS):  # noqa: B007 - read above
                newest: Any = await actor.call("load_model", known, max_wait_s=20.0)
                assert newest is not None
                known, weights = newest
                versions.append(known.model_version)
                assert {float(known.model_version)} == set(weights["w"].tolist())
        assert sorted(set(versions)) == versions
    assert LOADS // 3 == missed, "every third load was to begin in vain"
