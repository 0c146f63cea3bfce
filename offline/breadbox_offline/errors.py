"""Errors about recorded data. Each names the place (file, row, column) and the problem."""

from collections.abc import Iterator
from contextlib import contextmanager

from breadbox.model.errors import ReplayBufferError

_NAME_CHARACTERS_MAX = 64
_PROBLEM_CHARACTERS_MAX = 500


def named(value: object) -> str:
    """Return a name from data for an error: short text as it is, else its kind, never a value."""
    if isinstance(value, str | bytes) and len(value) <= _NAME_CHARACTERS_MAX:
        return repr(value)
    return f"a {type(value).__name__}"


class OfflineDataError(ReplayBufferError, ValueError):
    """Recorded data cannot be used; `str` names the file, row and column as far as known.

    It is raised before the faulty data is stored, and contains no value of the data.
    """

    def __init__(
        self,
        problem: str,
        *,
        file: str | None = None,
        row: int | None = None,
        column: str | None = None,
    ) -> None:
        if len(problem) > _PROBLEM_CHARACTERS_MAX:
            problem = problem[:_PROBLEM_CHARACTERS_MAX] + "..."
        super().__init__(problem)
        self.problem = problem
        self.file = file
        self.row = row
        self.column = column

    def __str__(self) -> str:
        row = None if self.row is None else f"row {self.row}"
        column = None if self.column is None else f"column {named(self.column)}"
        place = ", ".join(each for each in (self.file, row, column) if each is not None)
        return f"{place}: {self.problem}" if place else self.problem

    def add_place(
        self, *, file: str | None = None, row_offset: int = 0, column: str | None = None
    ) -> None:
        """Add the place in a file; a known place stays, and rows are shifted."""
        self.file = self.file if self.file is not None else file
        self.column = self.column if self.column is not None else column
        if self.row is not None:
            self.row += row_offset


@contextmanager
def placed(
    *, file: str | None = None, row_offset: int = 0, column: str | None = None
) -> Iterator[None]:
    """Add the place in a file to an error raised within, as far as the error lacks it."""
    try:
        yield
    except ValidationError:
        raise  # A finding, which has its place.
    except OfflineDataError as error:
        error.add_place(file=file, row_offset=row_offset, column=column)
        raise


class SchemaError(OfflineDataError):
    """The schema contradicts itself or the data: unknown, doubled, missing or ragged columns."""


class MissingColumnError(SchemaError):
    """A column that this mapping needs is missing."""

    def __init__(self, column: str, held: list[str], *, needed_for: str = "") -> None:
        purpose = f" ({needed_for})" if needed_for else ""
        super().__init__(f"is missing{purpose}; the data has {', '.join(held)}", column=column)


class PackedValueError(OfflineDataError):
    """A packed value is corrupt, too large, or holds something other than numpy data."""


class SpaceMismatchError(OfflineDataError):
    """A value does not fit the space it was recorded for; names the leaf."""


class EpisodeShapeError(OfflineDataError):
    """The parts of an episode do not fit together (T actions need T+1 observations)."""


class EpisodeJoinError(OfflineDataError):
    """Two parts are not consecutive parts of one episode."""


class EpisodeStateError(OfflineDataError):
    """A serialized episode is corrupt or of an unknown layout."""


class ValidationError(OfflineDataError):
    """A finding with the policy to raise; the report has all of them."""


class SamplingError(OfflineDataError):
    """Nothing can be drawn with these arguments."""


class UnsupportedDatasetError(OfflineDataError):
    """No reader is known for the path, its reader is not installed, or it cannot be written."""
