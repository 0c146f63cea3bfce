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

    @property
    def asks_to_wait(self) -> bool:
        """True if the same fragment should be sent again after the reply's retry delay."""
        return self in (AdmissionOutcome.BUFFER_FULL, AdmissionOutcome.BYTES_FULL)


@dataclass(frozen=True, slots=True)
class AppendResult:
    """The result of one fragment; `first_outcome` of a DUPLICATE is that of its first append."""

    outcome: AdmissionOutcome
    first_outcome: AdmissionOutcome = AdmissionOutcome.UNSPECIFIED

    def __repr__(self) -> str:
        is_known = self.first_outcome is not AdmissionOutcome.UNSPECIFIED
        first = f", first {self.first_outcome.value}" if is_known else ""
        return f"AppendResult({self.outcome.value}{first})"
