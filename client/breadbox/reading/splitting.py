"""Split sequences into micro-batches of bounded size: as many on every rank, without a message.

Each rank computes their number from the lengths of the whole grant, so that all ranks take part in
as many collectives.
"""

import heapq
from bisect import bisect_left
from collections.abc import Sequence


def micro_batches(
    lengths: Sequence[int], shares: Sequence[Sequence[int]], tokens_max: int, *, is_padded: bool
) -> list[list[int]]:
    """Return the positions in each micro-batch of a share of sequences, ascending.

    *shares* has the lengths of all ranks, none above *tokens_max*. Padding counts as tokens. The
    last micro-batches are empty where a share has fewer sequences than another needs micro-batches.
    """
    if is_padded:
        count = max([len(_cut(share, tokens_max)) for share in shares])
        dealt = _halved(_cut(lengths, tokens_max), count)
    else:
        count = max([_least_count(share, tokens_max) for share in shares])
        if not _fit(shares, count, tokens_max):
            # With one more the largest has no more tokens, so the least that is enough is found by
            # halves; one for each sequence is.
            more = range(count + 1, max(map(len, shares)))
            count = more.start + bisect_left(
                more, True, key=lambda count: _fit(shares, count, tokens_max)
            )
        dealt = _dealt(lengths, count, tokens_max)
    return sorted(map(sorted, dealt), key=lambda each: (not each, each))


def _least_count(lengths: Sequence[int], tokens_max: int) -> int:
    above_half = sum([2 * length > tokens_max for length in lengths])
    return max(1, above_half, -(-sum(lengths) // tokens_max))


def _fit(shares: Sequence[Sequence[int]], count: int, tokens_max: int) -> bool:
    return all(_dealt(share, count, tokens_max) for share in shares)


def _dealt(lengths: Sequence[int], count: int, tokens_max: int) -> list[list[int]]:
    """Deal sequences out, the longest first, each to the micro-batch of the fewest tokens.

    The largest then has at most 4/3 of the tokens that the best split would leave it (R. L. Graham,
    Bounds on multiprocessing timing anomalies, 1969). Return [] if it has more than *tokens_max*.
    """
    loads = [(0, number) for number in range(count)]
    dealt: list[list[int]] = [[] for _ in loads]
    for position in _longest_first(lengths):
        load, number = loads[0]
        load += lengths[position]
        if load > tokens_max:
            return []
        dealt[number].append(position)
        heapq.heapreplace(loads, (load, number))
    return dealt


def _cut(lengths: Sequence[int], tokens_max: int) -> list[list[int]]:
    """Cut sequences, ordered by length, into as few padded micro-batches as there can be."""
    parts: list[list[int]] = []
    for position in _longest_first(lengths):
        if not parts or (len(parts[-1]) + 1) * lengths[parts[-1][0]] > tokens_max:
            parts.append([])
        parts[-1].append(position)
    return parts


def _halved(parts: list[list[int]], count: int) -> list[list[int]]:
    """Halve the part of the most sequences until there are so many parts."""
    largest_first = [(-len(part), number) for number, part in enumerate(parts)]
    heapq.heapify(largest_first)
    while len(parts) < count:
        number = largest_first[0][1]
        largest = parts[number]
        half = -(-len(largest) // 2)
        parts.append(largest[half:])
        del largest[half:]
        heapq.heapreplace(largest_first, (-len(largest), number))
        heapq.heappush(largest_first, (-len(parts[-1]), len(parts) - 1))
    return parts


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda position: -lengths[position])
