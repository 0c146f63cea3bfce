"""The loader: each reference exactly once, ahead of its use, and nothing left behind."""

import gc
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
import pytest

from breadbox.loader import FragmentLoader
from breadbox.model.errors import (
    InvalidRequestError,
    PayloadCorruptError,
    PayloadMissingError,
    StoreUnavailableError,
)
from breadbox.model.types import FragmentReference
from breadbox.reading.batches import Batch
from breadbox.reading.loading import LoaderOptions, LoadOrder, fresh_rows
from breadbox.transport.prefetch import prefetched
from support.references import groups, numbers, references

LIMIT_S = 10.0


def loader(
    load: Callable[[Sequence[FragmentReference]], Any] = numbers, **options: Any
) -> FragmentLoader[Any]:
    return FragmentLoader(load, LoaderOptions(**options))


def loader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("loader")]


@pytest.mark.parametrize("prefetch", [0, 1, 2, 7])
@pytest.mark.parametrize("order", get_args(LoadOrder))
def test_every_reference_is_delivered_exactly_once(order: LoadOrder, prefetch: int) -> None:
    made = loader(order=order, prefetch_batches=prefetch, seed=3, threads=3)
    batches = list(made.batches(references(23), 5))
    assert [3, 5, 5, 5, 5] == sorted(len(batch) for batch in batches)
    assert list(range(23)) == sorted(itertools.chain.from_iterable(batches))
    assert [] == loader_threads()


def test_granted_order_is_kept() -> None:
    assert [[0, 1], [2, 3], [4]] == list(loader().batches(references(5), 2))


def test_a_short_last_batch_may_be_dropped() -> None:
    assert [[0, 1], [2, 3]] == list(loader(drop_last=True).batches(references(5), 2))
    assert [] == list(loader(drop_last=True).batches(references(1), 2))


@pytest.mark.parametrize(
    ("batch_size", "expected"),
    [
        (4, [[0, 1, 2], [3, 4, 5, 6], [7, 8, 9, 10]]),
        (8, [[0, 1, 2, 3, 4, 5, 6], [7, 8, 9, 10]]),
        (3, [[0, 1, 2], [3, 4, 5], [6], [7, 8, 9], [10]]),
    ],
)
def test_a_group_is_divided_only_if_it_is_larger_than_a_batch(
    batch_size: int, expected: list[list[int]]
) -> None:
    assert expected == list(loader().batches(groups(3, 4, 3, 1), batch_size))


def test_a_chunk_that_is_drawn_twice_in_a_row_is_two_groups() -> None:
    assert [[0, 1, 2]] * 2 == list(loader().batches(2 * groups(3), 4))


@pytest.mark.parametrize("order", ["shuffled", "completed"])
def test_shuffling_keeps_the_members_of_a_group_together(order: LoadOrder) -> None:
    made = loader(order=order, seed=3)
    batches = list(made.batches(groups(*[4, 3] * 10), 4))
    pairs = [[*range(start, start + 7)] for start in range(0, 70, 7)]
    whole = [part for pair in pairs for part in (pair[:4], pair[4:])]
    assert whole == sorted(batches)
    assert whole != batches


def test_a_partial_group_is_not_dropped_for_being_short() -> None:
    made = loader(drop_last=True)
    assert [[0, 1, 2]] == list(made.batches(groups(3), 4))
    assert [[0, 1, 2, 3], [4, 5, 6]] == list(made.batches(groups(4, 3), 4))
    assert [[0, 1, 2, 3, 4, 5, 6]] == list(made.batches(groups(4, 3, 4), 8)), "a group too few"


def aged(job: Sequence[FragmentReference]) -> Batch:
    """A batch of fragments, each of which is of its number's version."""
    size = len(job)
    names = ("obs", "action", "reward", "episode_id", "terminated", "truncated", "first")
    rows: dict[str, Any] = {name: np.zeros((size, 2)) for name in names}
    return Batch(references=tuple(job), next_obs=np.zeros((size, 1)), **rows)


def of_their_numbers(count: int) -> list[FragmentReference]:
    return [
        replace(each, metadata=replace(each.metadata, model_version_min=number))
        for number, each in enumerate(references(count))
    ]


def test_a_loader_counts_the_staleness_at_use_and_leaves_out_what_is_beyond_its_limit() -> None:
    versions = iter([3, 3, 9])
    made = FragmentLoader(
        aged, LoaderOptions(max_staleness_at_use=2), model_version=lambda: next(versions)
    )
    batches = list(made.batches(of_their_numbers(6), 2))
    assert [[1], [2, 3]] == [numbers(batch.references) for batch in batches]
    assert [1, 2] == [len(batch.reward) for batch in batches]
    assert [0, 4, 5] == numbers(made.left_out)
    assert {2: 1, 1: 1, 0: 1} == made.staleness_at_use


def test_a_group_with_a_member_that_is_too_stale_is_left_out_as_a_whole() -> None:
    members = [
        replace(each, metadata=replace(each.metadata, model_version_min=version))
        for each, version in zip(groups(3, 3), (5, 5, 4, 5, 2, 5), strict=True)
    ]
    made = FragmentLoader(aged, LoaderOptions(max_staleness_at_use=1), model_version=lambda: 5)
    assert [[0, 1, 2]] == [numbers(batch.references) for batch in made.batches(members, 6)]
    assert [3, 4, 5] == numbers(made.left_out)
    assert {0: 2, 1: 1} == made.staleness_at_use


