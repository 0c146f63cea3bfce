"""How many examples a property gets where `nightly` asks for very many."""

from hypothesis import settings

fewer = settings(max_examples=min(settings().max_examples, 3_000))
"""For examples that are dear to make: drawn trees, and the encoding of video."""
