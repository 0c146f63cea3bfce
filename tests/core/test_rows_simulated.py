"""Many thousand parts by producers that retry and are late, and a server that dies.

Rows are compared with a dict for each; of groups, each member that is granted has every part that
is required, with the numbers of all that was attached to it.
"""

import json
import random
from collections import defaultdict
from typing import Any

import pytest

from breadbox_server.core.buffers import DEFAULT_BUFFER as B
from breadbox_server.core.buffers import BufferSet
from breadbox_server.core.model.config import AssemblyPolicy, BufferConfig
from breadbox_server.core.model.events import FetchGranted, PayloadsDisposable
from breadbox_server.core.model.ids import FragmentIndex, PayloadId, RequestId, SessionId, WorkerId
from breadbox_server.core.model.inputs import (
    AdmissionOutcome,
    Appended,
    AppendFragments,
    DropMembers,
    DropPayloads,
    Fetch,
    Fragment,
    Offer,
    Payload,
    ReleaseLease,
    ReleaseMode,
    Settle,
)
from breadbox_server.core.model.validation import PART_VERSION
from support.inputs import publish_model, start_session
from support.metadata import make_fragment
from support.tiers import long_but

ADMITTED, DUPLICATE = AdmissionOutcome.ADMITTED, AdmissionOutcome.DUPLICATE
CONFLICT = AdmissionOutcome.PART_CONFLICT
PARTS = (8_000, 100_000)
"""The few in `make test`, the many in `make test-long`."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
Key = tuple[str, int]


class Simulation:
    """A buffer, and what dies of it."""

    def __init__(self, seed: int, config: BufferConfig) -> None:
        self.rng = random.Random(seed)
        self.buffers = BufferSet(random.Random(seed), config, is_recording=True)
        self.now, self.count, self.deaths = 0.0, 0, 0
        self.buffers.apply(start_session("s", buffer=B), now=0.0)
        self.base = self.buffers.snapshot()
        self.buffers.take_entries()
        self.stored: set[PayloadId] = set()
        """Payloads that were admitted, and not let go of."""

    def part(self, key: Key, name: str, **more: Any) -> Fragment:
        """A part of a member, or its numbers alone."""
        self.count += 1
        values = self.rng.sample("abcdef", self.rng.choice([0, 1, 2]) if name else 1)
        numbers = json.dumps({each: self.count for each in values}) if values else ""
        return Fragment(
            WorkerId(key[0]),
            FragmentIndex(key[1]),
            SessionId("s"),
            PART_VERSION,
            PART_VERSION,
            Payload(PayloadId(f"{self.count:032x}"), self.rng.randrange(1, 9) if name else 0),
            step_count=0,
            discontinuity=True,
            numbers=numbers,
            part=name,
            **more,
        )

    def tokens(self, key: Key, version: int = 0) -> Fragment:
        self.count += 1
        made = make_fragment(
            *key, version=version, session_id="s", size_bytes=7, numbers=f'{{"n":{self.count}}}'
        )
        made.payload = Payload(PayloadId(f"{self.count:032x}"), 7)
        return made

    def send(self, fragments: list[Fragment]) -> list[AdmissionOutcome | None]:
        """Append fragments; some are offered, and of these the payload may lack (None)."""
        if self.rng.random() < 0.5:
            answers = self.buffers.apply(AppendFragments(B, fragments), now=self.now)
            outcomes: list[AdmissionOutcome | None] = [each.outcome for each in answers]
        else:
            outcomes = []
            while len(outcomes) < len(fragments):
                left = fragments[len(outcomes) :]
                offered = self.buffers.apply(Offer(B, left), now=self.now)
                there = [self.rng.random() < 0.9 for each in offered.answers if each is None]
                settled: list[Appended | None] = []
                if offered.reservation_id is not None:
                    settle = Settle(B, offered.reservation_id, there)
                    settled = self.buffers.apply(settle, now=self.now)
                for each in offered.answers:
                    answer = settled.pop(0) if each is None else each
                    outcomes.append(None if answer is None else answer.outcome)
        for fragment, outcome in zip(fragments, outcomes, strict=True):
            if outcome is ADMITTED and fragment.payload.size_bytes:
                self.stored.add(fragment.payload.payload_id)
        self.let_go()
        return outcomes

    def let_go(self) -> list[Any]:
        """Take the events; what is let go of was there, and is let go of once."""
        events = self.buffers.take_events()
        for event in events:
            if isinstance(event, PayloadsDisposable):
                for each in event.payloads:
                    assert each.size_bytes > 0, "there is no such payload"
                    self.stored.remove(each.payload_id)
        return events

    def die(self) -> None:
        """Be killed, and restored by another server from the journal."""
        self.deaths += 1
        self.let_go()
        restored = BufferSet.restore(self.base, random.Random(self.deaths), is_recording=True)
        restored.replay(self.buffers.take_entries())
        restored.handle_timer(now=self.now)
        assert self.buffers.snapshot() == restored.snapshot()
        restored.take_events()
        self.buffers, self.base = restored, restored.snapshot()

    def check_payloads(self) -> None:
        self.buffers.check_invariants()
        assert self.stored == {each.payload_id for each in self.buffers[B].payloads()}


class NaiveRow:
    def __init__(self) -> None:
        self.parts: dict[str, int] = {}
        """Hash of each, in the order in which they came."""
        self.numbers: dict[str, int] = {}

    def expect(self, fragment: Fragment) -> AdmissionOutcome:
        name, numbers = fragment.part, json.loads(fragment.numbers or "{}")
        if not fragment.payload.size_bytes or name not in self.parts:
            return ADMITTED
        if self.parts[name] != fragment.schema_hash and name:
            return ADMITTED if fragment.replaces else CONFLICT
        if not fragment.replaces:
            return DUPLICATE
        is_last = name == next(reversed(self.parts))
        return DUPLICATE if is_last and self.numbers | numbers == self.numbers else ADMITTED

    def take(self, fragment: Fragment) -> None:
        self.numbers |= json.loads(fragment.numbers or "{}")
        if fragment.payload.size_bytes:
            self.parts.pop(fragment.part, None)
            self.parts[fragment.part] = fragment.schema_hash


class Rows(Simulation):
    rows: dict[Key, NaiveRow]

    def run(self, parts: int) -> None:
        self.rows = {}
        while self.count < parts:
            self.now += 0.01
            batch = [self.next() for _ in range(self.rng.randrange(1, 30))]
            batch += self.rng.sample(batch, min(2, len(batch)))
            # As they are judged: a repeated payload would be refused, as that of another fragment.
            batch = list({each.payload.payload_id: each for each in batch}.values())
            outcomes = self.send(batch)
            for fragment, outcome in zip(batch, outcomes, strict=True):
                key = (fragment.worker_id, fragment.fragment_index)
                row = self.rows.get(key, NaiveRow())
                if outcome is not None:
                    assert outcome is row.expect(fragment), fragment
                elif fragment.payload.size_bytes:
                    continue
                if outcome is ADMITTED:
                    row.take(fragment)
                    self.rows[key] = row
            if self.rng.random() < 0.2:
                self.drop()
            if self.rng.random() < 0.05:
                self.lose()
            if self.rng.random() < 0.02:
                self.die()
            if self.rng.random() < 0.02:
                self.check()
        self.check()

    def next(self) -> Fragment:
        key = (f"row-{self.rng.randrange(60)}", self.rng.choice([0, 0, 1, 1023]))
        kind = self.rng.choice(["ids", "reward", "score", "", "tokens"])
        if kind == "tokens":
            return self.tokens(key)
        replaces = bool(kind) and self.rng.random() < 0.3
        return self.part(key, kind, schema_hash=self.rng.randrange(3), replaces=replaces)

    def drop(self) -> None:
        keys = [self.rng.choice([*self.rows, ("row-none", 0)]) for _ in range(4)]
        names, members = zip(*keys, strict=True)
        known = {key for key in keys if self.rows.pop(key, None)}
        count = self.buffers.apply(DropMembers(B, names, members), now=self.now)
        assert count == len(known)
        self.let_go()

    def lose(self) -> None:
        if not self.stored:
            return
        lost = self.rng.choice(sorted(self.stored))
        (owner,) = [
            (each.worker_id, each.fragment_index)
            for each in self.buffers[B].fragments()
            if each.payload.payload_id == lost
        ]
        self.buffers.apply(DropPayloads(B, (lost,)), now=self.now)
        del self.rows[owner]
        self.let_go()

    def check(self) -> None:
        self.check_payloads()
        seen = []
        after = ("", -1)
        while page := self.buffers[B].members("row-", after, 7):
            seen += page
            after = page[-1][:2]
        assert [each[:2] for each in seen] == sorted(self.rows)
        for each in seen:
            row = self.rows[each.group, each.member]
            assert list(each.parts) == [name or "tokens" for name in row.parts]
            assert json.loads(each.numbers or "{}") == row.numbers
            held = self.buffers[B].parts(each.group, each.member, ())
            assert held is not None
            hashes = {part.part: part.schema_hash for part in held}
            assert {name: hashes[name] for name in row.parts if name} == {
                name: code for name, code in row.parts.items() if name
            }


@pytest.mark.parametrize("parts", long_but(1, PARTS))
def test_rows_are_what_was_attached_merged_replaced_and_dropped(parts: int) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)  # noqa: T201 - told when it fails
    config = BufferConfig(
        assembly=AssemblyPolicy.GROUPS, fragments_per_chunk=0, open_chunk_s=1.0, staleness_max=0
    )
    simulation = Rows(seed, config)
    simulation.run(parts)
    assert simulation.deaths > 0


SIZE = 4


class Members(Simulation):
    """Sequences and rewards of groups, in any order; some never come."""

    def run(self, parts: int) -> None:
        self.version, self.requests, self.begun, self.seen = 0, 0, 0, 0
        self.numbers: dict[Key, dict[str, int]] = defaultdict(dict)
        self.complete: dict[str, set[int]] = defaultdict(set)
        self.has: dict[Key, set[str]] = defaultdict(set)
        self.delivered: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        pending: list[tuple[Key, str, int]] = []
        while self.count < parts:
            self.now += 0.05
            self.buffers.handle_timer(now=self.now)
            while len(pending) < 100:
                name, self.begun = f"g{self.begun}", self.begun + 1
                lacks = self.rng.random() < 0.1
                kinds = [
                    ((name, member), kind)
                    for member in range(SIZE)
                    for kind in ("tokens", "reward", "score", "")
                ]
                pending += [
                    (key, kind, self.version)
                    for key, kind in kinds
                    if self.rng.random() < (0.8 if lacks else 1.0 if kind != "score" else 0.5)
                ]
            batch = []
            for _ in range(30):
                place = self.rng.randrange(min(40, len(pending)))
                key, kind, version = pending.pop(place)
                made = self.tokens(key, version) if kind == "tokens" else self.part(key, kind)
                batch.append(made)
            outcomes = self.send(batch)
            for fragment, outcome in zip(batch, outcomes, strict=True):
                self.note(fragment, outcome)
            self.learn()
            if self.rng.random() < 0.05:
                self.version += 1
                publish = publish_model(self.version, session_id="s", buffer=B)
                self.buffers.apply(publish, now=self.now)
            if self.rng.random() < 0.02:
                self.die()
            self.look()
        self.now += 100.0
        self.buffers.handle_timer(now=self.now)
        self.look()
        self.let_go()
        self.check_payloads()

    def note(self, fragment: Fragment, outcome: AdmissionOutcome | None) -> None:
        key = (fragment.worker_id, fragment.fragment_index)
        if outcome is not ADMITTED:
            return
        self.numbers[key] |= json.loads(fragment.numbers or "{}")
        if fragment.payload.size_bytes:
            assert fragment.part not in self.has[key], "admitted twice"
            self.has[key].add(fragment.part)
        if {"", "reward"} <= self.has[key]:
            self.complete[key[0]].add(key[1])

    def learn(self) -> None:
        self.requests += 1
        request = RequestId(f"r{self.requests}")
        fetch = Fetch(buffer=B, request_id=request, fragment_count=SIZE, deadline_at=self.now)
        self.buffers.apply(fetch, now=self.now)
        for event in self.let_go():
            if not isinstance(event, FetchGranted):
                continue
            fragments = [each.fragment for each in event.fragments]
            (group,) = {each.worker_id for each in fragments}
            heads = [each for each in fragments if not each.part]
            assert [each.fragment_index for each in heads] == sorted(self.complete[group])
            assert group not in self.delivered, "granted twice"
            for each in heads:
                key = (group, each.fragment_index)
                assert json.loads(each.numbers or "{}") == self.numbers[key]
                held = [part.part for part in fragments if part.fragment_index == key[1]]
                assert held == sorted(self.has[key])
            self.delivered[group] = [each.fragment_index for each in heads]
            release = ReleaseLease(B, event.lease_id, ReleaseMode.CONSUMED)
            self.buffers.apply(release, now=self.now)
        self.let_go()

    def look(self) -> None:
        for end in self.buffers[B].group_ends(self.seen, 10**6):
            self.seen = end.number
            self.reasons[end.group] = end.reason.value


@pytest.mark.parametrize("parts", long_but(1, PARTS))
def test_members_are_delivered_with_the_parts_that_they_need_or_their_end_is_told(
    parts: int,
) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)  # noqa: T201 - told when it fails
    config = BufferConfig(
        fragments_per_chunk=SIZE,
        assembly=AssemblyPolicy.GROUPS,
        required_parts="tokens,reward",
        group_min=random.Random(seed).choice([0, 2]),
        capacity_chunks=10,
        staleness_max=2,
        open_chunk_s=1.5,
        workers_max=500,
        sampler="oldest_first",
    )
    simulation = Members(seed, config)
    simulation.run(parts)
    assert {"complete", "incomplete"} <= set(simulation.reasons.values())
    for group, members in simulation.complete.items():
        ended = simulation.reasons.get(group) not in (None, "complete", "partial")
        held = group in {each.worker_id for each in simulation.buffers[B].fragments()}
        told = ended or held or group in simulation.delivered
        assert told or not members, group
