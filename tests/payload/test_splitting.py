"""Micro-batches: every sequence once, never too large, as many on every rank."""

from collections.abc import Callable
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breadbox.reading.splitting import micro_batches
from support import growth

TOKENS_MAX = 100
LENGTHS = st.lists(st.integers(1, TOKENS_MAX), min_size=1, max_size=40)


def tokens_of(part: list[int], lengths: list[int], *, is_padded: bool) -> int:
    found = [lengths[position] for position in part]
    return len(found) * max(found, default=0) if is_padded else sum(found)


@pytest.mark.parametrize("is_padded", [False, True], ids=["packed", "padded"])
@given(shares=st.lists(LENGTHS, min_size=1, max_size=4))
def test_ranks_get_equal_counts_and_each_sequence_once_within_the_tokens(
    shares: list[list[int]], is_padded: bool
) -> None:
    split = [micro_batches(share, shares, TOKENS_MAX, is_padded=is_padded) for share in shares]
    assert 1 == len({len(parts) for parts in split})
    for share, parts in zip(shares, split, strict=True):
        assert [*range(len(share))] == sorted(position for part in parts for position in part)
        assert all(part == sorted(part) for part in parts)
        assert all(tokens_of(part, share, is_padded=is_padded) <= TOKENS_MAX for part in parts)
        # Only what is missing is empty, at the end.
        assert min(len(parts), len(share)) == len([part for part in parts if part])
        assert parts == sorted(parts, key=lambda part: (not part, part))


@given(lengths=LENGTHS)
def test_lengths_alone_decide_whatever_the_rank(lengths: list[int]) -> None:
    alone = micro_batches(lengths, [lengths], TOKENS_MAX, is_padded=False)
    assert alone == micro_batches(lengths, [lengths, lengths], TOKENS_MAX, is_padded=False)


@given(lengths=st.lists(st.integers(1, TOKENS_MAX), min_size=1, max_size=7))
def test_padded_micro_batches_are_as_few_as_can_be(lengths: list[int]) -> None:
    parts = micro_batches(lengths, [lengths], TOKENS_MAX, is_padded=True)
    assert fewest(frozenset(range(len(lengths))), lengths) == len(parts)


def fewest(left: frozenset[int], lengths: list[int]) -> int:
    """Try all splits."""
    if not left:
        return 0
    first, *others = sorted(left)
    return min(
        1 + fewest(left - {first, *more}, lengths)
        for size in range(len(others) + 1)
        for more in combinations(others, size)
        if tokens_of([first, *more], lengths, is_padded=True) <= TOKENS_MAX
    )


def test_micro_batches_are_balanced() -> None:
    lengths = [5, 5, 4, 4, 3, 3, 3]  # Graham's own example: 11/9 of the best, 9 in each of 3.
    parts = micro_batches(lengths, [lengths], 11, is_padded=False)
    assert [8, 8, 11] == sorted(sum(lengths[at] for at in part) for part in parts)


@pytest.mark.parametrize("is_padded", [False, True], ids=["packed", "padded"])
@growth.marked
def test_each_sequence_of_many_takes_as_long_to_split_as_one_of_few(is_padded: bool) -> None:
    def split(count: int) -> Callable[[], object]:
        # Two of 40 fit together: many more micro-batches than their tokens need. And the padded
        # part of a rank with short ones is halved until there are as many as another rank needs.
        own = [1 if is_padded else 40] * count
        shares = [own, [TOKENS_MAX] * count] if is_padded else [own]
        return lambda: micro_batches(own, shares, TOKENS_MAX, is_padded=is_padded)

    growth.check(split, 4096)
