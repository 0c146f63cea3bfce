"""Find out why a learner waits, from two states of its buffer. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from breadbox.model.presets import OFF_POLICY_ADVICE, STORE_FULL_ADVICE
from breadbox.model.sizes import counted
from breadbox.model.types import AssemblyPolicy, BufferDescription, FullPolicy, StalePolicy
from breadbox.shared.step_ends import LEFT_OUT_SHARE, left_out, left_out_text, slow_advice

GROUPS_JUDGED_MIN = 8
"""Groups of a tag and length that have to end before their share is judged."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The cause of a learner's wait, with remedies."""

    cause: str
    """One of OUTAGE, NO_SESSION, HOLD, NOTHING_ARRIVES, WRONG_SESSION, STALE, PRODUCERS_WAIT,
    LEASES, OLDER, LEFT_OUT, QUEUE, TOO_FEW, LIMITER, NONE."""
    headline: str
    """A sentence with the numbers."""
    advice: tuple[str, ...]
    """Remedies, the most likely first."""
    rates: Mapping[str, float]
    """Events per second while the buffer was watched, by name."""
    watched_s: float


_RATES: Mapping[str, tuple[str, ...]] = {
    "fragments admitted": ("fragments_admitted",),
    "fragments refused as stale": ("fragments_stale",),
    "fragments of another session": ("fragments_wrong_session",),
    "fragments asked to wait": ("fragments_buffer_full", "fragments_bytes_full"),
    "chunks completed": ("chunks_closed",),
    "chunks evicted as stale": ("chunks_evicted_stale",),
    "chunks evicted for room": ("chunks_evicted_capacity",),
    "chunks quarantined": ("chunks_evicted_quarantined",),
    "chunks delivered": ("uses",),
    "model versions": ("versions_published",),
}


def rates_of(
    before: BufferDescription, after: BufferDescription, watched_s: float
) -> dict[str, float]:
    """Return events per second between two states; 0 if the server restarted in between."""

    def grown(names: tuple[str, ...]) -> int:
        counted = [
            after.state.counters.get(name, 0) - before.state.counters.get(name, 0) for name in names
        ]
        return max(0, sum(counted))

    return {title: grown(names) / watched_s for title, names in _RATES.items()}


class _Seen:
    def __init__(
        self, before: BufferDescription, after: BufferDescription, watched_s: float
    ) -> None:
        self.after = after
        self.state = after.state
        self.config = after.config
        self.watched_s = watched_s
        self.rates = rates_of(before, after, watched_s)

    def rate(self, title: str) -> float:
        return self.rates[title]

    @property
    def arriving(self) -> float:
        return sum(rate for title, rate in self.rates.items() if title.startswith("fragments "))

    @property
    def fragments_per_chunk(self) -> int:
        return self.config.fragments_per_chunk or 1

    @property
    def sender(self) -> str:
        return "group" if self.config.assembly is AssemblyPolicy.GROUPS else "worker"


