"""Parts of members: attached by any producer, listed, read, and dropped with their rows (B34).

A part has no steps (`step_count` is 0) and makes nothing stale. A fragment without steps and
without a name has numbers alone, which are merged into those of its member.
"""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

from breadbox_server.core.lacking import Wanted
from breadbox_server.core.model import errors, inputs
from breadbox_server.core.model.config import MEMBER_PARTS_MAX, NUMBERS_MAX, TOKENS
from breadbox_server.core.model.events import DiscardReason
from breadbox_server.core.model.ids import WorkerId
from breadbox_server.core.model.inputs import AdmissionOutcome, Appended, Fragment
from breadbox_server.core.model.validation import check_part_name
from breadbox_server.core.state.assembly import Worker
from breadbox_server.core.state.buffer_state import BufferState
from breadbox_server.core.state.groups import GroupChunk, Groups, merged

_AGAIN: Final = Appended(AdmissionOutcome.DUPLICATE, AdmissionOutcome.ADMITTED)


class MemberSeen(NamedTuple):
    """A member of an open group, with the names of its parts in the order in which they came."""

    group: WorkerId
    member: int
    parts: tuple[str, ...]
    numbers: str


def _open(state: BufferState, group: WorkerId) -> GroupChunk | None:
    chunk = state.assembly.open.get(group)
    return chunk if isinstance(chunk, GroupChunk) else None


def known(groups: Groups, worker: Worker | None, fragment: Fragment) -> Fragment | None:
    """Return the fragment that makes another one a duplicate, or a conflict; None if it is new.

    A fragment that replaces is a duplicate only if it would change nothing: its part has the same
    bytes and is the last of its member, and its numbers are set already.
    """
    chunk = groups.chunk_of(worker)
    found = None if chunk is None else chunk.find(fragment.key)
    if chunk is None or found is None:
        return None
    if not (found.payload.size_bytes and fragment.payload.size_bytes):
        return None
    if fragment.replaces and fragment.part and not groups.fragments_per_chunk:
        numbers = chunk.numbers.get(fragment.fragment_index) or "{}"
        is_same = found.schema_hash == fragment.schema_hash
        # As text: 1 is not true, and NaN is NaN.
        brings = merged(numbers, fragment.numbers or "{}") != merged(numbers, "{}")
        is_last = next(reversed(chunk.members[fragment.fragment_index])) == fragment.part
        return found if is_same and is_last and not brings else None
    return found


def again(known: Fragment, fragment: Fragment) -> Appended:
    """Answer a fragment with the key of a known one."""
    if fragment.part and known.schema_hash != fragment.schema_hash:
        return Appended(AdmissionOutcome.PART_CONFLICT)
    return _AGAIN


def check(state: BufferState, fragment: Fragment, worker: Worker | None) -> None:
    """Refuse a part where there are no groups, and one too many of a member."""
    groups = state.assembly
    if not isinstance(groups, Groups):
        raise errors.InvalidArgumentError("part", "is for buffers with `assembly` groups alone")
    if fragment.replaces and groups.fragments_per_chunk:
        raise errors.InvalidArgumentError(
            "replaces", "is for buffers of rows, which have `fragments_per_chunk` 0"
        )
    chunk, member = groups.chunk_of(worker), fragment.fragment_index
    if chunk is None or member not in chunk.members:
        return
    count = len(chunk.members[member].keys() | {fragment.part})
    if count > MEMBER_PARTS_MAX:
        raise errors.InvalidArgumentError(
            "part", f"is one of {count} of its member; the limit is {MEMBER_PARTS_MAX}"
        )
    numbers = chunk.numbers.get(member)
    if numbers and fragment.numbers:
        count = len(json.loads(numbers).keys() | json.loads(fragment.numbers).keys())
        if count > NUMBERS_MAX:
            raise errors.InvalidArgumentError(
                "numbers", f"are {count} with those of its member; the limit is {NUMBERS_MAX}"
            )


