"""MineStudio's interface on a real server: what its trainers and workers do with it."""

import copy
import itertools
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import breadbox
from breadbox import errors
from breadbox.compat.minestudio import (
    FragmentIndex,
    FragmentMetadata,
    ReplayBufferInterface,
    create_loader_pool,
    data_iter,
    reference_of,
)
from breadbox.testing import ServerProcess, start_server
from support.minestudio import CONFIG, alike, metadata_of, sample_fragment

pytestmark = pytest.mark.integration

NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with start_server() as server:
        yield server


@pytest.fixture
def trainer(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ReplayBufferInterface]:
    """Rank 0 of a trainer, with a buffer of its own, in a session at version 1."""
    monkeypatch.setenv("BREADBOX_SERVER", server.address)
    with ReplayBufferInterface(CONFIG, buffer=f"trainer-{next(NUMBERS)}") as made:
        made.update_model_version("run", 1)
        yield made


def other(trainer: ReplayBufferInterface) -> ReplayBufferInterface:
    """An interface as another process would make it."""
    return ReplayBufferInterface(buffer=trainer._buffer)


def add(
    trainer: ReplayBufferInterface, *fids: int, worker: str = "env-0", version: int = 1
) -> None:
    for fid in fids:
        sample = sample_fragment(fid, worker)
        trainer.add_fragment(sample, metadata_of(sample, version))


def test_a_rollout_worker_and_two_ranks_share_a_batch(trainer: ReplayBufferInterface) -> None:
    with other(trainer) as worker, other(trainer) as rank_1:
        add(worker, 0, 1, 2, 3)
        fetched = trainer.fetch_fragments(num_fragments=4)
        assert fetched == trainer.prepared_fragments()
        assert fetched == rank_1.prepared_fragments()
        indexes = [index for index, _ in fetched]
        assert {FragmentIndex("env-0", fid) for fid in range(4)} == set(indexes)
        mine = fetched[1::2]
        pool = create_loader_pool(2, 1, interface=rank_1)
        groups = list(data_iter(pool, mine, batch_size=1, prefetch_batches=2))
        loaded = {index: fragment for group in groups for index, fragment in
                  zip(group["index"], group["fragment"], strict=True)}  # fmt: skip
        assert {index for index, _ in mine} == set(loaded)
        for index, fragment in loaded.items():
            assert alike(sample_fragment(index.fid_in_worker), fragment)


def test_a_fetch_waits_for_as_long_as_it_takes(trainer: ReplayBufferInterface) -> None:
    add(trainer, 0)
    fetched: list[Any] = []
    thread = threading.Thread(target=lambda: fetched.append(trainer.fetch_fragments(2)))
    thread.start()
    with other(trainer) as worker:
        add(worker, 1)
    thread.join(20)
    assert [2] == [len(batch) for batch in fetched]


def test_a_batch_stays_readable_until_the_next_fetch(trainer: ReplayBufferInterface) -> None:
    trainer._client.update_buffer(trainer._buffer, breadbox.BufferConfig(uses_max=1))
    add(trainer, 0, 1)
    before = trainer.fetch_fragments(2)
    trainer.update_model_version("run", 9)
    assert 0 == trainer.load_fragment(before[0][1]).fid_in_worker
    add(trainer, 0, 1, worker="env-1", version=9)
    assert before != trainer.fetch_fragments(2)
    assert before != trainer.prepared_fragments()


def test_a_fragment_that_is_gone_is_a_key_error(trainer: ReplayBufferInterface) -> None:
    add(trainer, 0, 1)
    ((_, fragment_id), _) = trainer.fetch_fragments(2)
    reference = reference_of(fragment_id)
    trainer._client.store.delete_many([reference.metadata.payload])
    with pytest.raises(KeyError):
        trainer.load_fragment(fragment_id)


def test_nothing_is_prepared_before_the_first_fetch(trainer: ReplayBufferInterface) -> None:
    assert [] == trainer.prepared_fragments()


def test_what_is_of_no_use_is_dropped_and_counted(trainer: ReplayBufferInterface) -> None:
    sample = sample_fragment()
    trainer.add_fragment(sample, FragmentMetadata(-1, "", "env-0", 0))
    trainer.add_fragment(sample, metadata_of(sample, session="another"))
    trainer.update_model_version("run", 9)
    trainer.add_fragment(sample, metadata_of(sample, version=1))
    assert 3 == trainer.dropped_count


def test_sizes_that_can_never_be_met_are_refused(trainer: ReplayBufferInterface) -> None:
    """MineStudio asserts, without a message."""
    for count in (0, 3, 1000):
        with pytest.raises(errors.InvalidRequestError, match="fragment_count"):
            trainer.fetch_fragments(count)


def test_a_second_trainer_with_a_configuration_sets_the_limits(
    trainer: ReplayBufferInterface,
) -> None:
    with ReplayBufferInterface({**CONFIG, "max_reuse": 5}, buffer=trainer._buffer) as second:
        assert 5 == second._client.get_buffer(trainer._buffer).config.uses_max


def test_the_order_of_loading_follows_the_seed_of_the_random_module(
    trainer: ReplayBufferInterface,
) -> None:
    add(trainer, *range(8))
    records = trainer.fetch_fragments(8)
    pool = create_loader_pool(1, interface=trainer)

    def order(seed: int) -> list[FragmentIndex]:
        random.seed(seed)
        return [index for group in data_iter(pool, records, 3, 1) for index in group["index"]]

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_an_interface_is_not_sent_to_another_process(trainer: ReplayBufferInterface) -> None:
    with pytest.raises(TypeError, match="in each process"):
        copy.copy(trainer)
    trainer.update_training_session()
    trainer.close()
    trainer.close()