def diagnose(
    before: BufferDescription,
    after: BufferDescription,
    watched_s: float,
    *,
    fragment_count: int | None = None,
) -> Diagnosis:
    """Judge why a fetch of *fragment_count* (None: a chunk) waits, by two states *seconds* apart.

    Returns the first cause that applies: what stops everything comes before what slows it.
    """
    seen = _Seen(before, after, watched_s)
    needed = -(-(fragment_count or 1) // seen.fragments_per_chunk)
    is_short = seen.state.chunk_count < needed or bool(seen.state.waiter_count)
    judgement = _nothing_is_decided(seen)
    if judgement is None and (is_short or seen.state.waiting_reason):
        judgement = (
            _leases(seen)
            or _older(seen)
            or _little_comes(seen)
            or _left_out(seen)
            or _too_few(seen, needed)
            or _queue(seen)
            or _limiter(seen)
        )
    return _diagnosis(judgement or _left_out(seen), seen, before)


def diagnose_arrivals(
    before: BufferDescription, after: BufferDescription, watched_s: float
) -> Diagnosis:
    """Judge what keeps fragments from arriving, whatever delays fetches of others."""
    seen = _Seen(before, after, watched_s)
    judgement = _nothing_is_decided(seen) or _little_comes(seen) or _left_out(seen)
    return _diagnosis(judgement, seen, before)


def is_idle(before: BufferDescription, after: BufferDescription) -> bool:
    """Return True if a session is current in which no learner fetched or published meanwhile."""
    seen, count = after.state, "uses"
    return bool(
        after.session_id
        and (before.session_id, before.model_version) == (after.session_id, after.model_version)
        and not (before.state.waiter_count or seen.waiter_count)
        and not (before.state.lease_count or seen.lease_count)
        and before.state.counters.get(count, 0) == seen.counters.get(count, 0)
    )


def idle_text(description: BufferDescription) -> str:
    """Return a message about an idle session, with the remedy."""
    name = description.name
    return (
        f"Session {description.session_id!r} of buffer {name!r} is current, and no learner "
        "fetches, holds a lease or publishes in it: if its learner is gone, `breadbox buffers "
        f"end-session {name}` ends it."
    )


def _quarantined(seen: _Seen) -> list[str]:
    named = seen.state.quarantined
    if not named:
        return []
    count = seen.state.counters.get("chunks_evicted_quarantined", 0)
    last = named[-1]
    workers = ", ".join(repr(each) for each in sorted({each.worker_id for each in named})[:4])
    return [
        f"In quarantine, because readers could not read it: {counted(count, 'chunk')}. Check the "
        f"producers of {workers}; the latest is fragment {last.fragment_index} of worker "
        f"{last.worker_id!r}, payload {last.payload_id}."
    ]


_Judgement = tuple[str, str, list[str]]


def _diagnosis(judgement: _Judgement | None, seen: _Seen, before: BufferDescription) -> Diagnosis:
    cause, headline, advice = judgement or _nothing_wrong(seen)
    # During an outage no learner can fetch or publish, so an idle session means nothing.
    if not seen.state.outage and is_idle(before, seen.after):
        advice = [*advice, idle_text(seen.after)]
    excluded = _left_out(seen)
    if excluded is not None and cause not in ("LEFT_OUT", "NONE"):
        advice = [*advice, excluded[1], *excluded[2]]
    return Diagnosis(cause, headline, (*advice, *_quarantined(seen)), seen.rates, seen.watched_s)


def _nothing_is_decided(seen: _Seen) -> _Judgement | None:
    return _outage(seen) or _no_session(seen) or _hold(seen)


def _little_comes(seen: _Seen) -> _Judgement | None:
    return _nothing_arrives(seen) or _wrong_session(seen) or _stale(seen) or _producers_wait(seen)


def _outage(seen: _Seen) -> _Judgement | None:
    if not seen.state.outage:
        return None
    return (
        "OUTAGE",
        f"Nothing is decided: {seen.state.outage}.",
        [
            "Check the Redis, or the directory, that --store and --journal of the server name: "
            "does it run, has its disk space, and can the server's machine reach it?",
            "Workers and learners retry by themselves for as long as their --reconnect-s allows.",
        ],
    )


def _hold(seen: _Seen) -> _Judgement | None:
    if not seen.state.hold:
        return None
    if "payload store" in seen.state.hold:
        advice = [STORE_FULL_ADVICE, "Producers continue by themselves once there is room."]
    else:
        advice = [
            "Producers continue by themselves as soon as the server has caught up.",
            "If that lasts, the server's machine lacks CPU: its log and metrics "
            "(breadbox_journal_replay_seconds, breadbox_pending_deletions) say which.",
        ]
    return "HOLD", f"The server asks producers to wait: {seen.state.hold}.", advice


def _no_session(seen: _Seen) -> _Judgement | None:
    if seen.after.session_id:
        return None
    headline = f"No session is current in buffer {seen.after.name!r}, so nothing is admitted"
    if not seen.state.counters.get("sessions_started"):
        remedy = "Start the learner, or call start_session() in it before it fetches."
        return "NO_SESSION", f"{headline}.", [remedy]
    return (
        "NO_SESSION",
        f"{headline}: the last session has ended, because its learner is done or was stopped.",
        [
            "If that run is done, there is nothing to do; the learner's log says why it ended.",
            "To train on or anew start the learner, or call start_session(): workers wait for it.",
        ],
    )


def _leases(seen: _Seen) -> _Judgement | None:
    limit = seen.config.leases_max
    if limit is None or seen.state.lease_count < limit:
        return None
    return (
        "LEASES",
        f"Active: {counted(seen.state.lease_count, 'lease')}, which is leases_max; a fetch waits "
        "until one ends.",
        [
            "Leave `with client.fetch(...)` blocks sooner, or release leases by hand.",
            "Raise leases_max, or shorten lease_s if learners die with leases.",
        ],
    )


def _older(seen: _Seen) -> _Judgement | None:
    """Where `stale` is wait: for what a fetch waits although there are enough chunks for it."""
    is_enough = seen.state.chunk_count >= (seen.config.groups_per_version or 0)
    if (
        seen.config.stale is not StalePolicy.WAIT
        or not (seen.state.waiter_count and is_enough)
        or not seen.state.waiting_reason
    ):
        return None
    return (
        "OLDER",
        f"A fetch waits for what is older: {seen.state.waiting_reason}.",
        [
            "If its producer is slow, there is nothing to do; with a higher staleness_max fetches "
            "wait less.",
            "If its producer hangs, end it: the wait ends with its ticket, or with the group.",
        ],
    )


def _nothing_arrives(seen: _Seen) -> _Judgement | None:
    if seen.arriving > 0:
        return None
    return (
        "NOTHING_ARRIVES",
        f"No fragment arrived in the {seen.watched_s:.1f} s watched; the buffer holds "
        f"{counted(seen.state.chunk_count, 'chunk')} and has seen "
        f"{counted(seen.state.worker_count, seen.sender)} in this session.{_of_groups(seen)}",
        [
            "Check that rollout workers run, and reach this server: `breadbox doctor` there.",
            "An environment that takes long for a fragment looks the same: watch for longer.",
        ],
    )


def _wrong_session(seen: _Seen) -> _Judgement | None:
    wrong = seen.rate("fragments of another session")
    if wrong <= 0.5 * seen.arriving:
        return None
    return (
        "WRONG_SESSION",
        f"{wrong:.3g} of {seen.arriving:.3g} fragments per second are of another session than "
        f"{seen.after.session_id!r}.",
        [
            "Workers adopt a session with the first published version: publish one.",
            "Stop workers that belong to an older run.",
        ],
    )


def _stale(seen: _Seen) -> _Judgement | None:
    stale = seen.rate("fragments refused as stale") + (
        seen.rate("chunks evicted as stale") * seen.fragments_per_chunk
    )
    if stale <= 0.5 * seen.arriving:
        return None
    return (
        "STALE",
        f"{stale:.3g} of {seen.arriving:.3g} fragments per second are staler than staleness_max "
        f"({seen.config.staleness_max}) at version {seen.after.model_version}, which moves by "
        f"{seen.rate('model versions'):.3g} per second.",
        [
            "Publish less often, or raise staleness_max.",
            "Make fragments shorter, so that they arrive before the version has moved on.",
            "Check that workers adopt new weights: their model version should follow.",
            OFF_POLICY_ADVICE,
        ],
    )


def _producers_wait(seen: _Seen) -> _Judgement | None:
    asked_to_wait = seen.rate("fragments asked to wait")
    if asked_to_wait <= 0 or seen.config.full_policy is not FullPolicy.BLOCK:
        return None
    if seen.rate("fragments admitted") > asked_to_wait:
        return None
    return (
        "PRODUCERS_WAIT",
        f"The server asks producers to wait: it holds {counted(seen.state.chunk_count, 'chunk')} "
        f"of {seen.config.capacity_chunks}; leases, which keep chunks too: "
        f"{seen.state.lease_count}; {seen.state.payload_bytes} bytes of "
        f"{seen.config.capacity_bytes} are taken.",
        [
            "Raise capacity_chunks or capacity_bytes, or fetch fewer fragments at a time.",
            "Leased chunks count against both capacities, as open chunks do: release leases "
            "sooner.",
        ],
    )


def _of_groups(seen: _Seen) -> str:
    """Describe groups that lack members, groups dropped as equal, and requests for tickets."""
    equal, name = seen.state.counters.get("groups_equal", 0), seen.config.drop_equal or "number"
    rest = ""
    if equal:
        rest = f" Dropped because all members had one {name}: {counted(equal, 'group')}."
    if waiting_count := seen.state.ticket_waiter_count:
        requests = counted(waiting_count, "request")
        rest += f" Waiting for tickets: {requests}; {seen.state.ticket_waiting_reason}."
    groups = seen.state.open_groups[:3]
    if not groups:
        return rest
    size, parts = seen.fragments_per_chunk, []
    for group, count, members, silent_s in groups:
        more = f" and {size - count - len(members)} more" if size - count > len(members) else ""
        plural = "" if size - count == 1 else "s"
        listed = ", ".join(map(str, members))
        parts.append(f"group {group!r} lacks member{plural} {listed}{more} for {silent_s:.0f} s")
    open_groups = counted(seen.state.open_chunk_count, "open group")
    return f" Of {open_groups}, {'; '.join(parts)}.{rest}"


def _left_out(seen: _Seen) -> _Judgement | None:
    return _workers_left_out(seen) or _groups_left_out(seen)


def _groups_left_out(seen: _Seen) -> _Judgement | None:
    """Name the tags and lengths of which far fewer groups are delivered than of all together."""
    rows = seen.state.tagged_groups
    delivered_count = sum([each.delivered_count for each in rows])
    count = delivered_count + sum([each.dropped_count for each in rows])
    dropped = [
        f"of {seen.config.tag}={each.tag}, length {each.length_min}-: "
        f"{each.delivered_count} of {counted(of_row, 'group')}"
        for each in rows
        if (of_row := each.delivered_count + each.dropped_count) >= GROUPS_JUDGED_MIN
        and each.delivered_count * count < LEFT_OUT_SHARE * delivered_count * of_row
    ]
    if not dropped:
        return None
    return (
        "LEFT_OUT",
        f"Of {counted(count, 'group')} that ended, {delivered_count} are delivered; "
        f"{'; '.join(dropped[:4])}.",
        [
            "What takes long becomes stale: begin fewer groups, with tickets (groups_per_version), "
            "raise staleness_max, or let stale be keep."
        ],
    )


def _workers_left_out(seen: _Seen) -> _Judgement | None:
    workers = seen.after.workers
    text = left_out_text(workers)
    if not text:
        return None
    remedy = slow_advice(left_out(workers), seen.config.staleness_max)
    return (
        "LEFT_OUT",
        f"{text}.",
        [
            *([remedy] if remedy else []),
            "`breadbox stats` shows where the steps of each worker go; more workers of this kind "
            "change nothing, and more fast ones leave out the slow.",
        ],
    )


def _too_few(seen: _Seen, needed: int) -> _Judgement | None:
    have, rate = seen.state.chunk_count, seen.rate("chunks completed")
    if have >= needed:
        return None
    headline = f"Too few chunks: {have} held, {needed} needed; "
    if rate > 0:
        headline += f"{rate:.3g} per second arrive, so expect about {(needed - have) / rate:.0f} s."
    else:
        headline += (
            f"none was completed in {seen.watched_s:.1f} s, {seen.state.open_chunk_count} are open "
            f"and need {counted(seen.fragments_per_chunk, 'fragment')} each.{_of_groups(seen)}"
        )
    advice = ["Add workers, or fetch fewer fragments at a time."]
    if (seen.config.uses_max or 1) == 1:
        advice.append("Let chunks be used more than once: raise uses_max.")
    return "TOO_FEW", headline, advice


def _queue(seen: _Seen) -> _Judgement | None:
    if not seen.state.waiter_count:
        return None
    rate = seen.rate("chunks completed")
    return (
        "QUEUE",
        f"Fetches waiting: {seen.state.waiter_count} ({seen.state.waiting_reason}); {rate:.3g} "
        "chunks per second arrive.",
        ["Add workers, or let learners fetch fewer fragments at a time."],
    )


def _limiter(seen: _Seen) -> _Judgement | None:
    if not seen.state.waiting_reason:
        return None
    return (
        "LIMITER",
        f"A fetch waits: {seen.state.waiting_reason}.",
        ["Change the limiter with `breadbox buffers update`, or wait for more chunks."],
    )


def _nothing_wrong(seen: _Seen) -> _Judgement:
    held = seen.state.fragment_count
    return (
        "NONE",
        f"No learner needs to wait: {counted(held, 'fragment')} in "
        f"{counted(seen.state.chunk_count, 'chunk')} could be fetched now, and "
        f"{seen.rate('fragments admitted'):.3g} per second arrive.",
        [],
    )
