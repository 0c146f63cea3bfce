"""What stores do alike, wherever they keep payloads."""

import copy
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Self

from breadbox.model.errors import ClosedError, PayloadCorruptError, StoreError
from breadbox.model.types import PayloadReference
from breadbox.stores.common.base import Part
from breadbox.stores.common.deadline import Deadline
from breadbox.stores.common.keys import is_sound

_log = logging.getLogger(__name__)


def check_sound(references: Iterable[PayloadReference]) -> None:
    """See that references, which may come from the network, are within all bounds.

    Raises:
        PayloadCorruptError: One is not.
    """
    for reference in references:
        if not is_sound(reference):
            raise PayloadCorruptError(f"a payload reference is out of bounds: {reference}")


class AbstractStore:
    """A store that is open until it is closed, and whose calls have a deadline.

    Args:
        silence_s: Seconds of silence that end a call, where `within` does not say otherwise.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._deadline: Deadline | None = None
        self._closed = threading.Event()

    def within(self, deadline: Deadline) -> Self:
        """See PayloadStore."""
        view = copy.copy(self)
        view._deadline = deadline  # noqa: SLF001 - another of this class
        return view

    def map_many(self, references: Sequence[PayloadReference]) -> list[memoryview] | None:
        """See PayloadStore. None: it is not on this host, as far as is known."""
        del references
        return None

    def close(self) -> None:
        """See PayloadStore."""
        if not self._closed.is_set():
            self._closed.set()
            self._close()

    def _close(self) -> None:
        """Close connections; called once."""

    def _begin(self) -> Deadline:
        """Begin a call; returns when it ends at the latest.

        Raises:
            ClosedError: The store was closed.
        """
        if self._closed.is_set():
            raise ClosedError("the payload store is closed")
        return self._deadline or Deadline(self._silence_s)


class AbstractParts(AbstractStore, ABC):
    """A store that also moves parts of payloads; whole ones are written as such."""

    def write_many(self, payloads: Sequence[Sequence[memoryview]]) -> list[PayloadReference]:
        """See PayloadStore. On failure nothing of the call is left behind, or it expires."""
        bounded = self.within(self._begin())
        references = [self.new_reference(sum(map(len, buffers))) for buffers in payloads]
        try:
            bounded.write_parts([Part(*each) for each in zip(references, repeat(0), payloads)])
        except BaseException:
            try:
                bounded.discard_parts(references)
            except StoreError as error:
                _log.debug("a failed write is left to its expiry: %s", error)
            raise
        return references

    @abstractmethod
    def new_reference(self, size_bytes: int) -> PayloadReference:
        """See PayloadParts."""

    @abstractmethod
    def write_parts(self, parts: Sequence[Part]) -> None:
        """See PayloadParts."""

    @abstractmethod
    def discard_parts(self, references: Sequence[PayloadReference]) -> None:
        """See PayloadParts."""

    def read_parts(self, parts: Sequence[Part]) -> None:
        """See PayloadParts."""
