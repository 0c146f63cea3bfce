"""What is remembered of a worker's fragments, so that appending again is a no-op (B2)."""

from breadbox_server.core.model.inputs import AdmissionOutcome

_CODES = {AdmissionOutcome.ADMITTED: 1, AdmissionOutcome.STALE: 2}
_OUTCOMES = {code: outcome for outcome, code in _CODES.items()}
_NEVER_JUDGED = 0


class OutcomeWindow:
    """First outcomes of the latest indices of one worker, one byte each.

    The window ends below `next_index` and reaches back a fixed number of indices. An index in it
    that was skipped was never judged and may still come (late, as a gap of its own); an index
    below it is taken for judged, with an outcome nobody remembers.
    """

    __slots__ = ("_codes", "next_index")

    def __init__(self, next_index: int = 0, codes: bytes = b"") -> None:
        self.next_index = next_index
        """One more than the largest index judged; 0 before the first."""
        self._codes = bytearray(codes)

    def was_judged(self, index: int) -> bool:
        """Whether an index was judged before, as far as the window still shows."""
        if index >= self.next_index:
            return False
        place = index - self.next_index + len(self._codes)
        return place < 0 or self._codes[place] != _NEVER_JUDGED

    def outcome(self, index: int) -> AdmissionOutcome | None:
        """Give the first outcome of an index; None when never judged or forgotten."""
        place = index - self.next_index + len(self._codes)
        if index >= self.next_index or place < 0:
            return None
        return _OUTCOMES.get(self._codes[place])

    def remember(self, index: int, outcome: AdmissionOutcome, size_max: int) -> None:
        """Note the outcome of an index that was not judged before, and forget the oldest.

        Args:
            index: Any for which `was_judged` is False.
            outcome: ADMITTED or STALE; other outcomes are not remembered.
            size_max: Indices that the window may span afterwards.
        """
        skipped_count = index - self.next_index
        if skipped_count == 0:
            self._codes.append(_CODES[outcome])
            self.next_index = index + 1
        elif skipped_count > 0:
            self._codes.extend(bytes(min(skipped_count, size_max)))
            self._codes.append(_CODES[outcome])
            self.next_index = index + 1
        else:
            self._codes[skipped_count] = _CODES[outcome]
        if len(self._codes) > size_max:
            del self._codes[: len(self._codes) - size_max]

    def codes(self) -> bytes:
        """Give the window as bytes, oldest index first, for a snapshot."""
        return bytes(self._codes)
