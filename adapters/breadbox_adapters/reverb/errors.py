"""What goes wrong, under Reverb's names: the library's own errors, so that either name catches."""

from collections.abc import Sequence

from breadbox.model.errors import BufferNotFoundError, DeadlineExceededError
from breadbox.model.errors import ReplayBufferError as ReverbError

__all__ = ["DeadlineExceededError", "ReverbError", "TableNotFoundError"]


class TableNotFoundError(BufferNotFoundError):
    """No table, and so no buffer, has this name; says which there are."""

    def __init__(self, table: str, known: Sequence[str]) -> None:
        super().__init__(table)
        self.known = tuple(known)
        self.add_note(f"There are {', '.join(map(repr, known)) or 'none'}.")

    def __str__(self) -> str:
        """Say so in Reverb's words."""
        known = ", ".join(map(repr, self.known)) or "none"
        return f"no table is named {self.buffer!r}; there are {known} (create_tables() makes more)"