def replaced_by(state: BufferState, worker: Worker, fragment: Fragment) -> Fragment | None:
    """Return the fragment that an admitted one replaces, or itself if it has only numbers."""
    chunk = _open(state, worker.worker_id)
    if chunk is None:
        return None
    return fragment if chunk.only_merges(fragment) else chunk.find(fragment.key)


def drop(state: BufferState, input: inputs.DropMembers, *, now: float) -> int:
    """Drop rows by their keys; return how many there were."""
    groups = state.assembly
    if not isinstance(groups, Groups) or not state.config.keeps_rows:
        raise errors.InvalidArgumentError(
            "buffer", "keeps no rows: that needs `assembly` groups and `fragments_per_chunk` 0"
        )
    keys, gone = [], list[Fragment]()
    for name, member in zip(input.groups, input.members, strict=True):
        if row := groups.drop_row(name, member):
            keys.append((name, member))
            gone += row
    if keys:
        state.discard(gone, DiscardReason.DROPPED)
        names, members = zip(*keys, strict=True)
        state.shared.record(inputs.DropMembers(input.buffer, names, members), now)
    state.tell_disposable()
    return len(keys)


def listed(
    state: BufferState, prefix: str, after: tuple[str, int], count_max: int
) -> list[MemberSeen]:
    """List members of open groups with names that begin with a prefix, in order, after a key."""
    return list(islice(_members(state, prefix, after), count_max))


def _members(state: BufferState, prefix: str, after: tuple[str, int]) -> Iterator[MemberSeen]:
    groups = state.assembly
    for name in groups.names_from(max(prefix, after[0])) if isinstance(groups, Groups) else ():
        if not name.startswith(prefix):
            return
        chunk = _open(state, name)
        assert chunk is not None, "it is open"
        for member in sorted(chunk.members):
            if (name, member) > after:
                yield _seen(chunk, member)


def _seen(chunk: GroupChunk, member: int) -> MemberSeen:
    held = chunk.members[member].items()
    parts = tuple([part or TOKENS for part, fragment in held if fragment.payload.size_bytes])
    return MemberSeen(chunk.worker_id, member, parts, chunk.numbers.get(member, ""))


def listed_by_key(state: BufferState, keys: Iterable[tuple[WorkerId, int]]) -> list[MemberSeen]:
    """List members of open groups by their keys, without those that are not there."""
    found = [(_open(state, name), member) for name, member in keys]
    return [_seen(chunk, m) for chunk, m in found if chunk is not None and m in chunk.members]


def claim(
    state: BufferState,
    wanted: Wanted,
    count_max: int,
    may_take: Callable[[WorkerId], bool],
    is_awaited: Callable[[Wanted], bool],
) -> list[list[Fragment]]:
    """Claim members that lack a part and have their sequences; return each with all of its parts.

    Those of the longest silent group come first. No other claim gets them before `end_claim`.
    """
    if not wanted.part:
        raise errors.InvalidArgumentError("lacking", "must not be empty")
    check_part_name("lacking", wanted.part)
    groups = state.assembly
    if not isinstance(groups, Groups):
        raise errors.InvalidArgumentError("buffer", "has no members: that needs `assembly` groups")
    groups.lacking.ask(wanted, may_take, groups.held(), is_awaited)
    taken: list[list[Fragment]] = []
    for name, member in groups.lacking.take(wanted, count_max):
        chunk = groups.chunk_of(groups.workers[name])
        assert chunk is not None, "K1"
        parts = sorted(chunk.members[member].items())
        taken.append(chunk.with_numbers([each for _, each in parts]))
    return taken


def found(
    state: BufferState, group: WorkerId, member: int, parts: Collection[str]
) -> Sequence[Fragment] | None:
    """Return the parts of a member, of these names or all, or None if it is not there."""
    chunk = _open(state, group)
    if chunk is None or member not in chunk.members:
        return None
    return [
        fragment
        for part, fragment in chunk.members[member].items()
        if fragment.payload.size_bytes and (not parts or (part or TOKENS) in parts)
    ]
