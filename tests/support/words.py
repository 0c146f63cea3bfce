"""A detokenizer, for consoles that tests run."""

from collections.abc import Sequence


def spelled(token_ids: Sequence[int]) -> list[str]:
    """Return the number of each token in angle brackets."""
    return [f"<{each}>" for each in token_ids]
