"""Attach parts to members of open groups; list, read and drop rows, as operations for both clients.

A call is repeated as any other: the same part again is a duplicate, numbers are set, not added to,
and what is dropped stays so.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final

from breadbox.model import errors
from breadbox.model.fragment import Part
from breadbox.model.fragment import Sequence as TokenSequence
from breadbox.model.types import (
    AdmissionOutcome,
    AppendResult,
    FragmentReference,
    LeaseGrant,
    MemberDescription,
    MembersRead,
)
from breadbox.operations import calls, operations
from breadbox.operations.operations import Context, Operation

KEYS_MAX: Final = 4096
"""Parts, or keys, of one call."""
LISTED_MAX: Final = 1024
"""Keys of members that one call lists."""
TOKENS: Final = "tokens"
"""Name of the part that a sequence is."""
Key = tuple[str, int]


def attach(
    context: Context, buffer: str, parts: Part | Iterable[Part], *, replace: bool = False
) -> Operation[list[AppendResult]]:
    """Attach parts; raise what the first refused one says once all were judged."""
    sent = [parts] if isinstance(parts, Part) else list(parts)
    results = yield from operations.append_many(
        context, buffer, sent, replaces=replace, count_max=KEYS_MAX
    )
    for part, result in zip(sent, results, strict=True):
        if result.outcome is AdmissionOutcome.PART_CONFLICT:
            raise errors.PartConflictError(part.group, part.member, part.name)
        if result.outcome is AdmissionOutcome.GROUP_ENDED:
            raise errors.GroupEndedError(part.group, result.group_end.value)
        if result.outcome is AdmissionOutcome.WRONG_SESSION:
            raise errors.SessionEndedError(part.session_id, "")
    return results


def members(
    context: Context, buffer: str, prefix: str, keys: Sequence[Key] | None
) -> Operation[list[MemberDescription]]:
    """List all members of open groups with names that begin with a prefix, or those of keys."""
    found: list[MemberDescription] = []
    if keys is not None:
        for start in range(0, len(keys), LISTED_MAX):
            call = calls.list_members(buffer, "", None, keys[start : start + LISTED_MAX])
            found += (yield from operations.invoke(context, call))[0]
        return found
    after: Key | None = None
    while True:
        call = calls.list_members(buffer, prefix, after)
        page, after = yield from operations.invoke(context, call)
        found += page
        if after is None:
            return found


def read_members(
    context: Context, buffer: str, keys: Sequence[Key], parts: Sequence[str] | None
) -> Operation[list[dict[str, Any]]]:
    """Read the arrays of members, each as one dict; raise MemberNotFoundError if one lacks."""
    wanted = [] if parts is None else list(dict.fromkeys(parts))
    if parts is not None and not wanted:
        raise errors.InvalidRequestError("parts", "must name a part, or be None for all")
    read: list[dict[str, Any]] = []
    while len(read) < len(keys):
        asked = keys[len(read) : len(read) + KEYS_MAX]
        call = calls.read_members(buffer, asked, wanted, context.slot.inline_bytes_max)
        found = yield from operations.invoke(context, call)
        reading = _loaded(context, asked, found, wanted)
        read += yield from operations.under_lease(context, buffer, found.lease_id, reading)
    return read


def _loaded(
    context: Context, keys: Sequence[Key], found: MembersRead, wanted: Sequence[str]
) -> Operation[list[dict[str, Any]]]:
    by_key = _checked(keys, found, wanted)
    stored = []
    if found.references:
        stored = yield from operations.load_fragments(context, found.references, None, None)
    loaded = iter(stored)
    return [_joined(islice(loaded, len(each))) for each in by_key]


def _checked(
    keys: Sequence[Key], found: MembersRead, wanted: Sequence[str]
) -> list[list[FragmentReference]]:
    references = iter(found.references)
    by_key = []
    for (group, member), count in zip(keys, found.part_counts, strict=False):
        if count < 0:
            raise errors.MemberNotFoundError(group, member)
        held = list(islice(references, count))
        names = {each.metadata.part or TOKENS for each in held}
        for part in wanted:
            if part not in names:
                raise errors.MemberNotFoundError(group, member, part)
        by_key.append(held)
    if not by_key:
        raise errors.InternalError("the server read none of the members asked for")
    return by_key


def _joined(stored: Iterator[Any]) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    for each in stored:
        is_sequence = isinstance(each, TokenSequence)
        both = (each.context, each.tokens) if is_sequence else each.values()
        for named in both:
            arrays |= named
    return arrays


def claim(
    context: Context,
    buffer: str,
    lacking: str,
    count: int,
    max_wait_s: float | None,
    lease_s: float | None,
) -> Operation[LeaseGrant]:
    """Claim members that lack a part; raise WaitElapsedError if the wait is over without any."""
    return operations.wait_for(
        context,
        "a member",
        max_wait_s,
        lambda wait_s: calls.claim_members(
            buffer, lacking, count, wait_s, lease_s, context.slot.inline_bytes_max
        ),
    )


def drop_members(context: Context, buffer: str, keys: Iterable[Key]) -> Operation[int]:
    """Drop rows, and return how many there were."""
    named, count = list(keys), 0
    for start in range(0, len(named), KEYS_MAX):
        call = calls.drop_members(buffer, named[start : start + KEYS_MAX])
        count += yield from operations.invoke(context, call)
    return count
