"""Every counter of the server after a short life, beside what was done in it."""

from collections import Counter
from typing import Any

from breadbox.v1 import fragment_pb2
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox_server.core.model.config import BufferConfig, FullPolicy
from support.eventually import eventually
from support.served import CALL_S, Served, served, span

CONFIG = BufferConfig(
    capacity_chunks=3, uses_max=1, staleness_max=2, full_policy=FullPolicy.EVICT, lease_s=60.0
)
OF_THE_CLOCK = {"breadbox_store_seconds"}
"""Trips to the store are partly by the clock: that of its usage comes each second."""

Counts = Counter[tuple[str, ...]]


def counted(it: Served) -> Counts:
    """All counters that are not 0, but for seconds, by name and values of labels."""
    found: Counts = Counter()
    for family in it.server.metrics.registry.collect():
        if not family.name.startswith("breadbox") or family.type == "gauge":
            continue
        for sample in family.samples:
            is_bucket = sample.name.endswith(("_bucket", "_created", "_seconds_sum"))
            if is_bucket or family.name in OF_THE_CLOCK or not sample.value:
                continue
            name = sample.name.removeprefix("breadbox_")
            found[(name, *sample.labels.values())] += int(sample.value)
    return found


class Life:
    """Calls to a server, and a tally of what they did by what they were answered."""

    def __init__(self, it: Served) -> None:
        self.it = it
        self.tally: Counts = Counter()

    def note(self, count: int, *name: str) -> None:
        self.tally[name] += count

    async def call(self, method: str, **fields: Any) -> Any:
        reply = await getattr(self.it.stub, method)(
            getattr(pb, f"{method}Request")(**fields), timeout=CALL_S
        )
        self.note(1, "rpcs_total", method, "OK")
        self.note(1, "rpc_seconds_count", method)
        return reply

    async def append(self, *fragments: Any, buffer: str = "default") -> list[str]:
        reply = await self.call("AppendFragments", buffer=buffer, fragments=fragments)
        outcomes = []
        for fragment, result in zip(fragments, reply.results, strict=True):
            name = fragment_pb2.AdmissionOutcome.Name(result.outcome)
            outcome = name.removeprefix("ADMISSION_OUTCOME_").lower()
            outcomes.append(outcome)
            if outcome == "payload_missing":
                self.note(1, "payloads_missing_total", buffer)
                continue
            self.note(1, "fragments_total", buffer, outcome)
            if outcome == "admitted":
                self.note(fragment.payload.size_bytes, "admitted_bytes_total", buffer)
        return outcomes

    async def fetch(self, request_id: str, count: int, staleness: int = 0) -> str:
        """Fetch; the id of the lease, or "" without one."""
        reply = await self.call(
            "FetchFragments", request_id=request_id, fragment_count=count, max_wait=span(0)
        )
        granted = list(reply.grant.fragments)
        outcome = "granted" if granted else "elapsed"
        self.note(1, "fetch_wait_seconds_count", "default", outcome)
        if granted:
            size_bytes = sum(each.metadata.payload.size_bytes for each in granted)
            self.note(size_bytes, "delivered_bytes_total", "default")
            self.note(len(granted), "staleness_at_delivery_versions_count", "default")
            if staleness:
                self.note(staleness, "staleness_at_delivery_versions_sum", "default")
        return str(reply.grant.lease.lease_id)

    async def release(self, lease_id: str, mode: Any) -> None:
        await self.call("ReleaseLease", lease_id=lease_id, mode=mode)

    def leave(self, count: int, reason: str, uses: int = 0) -> None:
        """Note chunks that left, each after so many uses."""
        self.note(count, "chunks_evicted_total", "default", reason)
        self.note(count, "uses_at_eviction_count", "default")
        if uses:
            self.note(count * uses, "uses_at_eviction_sum", "default")


