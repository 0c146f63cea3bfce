"""What the worker needs of the service; `breadbox.Client` is one, tests bring their own."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from breadbox.model.fragment import Fragment
from breadbox.model.types import AppendResult, BufferDescription, EpisodeReport, ModelState


class Service(Protocol):
    """A connection to the buffer that the worker fills. Thread-safe.

    Methods do what those of `breadbox.Client` do, and raise what they raise.
    """

    def watch_model(
        self, known: ModelState | None = None, *, max_wait_s: float = 0.0
    ) -> ModelState | None:
        """See `breadbox.Client.watch_model`."""

    def load_model(
        self, newer_than: ModelState | None = None
    ) -> tuple[ModelState, dict[str, Any]] | None:
        """See `breadbox.Client.load_model`."""

    def append_many(
        self,
        fragments: Sequence[Fragment],
        *,
        buffer: str | None = None,
        codecs: str | Mapping[str, str] | None = None,
    ) -> list[AppendResult]:
        """See `breadbox.Client.append_many`."""

    def report_episodes(self, episodes: Sequence[EpisodeReport]) -> None:
        """See `breadbox.Client.report_episodes`."""

    def get_buffer(self, name: str | None = None) -> BufferDescription:
        """See `breadbox.Client.get_buffer`."""

    def close(self) -> None:
        """See `breadbox.Client.close`: calls of other threads fail with ClosedError."""
