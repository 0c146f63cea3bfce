"""The buffer does what the ancestor's did, on recorded traces of it (see the oracles' README).

The sampler is scripted with the recorded picks, so everything else must follow: which fragments are
taken, how they become chunks, what is evicted, how often each chunk was used, and what a fetch
returns in which order.
"""

import json
import os
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from breadbox_server.core.buffers import DEFAULT_BUFFER, BufferSet
from breadbox_server.core.model.config import BufferConfig
from breadbox_server.core.model.events import FetchGranted
from breadbox_server.core.model.ids import ChunkId, LeaseId, RequestId
from breadbox_server.core.model.inputs import (
    AppendFragments,
    Fetch,
    PublishModel,
    ReleaseLease,
    ReleaseMode,
    StartSession,
)
from breadbox_server.core.samplers import SAMPLERS, Candidate, Sampler, UsesLeft
from support.metadata import make_fragment

ORACLES = Path(
    os.environ.get("BREADBOX_ORACLES", Path(__file__).resolve().parents[3] / "shared" / "oracles")
)
TRACES_PATH = ORACLES / "buffer_traces.json"
TRACES = json.loads(TRACES_PATH.read_text()) if TRACES_PATH.exists() else []
pytestmark = pytest.mark.skipif(
    not TRACES, reason=f"no recorded traces at {TRACES_PATH}; set BREADBOX_ORACLES to their folder"
)


class ScriptedSampler(Sampler):
    """Hands out the chunks that a trace says; also shows what may be drawn."""

    script: list[tuple[str, int]] = []  # noqa: RUF012  set per trace
    held: dict[ChunkId, Candidate] = {}  # noqa: RUF012

    def __init__(self, exponent: float) -> None:
        self.held.clear()

    def add(self, chunk: Candidate) -> None:
        self.held[chunk.chunk_id] = chunk

    def remove(self, chunk: Candidate) -> None:
        del self.held[chunk.chunk_id]

    def clear(self) -> None:
        self.held.clear()

    def probabilities(self, chunks: Iterable[Candidate]) -> list[float]:
        return [1.0 for _ in chunks]

    def draw(
        self, count: int, rng: random.Random, uses_left: UsesLeft | None = None
    ) -> list[ChunkId]:
        by_first = {self.first_of(chunk): chunk_id for chunk_id, chunk in self.held.items()}
        assert count == len(self.script)
        return [by_first[first] for first in self.script]

    def order(self) -> list[ChunkId]:
        return list(self.held)

    @staticmethod
    def first_of(chunk: Any) -> tuple[str, int]:
        return chunk.fragments[0].worker_id, chunk.fragments[0].fragment_index

    @classmethod
    def contents(cls) -> list[list[object]]:
        """What is held, by arrival, as the traces have it."""
        chunks: list[Any] = [cls.held[chunk_id] for chunk_id in sorted(cls.held)]
        return [[*cls.first_of(chunk), chunk.use_count] for chunk in chunks]


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: f"seed{trace['seed']}")
def test_buffer_follows_the_recorded_trace(
    trace: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SAMPLERS, "scripted", ScriptedSampler)
    config = BufferConfig(**trace["config"], sampler="scripted", lease_s=1000.0)
    buffers = BufferSet(random.Random(trace["seed"]), config)
    lease_id: LeaseId | None = None
    for place, op in enumerate(trace["ops"]):
        now = float(place)
        match op["op"]:
            case "publish":
                session_id, version = op["session"], op["version"]
                if buffers[DEFAULT_BUFFER].model.session_id != session_id:
                    buffers.apply(StartSession(DEFAULT_BUFFER, session_id, version), now=now)
                buffers.apply(PublishModel(DEFAULT_BUFFER, session_id, version), now=now)
            case "append":
                fragment = make_fragment(
                    op["worker"], op["index"], session_id=op["session"], version=op["version"]
                )
                buffers.apply(AppendFragments(DEFAULT_BUFFER, [fragment]), now=now)
            case "fetch":
                ScriptedSampler.script = [tuple(pick) for pick in op["picked"]]
                if lease_id is not None:
                    buffers.apply(
                        ReleaseLease(DEFAULT_BUFFER, lease_id, ReleaseMode.CONSUMED), now=now
                    )
                grant = _fetch(buffers, op["fragments"], request_id=f"r{place}", now=now)
                lease_id = grant.lease_id
                assert _references(grant) == [tuple(reference) for reference in op["returned"]]
        buffers.check_invariants()
        assert ScriptedSampler.contents() == op["chunks"], f"after op {place}: {op}"


def _fetch(buffers: BufferSet, fragment_count: int, *, request_id: str, now: float) -> FetchGranted:
    """Fetch without waiting."""
    buffers.take_events()
    fetch = Fetch(
        buffer=DEFAULT_BUFFER,
        request_id=RequestId(request_id),
        fragment_count=fragment_count,
        deadline_at=now,
    )
    buffers.apply(fetch, now=now)
    [granted] = [event for event in buffers.take_events() if isinstance(event, FetchGranted)]
    return granted


def _references(grant: FetchGranted) -> list[tuple[str, int]]:
    """Give (worker, index) of what was granted, in order."""
    return [(g.fragment.worker_id, g.fragment.fragment_index) for g in grant.fragments]
