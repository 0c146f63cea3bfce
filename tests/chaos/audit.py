"""Balances ledgers, server and store, once everybody has stopped."""

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import breadbox
from breadbox.mirror import ReplayMirror
from breadbox.mirror.storage.step_storage import CHUNK_STEP_BITS
from breadbox.model.errors import SchemaMismatchError, WaitElapsedError
from breadbox.model.types import AdmissionOutcome, FragmentMetadata, PayloadReference, ReleaseMode
from chaos.actors import FRAGMENTS_PER_CHUNK, SESSION, STEPS, content_of
from chaos.groups import GROUP_MIN, GROUP_SIZE, GroupAudit
from chaos.ledger import read_ledgers
from chaos.tally import Tally
from chaos.tickets import TicketAudit
from chaos.worlds import World
from support.eventually import eventually_sync
from support.fsck_process import MUST_BE_0, fsck_report

STALENESS_MAX = 3
USES_MAX = 2
SETTLE_S = 120.0
PROBES = 256
"""Fragments of which the server is asked at a time whether it knows them."""

Identity = tuple[str, int]


class Audit:
    """Fills a tally with what does not balance.

    Args:
        folder: Of the ledgers.
        world: The store.
        client: To the server.
        tally: Knows what is excused.
        empties_redis: Whether payloads may be missing at any time.
        has_groups: Whether chunks are groups.
        has_tickets: Whether producers took tickets for them.
        keeps_all: Whether nothing left the buffer, and mirrors have to hold all of it.
    """

    def __init__(
        self,
        folder: Path,
        world: World,
        client: breadbox.Client,
        tally: Tally,
        *,
        empties_redis: bool,
        has_groups: bool,
        has_tickets: bool,
        keeps_all: bool,
    ) -> None:
        self._world = world
        self._client = client
        self._tally = tally
        self._empties_redis = empties_redis
        self._keeps_all = keeps_all
        self._has_groups = has_groups
        self._has_tickets = has_tickets
        self._per_chunk = GROUP_SIZE if has_groups else 1 if keeps_all else FRAGMENTS_PER_CHUNK
        self._lines = list(read_ledgers(folder))
        self._appended: dict[Identity, dict[str, Any]] = {}
        for line in self._of("appended"):
            # Several producers may be told of a member: what is not excused counts.
            if "admitted" in (line["outcome"], line["first"]):
                identity = line["worker"], line["index"]
                before = self._appended.get(identity)
                if before is None or tally.is_rolled_back(before):
                    self._appended[identity] = line

    def run(self) -> None:
        self._tally.appended = len(self._appended)
        self._wait_for_quiet()
        self._check_ledgers()
        self._check_grants()
        self._check_reads()
        self._check_mirrors()
        if self._keeps_all:
            self._check_that_mirrors_hold_all()
        if self._has_groups:
            GroupAudit(self._lines, self._client, self._tally).run()
        tickets = TicketAudit(self._lines, self._client, self._tally)
        if self._has_tickets:
            tickets.run()
        self._check_counters()
        self._check_acknowledged()
        self._check_store()
        if self._has_tickets:
            tickets.check_that_all_are_free(SESSION)
        self._check_that_nothing_is_left()

    def _wait_for_quiet(self) -> None:
        """Leases of killed learners expire; open chunks of killed producers end."""
        state = lambda: self._client.get_buffer().state  # noqa: E731 - read afresh each time
        eventually_sync(
            lambda: (
                (state().lease_count, state().waiter_count, state().open_chunk_count) == (0, 0, 0)
                and (state().ticket_count, state().ticket_waiter_count) == (0, 0)
            ),
            "leases, waiters, tickets and open chunks ending",
            within_s=SETTLE_S,
        )

    def _of(self, kind: str) -> Iterator[dict[str, Any]]:
        return (line for line in self._lines if line["kind"] == kind)

    def _check_ledgers(self) -> None:
        for line in self._of("wrong"):
            self._tally.wrong.append(f"{line['ledger']} read other bytes: {line}")
        for line in self._of("refused"):
            if not self._tally.is_rolled_back(line):
                self._tally.wrong.append(f"{line['ledger']} was refused: {line['error']}")
        if not self._empties_redis:
            self._check_missing()

    def _check_missing(self) -> None:
        expired = {line["lease"] for line in self._of("expired")}
        owners = {
            payload: (worker, index)
            for line in self._of("granted")
            for _, _, _, worker, index, _, _, payload in line["fragments"]
        }
        for line in self._of("missing"):
            # Of a lease that was over, the payloads may be gone.
            if line["lease"] in expired:
                continue
            appended = self._appended.get(owners.get(line["payload"], ("", -1)))
            if self._tally.may_be_missing(appended, line):
                self._tally.younger += 1
            else:
                self._tally.lost.append(f"{line['ledger']} was granted nothing: {line}")

    def _check_grants(self) -> None:
        leases: dict[str, dict[str, Any]] = {}
        shares: dict[str, list[set[int]]] = defaultdict(list)
        for line in self._of("granted"):
            self._tally.granted += len(line["fragments"])
            first = leases.setdefault(line["lease"], line)
            if first["fragments"] != line["fragments"]:
                self._tally.double.append(f"lease {line['lease']} was granted in two ways")
            for chunk, staleness, use_count, worker, index, _, session, _ in line["fragments"]:
                if staleness > STALENESS_MAX or session != SESSION:
                    self._tally.stale.append(f"{worker}/{index} in {line['request']}")
                if use_count > USES_MAX:
                    self._tally.double.append(f"chunk {chunk} in use {use_count}")
        for lease, line in leases.items():
            if self._tally.is_rolled_back(line):
                continue  # The draw may have been made again.
            chunks = {fragment[0] for fragment in line["fragments"]}
            if any(chunks & other for other in shares[line["request"]]):
                self._tally.double.append(f"two ranks share a chunk of {line['request']}: {lease}")
            shares[line["request"]].append(chunks)
        self._check_uses(leases)

    def _check_uses(self, leases: dict[str, dict[str, Any]]) -> None:
        """By fragment: chunks of a history that was given up lend their numbers to others."""
        consumed: Counter[Identity] = Counter()
        excused: Counter[Identity] = Counter()
        done = {line["lease"]: line for line in self._of("released") if line["mode"] == "consumed"}
        for lease, line in done.items():
            if lease in leases:
                fragments = {(each[3], each[4]) for each in leases[lease]["fragments"]}
                is_excused = self._tally.is_rolled_back(line)
                (excused if is_excused else consumed).update(fragments)
        for fragment, uses in consumed.items():
            if uses > USES_MAX:
                self._tally.double.append(f"{fragment} was consumed {uses} times")
            elif uses + excused[fragment] > USES_MAX:
                self._tally.younger += 1

    def _check_reads(self) -> None:
        """Every chunk was read, or its reader was told that it was not."""
        lines = sorted(self._of("read"), key=lambda line: float(line["at"]))
        lines += self._rest_of_subscription()
        ends: dict[str, int] = {}
        chunks: dict[int, list[Any]] = {}
        for line in lines:
            reader = line["subscription"] or line["ledger"]
            ids = {each[0] for each in line["fragments"]}
            self._tally.read += len(ids)
            began = line["cursor"] - len(ids) - line["skipped"]
            end = ends.get(reader)
            # Whoever goes on by a subscription may read once more, and leaves nothing out.
            has_gap = end is not None and (began > end if line["subscription"] else began != end)
            if has_gap and not line["begins"]:
                self._blame("lost", f"{reader} read up to {end}, and then after {began}")
            ends[reader] = line["cursor"]
            for chunk_id in ids:
                content = [each for each in line["fragments"] if each[0] == chunk_id]
                if chunks.setdefault(chunk_id, content) != content:
                    self._blame("lost", f"chunk {chunk_id} is {content} and {chunks[chunk_id]}")
                    chunks[chunk_id] = content

    def _rest_of_subscription(self) -> list[dict[str, Any]]:
        """Read what the subscriber had not acknowledged; afterwards it is behind nothing."""
        rest = []
        names = [each.name for each in self._client.get_buffer().subscriptions]
        for name in names:
            for read in self._client.tail(subscription=name, max_wait_s=0.5):
                fragments = [
                    [each.chunk_id, each.metadata.worker_id, each.metadata.fragment_index]
                    for each in read.references
                ]
                rest.append(
                    {
                        "ledger": "audit",
                        "subscription": name,
                        "begins": False,
                        "cursor": read.cursor,
                        "skipped": read.skipped_chunk_count,
                        "fragments": fragments,
                    }
                )
        for each in self._client.get_buffer().subscriptions:
            if each.lag_chunk_count:
                self._tally.lost.append(f"{each.name} is behind after it has read all: {each}")
        return rest

    def _check_mirrors(self) -> None:
        """A mirror takes a fragment in once, and the same step has the same handle in all."""
        lines = list(self._of("mirrored"))
        written = self._written()
        owners: dict[int, Identity] = {}
        handles: dict[tuple[str, Identity], int] = {}
        for line in lines:
            self._tally.mirrored += len(line["fragments"])
            for handle, worker, index in line["fragments"]:
                fragment, mirror = (worker, index), line["ledger"]
                if (worker, index) not in written:
                    self._tally.wrong.append(f"{mirror} has {fragment}, which nobody wrote")
                if handles.setdefault((mirror, fragment), handle) != handle:
                    self._blame("double", f"{mirror} took {fragment} in twice")
                if owners.setdefault(handle, fragment) != fragment:
                    other = owners[handle]
                    self._blame("wrong", f"handle {handle} is of {fragment} and of {other}")
        self._tally.late = sum({line["ledger"]: line["late"] for line in lines}.values())
        self._check_what_mirrors_skipped()

    def _written(self) -> set[Identity]:
        """What was written, whether or not its writer was answered."""
        return {
            (worker, index) for line in self._of("appending") for worker, index in line["fragments"]
        }

    def _check_what_mirrors_skipped(self) -> None:
        """A chunk that a mirror did not take in is one that it said it skipped.

        Strict where a mirror holds all that it took in. Of one that has room for little, a gap
        between two looks hides which skips were before the steps that are left: all count.
        """
        chunks: dict[str, set[int]] = defaultdict(set)
        for line in self._of("mirrored"):
            mirror = line["ledger"]
            if line["has_gap"]:  # Steps came and went between two looks.
                chunks.pop(mirror, None)
            new = {handle >> CHUNK_STEP_BITS for handle, _, _ in line["fragments"]}
            chunks[mirror] |= new
            missing = max(chunks[mirror]) - min(chunks[mirror]) + 1 - len(chunks[mirror])
            if missing > line["skipped"]:
                self._blame("lost", f"{mirror} lacks {missing} chunks, and skipped fewer: {line}")
                chunks[mirror] = new

    def _check_that_mirrors_hold_all(self) -> None:
        """All that was acknowledged, once and in order; and a mirror of now has the same."""
        with ReplayMirror(self._client) as mirror:
            mirror.catch_up(SETTLE_S)
            now = content_of(mirror.at(range(mirror.step_count)))
        whole = [line for line in self._of("held") if line["ledger"].startswith("mirror")]
        if not whole:
            self._tally.lost.append("the mirror ended without saying what it held")
        for line in whole:
            held = {name: line[name] for name in now}
            if held != now:
                self._tally.lost.append(f"{line['ledger']} held {held}, and a mirror now {now}")
        if now["step_count"] != STEPS * len(now["fragments"]):
            self._tally.double.append(f"{now['step_count']} steps: {now['fragments']}")
        found: dict[str, list[int]] = defaultdict(list)
        for _, worker, index in now["fragments"]:
            found[worker].append(index)
        acknowledged: Counter[str] = Counter(worker for worker, _ in self._appended)
        answered: Counter[str] = Counter(line["worker"] for line in self._of("appended"))
        for worker, written in Counter(worker for worker, _ in self._written()).items():
            # A worker that was killed while it asked does not know what became of that.
            may_be = acknowledged[worker] + written - answered[worker]
            least, most = acknowledged[worker], may_be
            if found[worker] != list(range(len(found[worker]))):
                self._tally.double.append(f"{worker}'s fragments are mirrored as {found[worker]}")
            if not least <= len(found[worker]) <= most:
                self._tally.lost.append(
                    f"{len(found[worker])} fragments of {worker} are mirrored, {least} to {most} in"
                )

    def _blame(self, column: str, problem: str) -> None:
        """A problem, unless the books were set back: then ids of chunks were given once more."""
        if any(each.rolls_back for each in self._tally.olders):
            self._tally.younger += 1
        else:
            getattr(self._tally, column).append(problem)

    def _check_counters(self) -> None:
        """Whatever came in is held, or left for a reason that a counter names."""
        state = self._client.get_buffer().state
        counters = state.counters
        left = sum(count for name, count in counters.items() if name.startswith("chunks_evicted"))
        discarded = sum(
            count for name, count in counters.items() if name.startswith("fragments_discarded")
        )
        if counters["chunks_closed"] != state.chunk_count + left:
            self._tally.lost.append(
                f"{counters['chunks_closed']} chunks closed, {state.chunk_count} held, {left} left"
            )
        closed, in_chunks = counters["chunks_closed"], counters["fragments_admitted"] - discarded
        least = GROUP_MIN if self._has_groups else self._per_chunk
        if not least * closed <= in_chunks <= self._per_chunk * closed:
            self._tally.lost.append(
                f"{counters['fragments_admitted']} fragments admitted, {closed} chunks closed, "
                f"{discarded} discarded"
            )
        sure = sum(not self._tally.is_rolled_back(line) for line in self._appended.values())
        if counters["fragments_admitted"] < sure:
            self._tally.lost.append(
                f"{sure} acknowledged for good, {counters['fragments_admitted']} admitted"
            )

    def _check_acknowledged(self) -> None:
        """The server still knows the last fragment that each worker was told is in.

        Of a group it knows all.
        """
        latest: dict[str, int] = {}
        members: list[Identity] = []
        for (worker, index), line in self._appended.items():
            if self._tally.is_rolled_back(line):
                self._tally.younger += not self._is_known((worker, index))
            elif self._has_groups:
                members.append((worker, index))
            else:
                latest[worker] = max(index, latest.get(worker, -1))
        for start in range(0, len(members), PROBES):
            probed = members[start : start + PROBES]
            if self._is_known(*probed):
                continue
            latest |= {
                worker: index for worker, index in probed if not self._is_known((worker, index))
            }
        for worker, index in latest.items():
            if not self._is_known((worker, index)):
                self._tally.lost.append(f"{worker}/{index} was acknowledged and is not known")

    def _is_known(self, *identities: Identity) -> bool:
        """Whether the server answers DUPLICATE for all of these, whatever their payloads."""
        probes = [
            FragmentMetadata(
                worker_id=worker,
                fragment_index=index,
                session_id=SESSION,
                model_version_min=0,
                model_version_max=0,
                payload=PayloadReference("0" * 32, 1),
                step_count=STEPS,
            )
            for worker, index in identities
        ]
        try:
            results = self._client.service.append_fragments(probes).results
        except SchemaMismatchError:
            return False  # One is judged as a new one, which has no schema.
        return {AdmissionOutcome.DUPLICATE} == {result.outcome for result in results}

    def _check_store(self) -> None:
        """Books and store agree byte for byte once orphans had their time."""
        report: dict[str, int] = {}

        def agree() -> bool:
            report.update(fsck_report("--store", self._world.audit_url))
            return not any(report[name] for name in MUST_BE_0)

        try:
            eventually_sync(agree, "books and store agreeing", within_s=SETTLE_S)
        except AssertionError:
            self._tally.leaked.append(f"fsck: {report}")
        state = self._client.get_buffer().state
        weights = report["book_bytes"] - state.payload_bytes
        if weights < 0:
            self._tally.lost.append(f"{report} in the journal, {state.payload_bytes} bytes told")

    def _check_that_nothing_is_left(self) -> None:
        """The session's end leaves no payload, no lease, no waiter."""
        with contextlib.suppress(WaitElapsedError):
            lease = self._client.fetch(fragment_count=self._per_chunk, max_wait_s=0)
            lease.release(ReleaseMode.CONSUMED)
        self._client.end_session(SESSION)
        try:
            eventually_sync(lambda: not self._world.payloads(), "payloads going", within_s=60)
        except AssertionError:
            self._tally.leaked += [f"payload {each}" for each in self._world.payloads()]
        state = self._client.get_buffer().state
        if state.lease_count or state.waiter_count or state.payload_bytes:
            self._tally.leaked.append(f"state: {state}")