def test_a_member_that_a_rank_got_again_is_judged_with_its_group() -> None:
    first, *others = groups(3)
    rows = [first, *others, first]
    assert [] == fresh_rows(rows, [0, 0, 2, 0], 1)
    assert [0, 1, 2, 3] == fresh_rows(rows, [0, 0, 2, 0], 2)
    assert [0, 1, 2, 3] == fresh_rows(rows, [0, 0, 2, 0], None)


def test_a_loader_without_a_limit_only_counts_the_staleness_at_use() -> None:
    made = FragmentLoader(aged, model_version=lambda: 5)
    assert [2, 2] == [len(batch) for batch in made.batches(of_their_numbers(4), 2)]
    assert [] == made.left_out
    assert {5: 1, 4: 1, 3: 1, 2: 1} == made.staleness_at_use


def test_a_limit_of_staleness_needs_to_know_the_version() -> None:
    with pytest.raises(InvalidRequestError, match="model_version"):
        loader(max_staleness_at_use=2)


@pytest.mark.parametrize(("limit", "ahead"), [(0, 0), (2, 2), (9, 4)])
def test_no_more_is_loaded_ahead_than_the_limit_of_staleness_allows(limit: int, ahead: int) -> None:
    begun: list[int] = []

    def load(job: Sequence[FragmentReference]) -> Batch:
        begun.extend(numbers(job))
        return aged(job)

    options = LoaderOptions(max_staleness_at_use=limit, prefetch_batches=4, threads=4)
    batches = FragmentLoader(load, options, model_version=lambda: 0).batches(references(20), 1)
    next(batches)
    batches.close()  # It waits for the loads that have begun.
    assert len(begun) <= 1 + ahead


def test_no_references_are_no_batches() -> None:
    assert [] == list(loader().batches([], 4))


def test_shuffling_depends_on_the_seed_alone() -> None:
    def shuffled(seed: int) -> list[list[int]]:
        made = loader(order="shuffled", seed=seed)
        return list(made.batches(references(40), 4))

    assert shuffled(1) == shuffled(1)
    assert shuffled(1) != shuffled(2)
    assert shuffled(1) != list(loader().batches(references(40), 4))


def test_completed_order_does_not_wait_for_a_slow_batch() -> None:
    release = threading.Event()

    def load(job: Sequence[FragmentReference]) -> list[int]:
        if 0 in numbers(job):
            assert release.wait(LIMIT_S)
        return numbers(job)

    made = loader(load, order="completed", threads=2, prefetch_batches=2)
    batches = made.batches(references(4), 1)
    assert [[1], [2], [3]] == [next(batches) for _ in range(3)]
    release.set()
    assert [[0]] == list(batches)


@dataclass
class Gate:
    """A load function that counts what is under way and lets each load end when told."""

    started: threading.Semaphore
    begun: list[int]

    def __call__(self, job: Sequence[FragmentReference]) -> list[int]:
        self.begun += numbers(job)
        self.started.release()
        return numbers(job)

    def await_starts(self, count: int) -> None:
        for _ in range(count):
            assert self.started.acquire(timeout=LIMIT_S)


def test_it_loads_as_far_ahead_as_told_and_no_further() -> None:
    gate = Gate(threading.Semaphore(0), [])
    batches = loader(gate, prefetch_batches=2, threads=4).batches(references(10), 1)
    assert [] == gate.begun
    assert [0] == next(batches)
    gate.await_starts(3)  # the one handed out and two ahead
    assert [0, 1, 2] == sorted(gate.begun)
    assert [1] == next(batches)
    gate.await_starts(1)
    assert [0, 1, 2, 3] == sorted(gate.begun)
    batches.close()


def test_without_prefetch_a_batch_is_loaded_when_asked_for() -> None:
    gate = Gate(threading.Semaphore(0), [])
    batches = loader(gate, prefetch_batches=0).batches(references(3), 1)
    assert [0] == next(batches)
    assert [0] == gate.begun


def test_a_batch_in_use_is_kept_alive_by_its_user_alone() -> None:
    class Loaded:
        pass

    batches = loader(lambda _: Loaded(), prefetch_batches=1).batches(references(3), 1)
    held = weakref.ref(next(batches))
    gc.collect()
    assert held() is None
    batches.close()


def test_a_failed_load_is_tried_again() -> None:
    attempts: Counter[int] = Counter()

    def load(job: Sequence[FragmentReference]) -> list[int]:
        attempts.update(numbers(job))
        if attempts[2] < 3 and 2 in numbers(job):
            raise PayloadCorruptError("a block has another checksum")
        return numbers(job)

    assert [[0], [1], [2], [3]] == list(loader(load, retries=2).batches(references(4), 1))
    assert {0: 1, 1: 1, 2: 3, 3: 1} == attempts


