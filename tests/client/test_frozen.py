"""What is made by a maker is as if its class had made it."""

import copy
from dataclasses import FrozenInstanceError, replace

import pytest

from breadbox.frozen import maker
from breadbox.types import PayloadReference


def test_what_is_made_cannot_be_told_from_what_the_class_makes() -> None:
    made, usual = maker(PayloadReference)("a" * 32, 7, 0), PayloadReference("a" * 32, 7)
    assert type(made) is PayloadReference
    assert (usual, hash(usual), repr(usual)) == (made, hash(made), repr(made))
    assert usual == copy.deepcopy(made) == replace(made)


def test_what_is_made_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        maker(PayloadReference)("a" * 32, 7, 0).size_bytes = 8  # type: ignore[misc]


def test_all_fields_are_to_be_given() -> None:
    with pytest.raises(TypeError):
        maker(PayloadReference)("a" * 32, 7)
