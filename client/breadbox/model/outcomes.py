"""Results of appended fragments."""

from dataclasses import dataclass
from enum import Enum


class AdmissionOutcome(Enum):
    """The server's verdict on an appended fragment."""

    UNSPECIFIED = "unspecified"
    ADMITTED = "admitted"
    DUPLICATE = "duplicate"
    STALE = "stale"
    WRONG_SESSION = "wrong_session"
    BUFFER_FULL = "buffer_full"
    BYTES_FULL = "bytes_full"
    PAYLOAD_MISSING = "payload_missing"
    SCHEMA_UNKNOWN = "schema_unknown"
    """The schema is unknown to the server: the library declares it and resends."""
    GROUP_ENDED = "group_ended"
    """The fragment's group has ended without it, for the reason in `group_end`."""
    PART_CONFLICT = "part_conflict"
    """The member has a part of this name with other bytes."""

    @property
    def asks_to_wait(self) -> bool:
        """True if the same fragment should be sent again after the reply's retry delay."""
        return self in (AdmissionOutcome.BUFFER_FULL, AdmissionOutcome.BYTES_FULL)


class GroupEndReason(Enum):
    """Why a group ended."""

    UNSPECIFIED = "unspecified"
    COMPLETE = "complete"
    """All its members were admitted, and are a chunk."""
    PARTIAL = "partial"
    """No member was admitted for `open_chunk_s`, or those that lacked were given back; those that
    came, at least `group_min`, are a chunk."""
    INCOMPLETE = "incomplete"
    """No member was admitted for `open_chunk_s`, and there were fewer. They were dropped."""
    STALE = "stale"
    """A member was staler than `staleness_max`. The group was dropped."""
    LOST = "lost"
    """A payload was lost, or could not be read, or the group's ticket expired before the first
    member. The group was dropped."""
    EVICTED = "evicted"
    """Its chunk was evicted for room, or deleted, before a learner used it."""
    EQUAL = "equal"
    """All its members have the same number of the name in `drop_equal`. They were dropped."""
    GIVEN_BACK = "given_back"
    """Its ticket, or a member, was given back, so that it could not have `group_min` members. The
    group was dropped."""


@dataclass(frozen=True, slots=True)
class AppendResult:
    """The result of one fragment; `first_outcome` of a DUPLICATE is that of its first append."""

    outcome: AdmissionOutcome
    first_outcome: AdmissionOutcome = AdmissionOutcome.UNSPECIFIED
    group_end: GroupEndReason = GroupEndReason.UNSPECIFIED
    """Why the group of a GROUP_ENDED has ended."""

    def __repr__(self) -> str:
        is_known = self.first_outcome is not AdmissionOutcome.UNSPECIFIED
        first = f", first {self.first_outcome.value}" if is_known else ""
        has_end = self.group_end is not GroupEndReason.UNSPECIFIED
        end = f", {self.group_end.value}" if has_end else ""
        return f"AppendResult({self.outcome.value}{first}{end})"