def test_a_store_that_is_away_is_neither_tried_again_nor_skipped() -> None:
    """The load has waited for it already, and no fragment is at fault."""
    attempts: Counter[int] = Counter()

    def load(job: Sequence[FragmentReference]) -> list[int]:
        attempts.update(numbers(job))
        raise StoreUnavailableError("the store is away")

    batches = loader(load, retries=2, prefetch_batches=0, on_failure="skip")
    with pytest.raises(StoreUnavailableError):
        next(batches.batches(references(4), 2))
    assert {0: 1, 1: 1} == attempts


def missing(*lost: int) -> Callable[[Sequence[FragmentReference]], list[int]]:
    def load(job: Sequence[FragmentReference]) -> list[int]:
        for number in numbers(job):
            if number in lost:
                raise PayloadMissingError(f"{number:032x}")
        return numbers(job)

    return load


def test_a_load_that_keeps_failing_is_raised_in_its_place_with_the_attempts() -> None:
    batches = loader(missing(4), retries=1).batches(references(8), 2)
    assert [[0, 1], [2, 3]] == [next(batches), next(batches)]
    with pytest.raises(PayloadMissingError) as caught:
        next(batches)
    assert ["after 2 attempts to load 2 fragments"] == caught.value.__notes__
    assert [] == list(batches)
    assert [] == loader_threads()


def test_what_cannot_be_loaded_may_be_skipped_and_is_listed() -> None:
    made = loader(missing(0, 1, 4), retries=0, on_failure="skip")
    assert [[2, 3], [5], [6]] == list(made.batches(references(7), 2))
    assert [0, 1, 4] == sorted(numbers(made.skipped))


def test_a_bug_in_the_load_is_neither_retried_nor_skipped() -> None:
    calls = []

    def load(job: Sequence[FragmentReference]) -> None:
        calls.append(numbers(job))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(loader(load, retries=5, on_failure="skip").batches(references(1), 1))
    assert [[0]] == calls


def test_a_failed_iteration_leaks_nothing_into_the_next() -> None:
    """In-flight loads of an iteration that ended early were delivered by the next one."""
    made = loader(missing(1), threads=4, prefetch_batches=6, retries=0)
    with pytest.raises(PayloadMissingError):
        list(made.batches(references(8), 1))
    fresh = references(20)[10:]
    assert [[n] for n in range(10, 20)] == list(made.batches(fresh, 1))


def test_leaving_the_loop_early_releases_everything() -> None:
    begun = []

    def load(job: Sequence[FragmentReference]) -> list[int]:
        begun.extend(numbers(job))
        return numbers(job)

    made = loader(load, threads=2, prefetch_batches=3)
    for batch in made.batches(references(100), 1):
        if batch == [5]:
            break
    assert [] == loader_threads()
    assert len(begun) <= 9  # six handed out, three ahead
    assert [[0]] == list(made.batches(references(1), 1))


def test_an_error_in_the_loop_body_stops_the_loads() -> None:
    def train() -> None:
        for _ in loader(threads=2, prefetch_batches=3).batches(references(100), 1):
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        train()
    gc.collect()  # the traceback held the generator
    assert [] == loader_threads()


def test_iterations_at_the_same_time_share_nothing() -> None:
    made = loader(threads=2, prefetch_batches=2)
    one, two = made.batches(references(6), 2), made.batches(references(4), 1)
    assert [([0, 1], [0]), ([2, 3], [1]), ([4, 5], [2])] == list(zip(one, two, strict=False))
    two.close()


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"threads": 0}, "threads"),
        ({"prefetch_batches": -1}, "prefetch_batches"),
        ({"retries": 101}, "retries"),
        ({"order": "newest"}, "order"),
        ({"on_failure": "ignore"}, "on_failure"),
    ],
)
def test_options_out_of_range_are_refused(wrong: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidRequestError, match=name):
        LoaderOptions(**wrong)


def test_a_batch_size_below_one_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="batch_size"):
        loader().batches(references(1), 0)


def test_jobs_are_taken_no_earlier_than_needed() -> None:
    taken = []

    def jobs() -> Any:
        for number in range(100):
            taken.append(number)
            yield number

    results = prefetched(jobs(), lambda job: job, at_once=2, depth=2, in_order=True)
    assert 0 == next(results)
    assert [0, 1, 2] == taken
    results.close()


def test_leaving_early_cancels_what_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """L3: a learner that breaks off does not wait for loads that nobody will see."""
    is_closing = threading.Event()
    begun = []

    class Telling(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            is_closing.set()
            super().shutdown(wait=wait)

    def run(job: int) -> int:
        begun.append(job)
        assert job == 0 or is_closing.wait(10)
        return job

    monkeypatch.setattr("breadbox.transport.prefetch.ThreadPoolExecutor", Telling)
    results = prefetched(range(100), run, at_once=1, depth=8, in_order=True)
    assert 0 == next(results)
    results.close()
    assert begun in ([0], [0, 1])


def test_an_only_job_runs_in_the_thread_that_wants_it() -> None:
    results = prefetched([0], lambda job: threading.get_ident(), at_once=2, depth=2, in_order=True)
    assert [threading.get_ident()] == list(results)
