"""MineStudio's interface on a real server: what its trainers and workers do with it."""

import copy
import itertools
import random
import threading
import time
import types
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import breadbox
from breadbox.model import errors
from breadbox.testing import ServerProcess, start_server
from breadbox_adapters.minestudio import (
    FragmentIndex,
    FragmentLoader,
    FragmentMetadata,
    ReplayBufferInterface,
    SampleFragment,
    create_loader_pool,
    data_iter,
    interface,
    reference_of,
)
from breadbox_server.access.authorization import Role
from support.certificates import Authority
from support.eventually import eventually_sync
from support.minestudio import CONFIG, alike, metadata_of, sample_fragment
from support.token_files import write_token_file

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
    return ReplayBufferInterface(buffer=trainer.buffer)


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


def varied(fid: int) -> SampleFragment:
    """A fragment as MineStudio takes it after others: of other keys, kinds, widths and lengths."""
    sample = sample_fragment(fid)
    told: list[Any] = [None, "go left", 9, 10, {"a": 1}, {"a": 1, "b": [2.5]}, np.zeros((2, fid))]
    sample.next_obs = {**sample.next_obs, "info": told[fid]}
    sample.obs = {**sample.obs, "info": [told[fid]] * len(sample.reward)}
    if fid == 4:
        sample.obs["depth"] = np.ones((len(sample.reward), 3), np.float32)
    if fid == 5:
        sample.in_state = [*sample.in_state, np.zeros((1, 2))]
    if fid == 6:
        for name in ("reward", "next_done", "first", "episode_uuids"):
            setattr(sample, name, getattr(sample, name)[:4])
        sample.obs = {key: rows[:4] for key, rows in sample.obs.items()}
        sample.action = {key: rows[:4] for key, rows in sample.action.items()}
    return sample


def test_values_that_vary_from_fragment_to_fragment_are_taken_as_minestudio_takes_them(
    trainer: ReplayBufferInterface,
) -> None:
    trainer.client.update_buffer(trainer.buffer, breadbox.BufferConfig(fragments_per_chunk=1))
    with other(trainer) as worker:
        for fid in range(7):
            worker.add_fragment(varied(fid), metadata_of(varied(fid)))
        assert 0 == worker.dropped_count
    fetched = trainer.fetch_fragments(7)
    assert 7 == len({index for index, _ in fetched})
    for index, fragment_id in fetched:
        assert alike(varied(index.fid_in_worker), trainer.load_fragment(fragment_id))


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
    trainer.client.update_buffer(trainer.buffer, breadbox.BufferConfig(uses_max=1))
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
    trainer.client.store.delete_many([reference.metadata.payload])
    with pytest.raises(KeyError):
        trainer.load_fragment(fragment_id)


def test_nothing_is_prepared_before_the_first_fetch(trainer: ReplayBufferInterface) -> None:
    assert [] == trainer.prepared_fragments()


def test_a_batch_whose_lease_expired_is_told_from_one_that_was_not_fetched(
    trainer: ReplayBufferInterface,
) -> None:
    add(trainer, 0, 1)
    trainer.client.update_buffer(trainer.buffer, breadbox.BufferConfig(lease_s=0.2))
    trainer.client.service.fetch_fragments(2, buffer=trainer.buffer)
    with other(trainer) as rank_1:
        eventually_sync(lambda: trainer.client.get_buffer(trainer.buffer).state.lease_count == 0)
        with pytest.raises(breadbox.errors.RequestNotFoundError, match="its leases have ended"):
            rank_1.prepared_fragments()


def test_a_fragment_of_a_session_that_ended_is_dropped_at_once(
    trainer: ReplayBufferInterface,
) -> None:
    trainer.update_model_version("run", 3)
    trainer.update_model_version("another", 0)
    sample = sample_fragment()
    with other(trainer) as worker:
        worker.version_wait_s = 3600.0
        worker.add_fragment(sample, metadata_of(sample, 3))
        trainer.client.end_session("another", buffer=trainer.buffer)
        worker.add_fragment(sample, replace(metadata_of(sample, 3), session_id="another"))
        assert 2 == worker.dropped_count


def test_what_is_of_no_use_is_dropped_and_counted(trainer: ReplayBufferInterface) -> None:
    sample = sample_fragment()
    trainer.version_wait_s = 0.1
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
    with ReplayBufferInterface({**CONFIG, "max_reuse": 5}, buffer=trainer.buffer) as second:
        assert 5 == second.client.get_buffer(trainer.buffer).config.uses_max


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


