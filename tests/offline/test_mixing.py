"""Shares of several buffers in every batch, in whole chunks."""

from collections import Counter

import pytest

from breadbox_offline.training.mixing import Apportioner


@pytest.mark.parametrize(("chunk", "count"), [(1, 5), (1, 3), (4, 6)])
def test_what_rounding_takes_from_one_batch_comes_in_a_later_one(chunk: int, count: int) -> None:
    shares = {"small": 0.3, "large": 0.7}
    apportioner = Apportioner(shares, dict.fromkeys(shares, chunk))
    total: Counter[str] = Counter()
    for batch in range(1, 41):
        split = apportioner.split(count)
        assert all(each % chunk == 0 for each in split.values())
        total.update(split)
        for buffer, share in shares.items():
            assert abs(total[buffer] - share * count * batch) <= chunk / 2 + 1e-9
