"""The array holds every pair, the books find what is wrong, and a sample of rows is right.

`make crossings` lives all rows.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from breadbox.model.types import BufferConfig, FullPolicy
from chaos.ledger import Ledger
from crossings.ledger import Books, Items, books_of
from crossings.run import run_row, told
from crossings.settings import VALUES, all_pairs, covering, pairs_of, possible_pairs, why_not
from support.server_process import ServerProcess

SEED = 0
SAMPLE = (*range(8), 10, 13)
"""The first rows, one with tickets, and one with groups."""
SAMPLE_SHARE = 2 / 3
KEEPS_ALL = 2**40


@pytest.mark.parametrize("seed", [SEED, 7])
def test_every_pair_of_values_is_in_a_row_or_left_out_for_a_reason(seed: int) -> None:
    rows = covering(seed)
    held = {pair for row in rows for pair in pairs_of(row)}

    assert all(not why_not(row.named()) for row in rows)
    assert all(why_not(dict(pair)) for pair in set(all_pairs()) - held)
    assert rows == covering(seed)


def test_the_sample_holds_most_pairs_and_every_value() -> None:
    rows = [covering(SEED)[number] for number in SAMPLE]
    held = {pair for row in rows for pair in pairs_of(row)}

    assert len(held) > SAMPLE_SHARE * len(possible_pairs())
    assert {(name, value) for name, values in VALUES.items() for value in values} == {
        named for row in rows for named in row.named().items()
    }


@pytest.mark.integration
@pytest.mark.timeout(120)
def test_the_server_refuses_a_standby_beside_a_directory(tmp_path: Path) -> None:
    server = ServerProcess(
        *("--store", f"file://{tmp_path / 'store'}", "--standby"), log=tmp_path / "log"
    )

    with pytest.raises(AssertionError, match="standby"):
        server.start_standby()


@pytest.mark.long
@pytest.mark.integration
@pytest.mark.timeout(450)
@pytest.mark.parametrize("number", SAMPLE)
def test_nothing_is_lost_whatever_settings_meet(number: int, tmp_path: Path) -> None:
    done = run_row(number, SEED, tmp_path)

    assert not done.problem, told(done, SEED)


# The books ----------------------------------------------------------------------------------------


class Shop:
    """Books of a buffer of three fragments, and a ledger to write into."""

    def __init__(self, folder: Path, policy: FullPolicy, **limits: int) -> None:
        config = {"staleness_max": KEEPS_ALL, "uses_max": 1, **limits}
        self._config = BufferConfig(capacity_chunks=3, full_policy=policy, **config)  # type: ignore[arg-type]
        self._folder = folder
        self._ledger = Ledger(folder / "red-0.row.ledger")
        self._leases = itertools.count()

    def close(self) -> None:
        self._ledger.close()

    def append(self, *numbers: int, version: int = 1) -> None:
        fragments = [(number,) for number in numbers]
        self._ledger.note("appending", fragments=fragments, version=version)
        self._ledger.note("appended", fragments=fragments)

    def consume(self, *numbers: int) -> None:
        lease = str(next(self._leases))
        self._ledger.note("granted", lease=lease, fragments=[(number,) for number in numbers])
        self._ledger.note("releasing", lease=lease)
        self._ledger.note("released", lease=lease)

    def publish(self, version: int) -> None:
        self._ledger.note("published", version=version)

    def books(self) -> Books:
        return books_of(self._folder, "red-0", self._config)

    def problems(self, *held: int) -> list[str]:
        fragments: list[Items] = [(number,) for number in held]
        return [each.split(":")[0] for each in self.books().problems(fragments, 0)]


Shops = Callable[..., Shop]


@pytest.fixture
def shops(tmp_path: Path) -> Iterator[Shops]:
    """Makes one, in a folder of its own."""
    with ExitStack() as stack:

        def make(policy: FullPolicy, **limits: int) -> Shop:
            folder = tmp_path / policy.value
            folder.mkdir()
            return stack.enter_context(closing(Shop(folder, policy, **limits)))

        yield make


@pytest.mark.parametrize("policy", FullPolicy)
def test_what_was_acknowledged_and_is_not_held_is_lost(shops: Shops, policy: FullPolicy) -> None:
    shop = shops(policy)
    shop.append(1, 2, 3)
    shop.consume(1)

    assert [] == shop.problems(2, 3)
    assert ["1 fragments are lost"] == shop.problems(2)
    assert ["1 fragments are not to be there"] == shop.problems(1, 2, 3)
    assert ["1 fragments are twice"] == shop.problems(2, 3, 3)


def test_only_a_buffer_that_evicts_lets_the_oldest_go(shops: Shops) -> None:
    evicting, blocking = shops(FullPolicy.EVICT), shops(FullPolicy.BLOCK)
    for shop in (evicting, blocking):
        shop.append(1, 2, 3, 4)

    assert ([], 1) == (evicting.problems(2, 3, 4), evicting.books().evicted)
    assert ["1 fragments are lost"] == blocking.problems(2, 3, 4)


def test_what_is_stale_must_not_be_there(shops: Shops) -> None:
    shop = shops(FullPolicy.EVICT, staleness_max=2)
    shop.append(1)
    shop.append(2, version=2)
    shop.publish(4)

    assert [] == shop.problems(2)
    assert ["1 fragments are not to be there"] == shop.problems(1, 2)


def test_a_use_beyond_the_last_and_another_teams_fragment_are_wrong(shops: Shops) -> None:
    shop = shops(FullPolicy.BLOCK)
    shop.append(1, 2)
    shop.consume(1)
    shop.consume(1)

    assert ["1 fragments are used too often"] == shop.problems(2)
    assert "1 fragments are another team's" in shop.problems(2, 4_000_001)