# What MineStudio's order of events, configurations and outages ask for ---------------------------


def add_in_background(
    interface: ReplayBufferInterface, version: int, *fids: int, session: str = "run"
) -> threading.Thread:
    """As MineStudio's sender does: one after the other."""

    def add_all() -> None:
        for fid in fids:
            sample = sample_fragment(fid)
            interface.add_fragment(sample, metadata_of(sample, version, session))

    thread = threading.Thread(target=add_all)
    thread.start()
    return thread


def versions_of(trainer: ReplayBufferInterface, count: int) -> list[int]:
    records = trainer.fetch_fragments(count)
    return [reference_of(name).metadata.model_version_min for _, name in records]


def test_a_fragment_of_a_version_that_the_buffer_hears_of_later_waits_for_it(
    trainer: ReplayBufferInterface,
) -> None:
    with other(trainer) as worker:
        thread = add_in_background(worker, 2, 0, 1)
        eventually_sync(lambda: worker._model.model_version == 1)  # noqa: SLF001 - it waits now
        assert thread.is_alive()
        trainer.update_model_version("run", 2)
        thread.join(20)
    assert [2, 2] == versions_of(trainer, 2)


def test_a_fragment_of_a_session_that_the_buffer_hears_of_later_waits_for_it(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BREADBOX_SERVER", server.address)
    name = f"trainer-{next(NUMBERS)}"
    with (
        ReplayBufferInterface(CONFIG, buffer=name) as trainer,
        ReplayBufferInterface(buffer=name) as worker,
    ):
        for session in ("first", "second"):
            thread = add_in_background(worker, 1, 0, 1, session=session)
            trainer.update_model_version(session, 1)
            thread.join(20)
            assert [1, 1] == versions_of(trainer, 2)
        began_at = time.monotonic()
        worker.add_fragment(sample_fragment(), metadata_of(sample_fragment(), 1, "first"))
        assert 1 == worker.dropped_count
        assert time.monotonic() - began_at < worker.version_wait_s


def test_a_version_that_never_comes_is_waited_for_once_and_then_clamped(
    trainer: ReplayBufferInterface, caplog: pytest.LogCaptureFixture
) -> None:
    with ReplayBufferInterface(buffer=trainer.buffer, version_wait_s=0.2) as worker:
        add_in_background(worker, 7, 0, 1, 2, 3).join(20)
        add_in_background(worker, 1, 9, 10, session="unheard of").join(20)
        assert 2 == worker.dropped_count
    assert [1, 1, 1, 1] == versions_of(trainer, 4)
    told = [record for record in caplog.records if "did not get session" in record.getMessage()]
    assert 2 == len(told)


def test_the_default_buffer_takes_the_configuration_while_it_is_empty() -> None:
    with start_server() as server:
        with ReplayBufferInterface(CONFIG, server=server.address) as trainer:
            trainer.update_model_version("run", 1)
            limits = trainer.client.get_buffer("default").config
            assert (2, 64, 2**62) == (
                limits.fragments_per_chunk,
                limits.capacity_chunks,
                limits.capacity_bytes,
            )
            add(trainer, 0)
        with pytest.raises(errors.InvalidRequestError, match="is 2 and cannot be changed while"):
            ReplayBufferInterface({**CONFIG, "fragments_per_chunk": 4}, server=server.address)


def test_a_fetch_that_the_given_bytes_can_never_satisfy_is_refused(
    trainer: ReplayBufferInterface,
) -> None:
    add(trainer, 0, 1)
    size_bytes = trainer.client.get_buffer(trainer.buffer).state.payload_bytes
    limits = {**CONFIG, "capacity_bytes": 3 * size_bytes}
    with ReplayBufferInterface(limits, buffer=trainer.buffer) as second:
        refusals: list[errors.InvalidRequestError] = []

        def fetch() -> None:
            try:
                second.fetch_fragments(8)
            except errors.InvalidRequestError as error:
                refusals.append(error)

        thread = threading.Thread(target=fetch)
        thread.start()
        add(trainer, *range(2, 8))
        thread.join(20)
        wanted = f"needs at least {4 * size_bytes} bytes, but the buffer holds at most"
        assert [True] == [wanted in str(error) for error in refusals]


def test_the_old_batch_is_there_until_the_new_one_is(trainer: ReplayBufferInterface) -> None:
    trainer.client.update_buffer(trainer.buffer, breadbox.BufferConfig(uses_max=1))
    add(trainer, 0, 1)
    before = trainer.fetch_fragments(2)
    fetched: list[Any] = []
    thread = threading.Thread(target=lambda: fetched.append(trainer.fetch_fragments(2)))
    thread.start()
    with other(trainer) as rank_1:
        eventually_sync(lambda: trainer.client.get_buffer(trainer.buffer).state.waiter_count == 1)
        assert before == rank_1.prepared_fragments()
        assert 0 == rank_1.load_fragment(before[0][1]).fid_in_worker
        add(rank_1, 2, 3)
        thread.join(20)
        assert fetched == [rank_1.prepared_fragments()]

    def is_gone() -> bool:
        try:
            trainer.load_fragment(before[0][1])
        except KeyError:
            return True
        return False

    eventually_sync(is_gone)


def test_add_and_fetch_wait_for_a_server_that_is_away(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(interface, "RECONNECT_S", 0.2)
    with start_server() as server, ReplayBufferInterface(CONFIG, server=server.address) as trainer:
        trainer.update_model_version("run", 1)
        server.kill()
        fetched: list[Any] = []
        threads = [
            add_in_background(trainer, 1, 0, 1),
            threading.Thread(target=lambda: fetched.append(trainer.fetch_fragments(2))),
        ]
        threads[1].start()
        eventually_sync(lambda: "still waiting after" in caplog.text)
        server.start()
        for thread in threads:
            thread.join(60)
        assert [2] == [len(batch) for batch in fetched]


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_how_long_is_waited_for_a_server_can_be_set(
    by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by == "environment":
        monkeypatch.setenv("BREADBOX_RECONNECT_S", "0.2")
    with start_server() as server:
        made = ReplayBufferInterface(
            CONFIG, server=server.address, reconnect_s=0.2 if by == "argument" else None
        )
        with made:
            server.kill()
            with pytest.raises(errors.UnavailableError):
                made.update_model_version("run", 1)


def test_no_server_when_it_is_made_is_an_error_that_names_the_variable() -> None:
    with pytest.raises(errors.UnavailableError) as caught:
        ReplayBufferInterface(server="127.0.0.1:1", reconnect_s=0)
    assert ["BREADBOX_SERVER names the server, as HOST:PORT"] == caught.value.__notes__


def test_a_buffer_that_is_unknown_is_an_error_when_it_is_made(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BREADBOX_SERVER", server.address)
    monkeypatch.setenv("BREADBOX_BUFFER", "nobody-made-it")
    with pytest.raises(errors.BufferNotFoundError, match="nobody-made-it"):
        ReplayBufferInterface()
    with pytest.raises(errors.BufferNotFoundError):
        create_loader_pool(2)
    with ReplayBufferInterface(CONFIG), ReplayBufferInterface() as worker:
        assert "nobody-made-it" == worker.buffer


def test_token_and_certificates_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    signed = authority.sign("server")
    tokens = write_token_file(tmp_path / "tokens")
    options = [
        *("--tls-cert", str(signed.cert_file), "--tls-key", str(signed.key_file)),
        *("--tokens", str(tmp_path / "tokens")),
    ]
    with start_server(options=options) as server:
        monkeypatch.setenv("BREADBOX_SERVER", server.address)
        monkeypatch.setenv("BREADBOX_TLS_CA", str(authority.ca_file))
        with pytest.raises(errors.UnauthenticatedError, match="BREADBOX_TOKEN"):
            ReplayBufferInterface(CONFIG)
        monkeypatch.setenv("BREADBOX_TOKEN", tokens[Role.ADMIN])
        with ReplayBufferInterface(CONFIG) as trainer:
            trainer.update_model_version("run", 1)
            add(trainer, 0, 1)
            assert 2 == len(trainer.fetch_fragments(2))
            monkeypatch.setenv("BREADBOX_TOKEN", tokens[Role.PRODUCER])
            with ReplayBufferInterface() as worker:
                add(worker, 2, 3)
            with pytest.raises(errors.PermissionDeniedError):
                ReplayBufferInterface(CONFIG)


def test_a_buffer_that_stays_short_says_so_in_the_log(
    trainer: ReplayBufferInterface,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(interface, "FIRST_WORD_S", 0.05)
    thread = threading.Thread(target=trainer.fetch_fragments, args=(2,))
    thread.start()
    eventually_sync(lambda: "0 chunks are held and 1 is needed" in caplog.text)
    add(trainer, 0, 1)
    thread.join(20)


def test_a_sender_that_died_is_said_in_its_log_and_where_the_trainer_waits(
    trainer: ReplayBufferInterface,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(interface, "FIRST_WORD_S", 0.05)
    monkeypatch.setattr(interface, "WAIT_S_MAX_PER_CALL", 0.05)
    add(trainer, 0)
    sample = sample_fragment(1)
    sample.next_obs = {"made": object()}
    with other(trainer) as worker, pytest.raises(errors.UnsupportedArrayError, match="made"):
        worker.add_fragment(sample, metadata_of(sample))
    assert "fragment 1 of worker 'env-0' cannot be stored" in caplog.text
    thread = threading.Thread(target=trainer.fetch_fragments, args=(2,))
    thread.start()
    eventually_sync(lambda: "No fragment arrived in the" in caplog.text)
    assert "has seen 1 worker " in caplog.text
    assert "Check that rollout workers run" in caplog.text
    add(trainer, 1)
    thread.join(20)
    assert not thread.is_alive()


def test_records_of_appends_and_fetches_are_offered(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BREADBOX_SERVER", server.address)
    logged: list[dict[str, Any]] = []
    config = {**CONFIG, "fragments_per_report": 4, "fragments_per_chunk": 1, "max_staleness": 1}
    with ReplayBufferInterface(
        config, buffer=f"trainer-{next(NUMBERS)}", log=logged.append
    ) as trainer:
        trainer.update_model_version("run", 1)
        reporter = trainer._reporter  # noqa: SLF001 - its first look is what counts are compared with
        assert reporter is not None
        eventually_sync(lambda: reporter.looks > 0)
        add(trainer, *range(4))
        eventually_sync(lambda: len(logged) > 0)
        assert (4, 1) == (
            logged[0]["replay_buffer/replay_buffer_size (chunk)"],
            logged[0]["replay_buffer/model_version"],
        )
        assert logged[0]["replay_buffer/fragments_per_second"] > 0
        del logged[:]
        trainer.fetch_fragments(4)
        trainer.update_model_version("run", 2)
        trainer.fetch_fragments(4)
        assert [{"replay_buffer/avg_reuse": 2.0, "replay_buffer/avg_staleness": 1.0}] == logged
        add(trainer, 4, 5, 6, 7, version=2)
        trainer.fetch_fragments(2)
        trainer.update_model_version("run", 4)
        add(trainer, 8, 9, version=4)
        trainer.fetch_fragments(2)
        # Of four chunks that became stale two had been used once.
        assert {"replay_buffer/avg_reuse": 0.5} == logged[-1]


class Pool:
    """A pool as Ray's is, of one actor that works when it is asked for a result."""

    def __init__(self, loader: FragmentLoader) -> None:
        self.load = types.SimpleNamespace(remote=loader.load)
        self.submitted: list[Any] = []

    def submit(self, function: Any, record: Any) -> None:
        self.submitted.append((function, record))

    def get_next_unordered(self) -> Any:
        function, record = self.submitted.pop()
        return function(self, record)


def test_a_pool_of_ray_actors_loads_every_record_once_and_is_left_empty(
    trainer: ReplayBufferInterface,
) -> None:
    add(trainer, *range(8))
    records = trainer.fetch_fragments(8)
    pool = Pool(FragmentLoader(trainer))
    groups = list(data_iter(pool, records, batch_size=3, prefetch_batches=1))
    assert [3, 3, 2] == [len(group["fragment"]) for group in groups]
    assert sorted(index.fid_in_worker for index, _ in records) == sorted(
        fragment.fid_in_worker for group in groups for fragment in group["fragment"]
    )
    with closing(data_iter(pool, records, batch_size=2, prefetch_batches=2)) as left:
        next(left)
    assert [] == pool.submitted


def test_an_interface_is_not_sent_to_another_process(trainer: ReplayBufferInterface) -> None:
    with pytest.raises(TypeError, match="in each process"):
        copy.copy(trainer)
    trainer.update_training_session()
    trainer.close()
    trainer.close()