async def produce(life: Life) -> None:
    """Every outcome of an append."""
    it, sized = life.it, life.it.custodian.write
    first = [it.metadata(index, payload=sized(100 + index)) for index in range(3)]
    assert ["admitted"] * 3 == await life.append(*first)
    assert ["duplicate"] == await life.append(first[0])
    assert ["wrong_session"] == await life.append(it.metadata(0, session_id="old"))
    absent = it.metadata(3)
    it.custodian.unannounced.discard(absent.payload.payload_id)
    assert ["payload_missing"] == await life.append(absent)
    assert ["admitted"] == await life.append(it.metadata(3))
    life.leave(1, "capacity")


async def learn(life: Life) -> None:
    """Every end of a wait and of a lease, and every way in which a chunk leaves."""
    it = life.it
    await life.release(await life.fetch("consumed", 1), pb.RELEASE_MODE_CONSUMED)
    life.note(1, "leases_ended_total", "default", "consumed")
    life.note(1, "staleness_at_release_versions_count", "default")
    life.leave(1, "used_up", uses=1)
    assert "" == await life.fetch("elapsed", 3)
    await life.release(await life.fetch("returned", 1), pb.RELEASE_MODE_RETURNED)
    life.note(1, "leases_ended_total", "default", "returned")
    await life.call("PublishModel", session_id="run", model_version=1)
    await life.fetch("expired", 1, staleness=1)
    it.clock.advance(61.0)
    life.note(1, "leases_ended_total", "default", "expired")
    await life.call("PublishModel", session_id="run", model_version=3)
    life.leave(2, "stale")
    assert ["stale"] == await life.append(it.metadata(4))
    fresh = [it.metadata(index, version=3) for index in (5, 6, 7)]
    assert ["admitted"] * 3 == await life.append(*fresh)
    await life.call("UpdatePriorities", delete_chunk_ids=[6])
    life.leave(1, "deleted")


async def look(life: Life) -> None:
    """Reads by a cursor."""
    reply = await life.call("ReadFragments", after_chunk_id=-1, chunk_count_max=9)
    life.note(len({each.chunk_id for each in reply.fragments}), "chunks_read_total", "default")
    life.note(reply.skipped_chunk_count, "chunks_skipped_total", "default")
    await life.release(reply.lease.lease_id, pb.RELEASE_MODE_CONSUMED)
    life.note(1, "read_leases_ended_total", "released")


async def report(life: Life) -> None:
    """Episodes, and a buffer whose chunk is given up half full."""
    it = life.it
    episode = pb.EpisodeReport(
        worker_id="w0", return_sum=2.0, step_count=8, end=pb.EPISODE_END_TERMINATED, task="t"
    )
    await life.call("ReportEpisodes", episodes=[episode, episode])
    life.note(2, "episodes_total", "t", "terminated")
    for name, total in (("return", 4), ("steps", 16)):
        life.note(2, f"episode_{name}_count", "t")
        life.note(total, f"episode_{name}_sum", "t")
    request = pb.CreateBufferRequest(name="pairs")
    request.config.fragments_per_chunk = 2
    await life.call("CreateBuffer", name="pairs", config=request.config)
    await life.call("StartSession", buffer="pairs", session_id="run")
    await life.append(it.metadata(0), buffer="pairs")
    await life.append(it.metadata(1, discontinuity=True), buffer="pairs")
    life.note(1, "fragments_discarded_total", "pairs", "discontinuity")


async def test_every_counter_says_what_happened() -> None:
    async with served(CONFIG) as it:
        life = Life(it)
        await life.call("StartSession", session_id="run")
        await produce(life)
        await learn(life)
        await look(life)
        await report(life)
        await life.call("EndSession", session_id="run")
        life.leave(2, "session_ended")
        # Those of seven chunks, and of the fragment that was given up.
        await eventually(lambda: len(it.custodian.deleted) == 8)
        life.note(8, "payloads_deleted_total")
        await eventually(lambda: not len(it.server.driver.deletions))
        got = counted(it)
    assert dict(sorted(life.tally.items())) == dict(sorted(got.items()))
