"""Reverb's client, writers and datasets on a real server.

Tests with a number hold the behaviour that docs/studies/reverb.md lists by that number.
"""

import multiprocessing
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import breadbox
import breadbox_adapters.reverb as reverb
from support.eventually import eventually_sync

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


@dataclass
class Spec:
    """As TensorFlow says it."""

    shape: Any
    dtype: Any


TABLES = {
    "queue": reverb.Table.queue("queue", 10),
    "stack": reverb.Table.stack("stack", 10),
    "uniform": reverb.Table(
        "uniform",
        reverb.selectors.Uniform(),
        reverb.selectors.Fifo(),
        10,
        reverb.rate_limiters.MinSize(1),
    ),
    "prioritized": reverb.Table(
        "prioritized",
        reverb.selectors.Prioritized(1.0),
        reverb.selectors.Fifo(),
        100,
        reverb.rate_limiters.MinSize(1),
    ),
    "max": reverb.Table(
        "max",
        reverb.selectors.MaxHeap(),
        reverb.selectors.MinHeap(),
        3,
        reverb.rate_limiters.MinSize(1),
    ),
    "twice": reverb.Table(
        "twice",
        reverb.selectors.Fifo(),
        reverb.selectors.Fifo(),
        10,
        reverb.rate_limiters.MinSize(1),
        max_times_sampled=2,
    ),
    "three": reverb.Table(
        "three",
        reverb.selectors.Fifo(),
        reverb.selectors.Fifo(),
        10,
        reverb.rate_limiters.MinSize(3),
    ),
    "same": reverb.Table(
        "same",
        reverb.selectors.Fifo(),
        reverb.selectors.Fifo(),
        10,
        reverb.rate_limiters.MinSize(1),
        signature={"a": np.zeros((3,))},
    ),
    "whole": reverb.Table(
        "whole",
        reverb.selectors.Fifo(),
        reverb.selectors.Fifo(),
        10,
        reverb.rate_limiters.MinSize(1),
        signature={"a": Spec((None, 3), np.float64), "b": (Spec((), np.int64),)},
    ),
    "ratio": reverb.Table(
        "ratio",
        reverb.selectors.Uniform(),
        reverb.selectors.Fifo(),
        100,
        reverb.rate_limiters.SampleToInsertRatio(4.0, 2, 8.0),
    ),
}


class Step(NamedTuple):
    """As Acme's adders write it."""

    observation: Any
    reward: Any


@pytest.fixture(scope="module")
def server() -> Iterator[reverb.Server]:
    with reverb.Server(list(TABLES.values())) as made:
        yield made


@pytest.fixture
def client(server: reverb.Server) -> Iterator[reverb.Client]:
    with server.localhost_client() as made:
        for table in TABLES:
            made.reset(table)
        yield made


def numbers(client: reverb.Client, table: str, count: int) -> list[int]:
    return [int(sample[0].data[0]) for sample in client.sample(table, count)]


def test_1_sampling_an_empty_table_blocks_until_the_first_insert(client: reverb.Client) -> None:
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.extend(numbers(client, "uniform", 1)))
    thread.start()
    eventually_sync(lambda: 1 == client.breadbox.get_buffer("uniform").state.waiter_count)
    assert not got
    client.insert(7, {"uniform": 1.0})
    thread.join(20)
    assert [7] == got


def test_2_a_sample_is_refused_below_the_minimum_size_and_granted_at_it(
    client: reverb.Client,
) -> None:
    for number in range(2):
        client.insert(number, {"three": 1.0})
    with pytest.raises(reverb.DeadlineExceededError, match=r"holds 2 chunks, .* waits for 3"):
        next(client.sample("three", timeout_ms=0))
    client.insert(2, {"three": 1.0})
    assert [0] == numbers(client, "three", 1)


def test_7_a_queue_gives_its_items_in_order_and_blocks_the_eleventh_insert(
    client: reverb.Client,
) -> None:
    with client.trajectory_writer(1) as writer:
        for number in range(11):
            writer.append(number)
            writer.create_item("queue", 1.0, writer.history[-1:])
        writer.flush(block_until_num_items=1)
        with pytest.raises(reverb.DeadlineExceededError):
            writer.flush(timeout_ms=100)
        assert list(range(11)) == numbers(client, "queue", 11)
        writer.flush()
    with pytest.raises(reverb.DeadlineExceededError):
        next(client.sample("queue", timeout_ms=0))


def test_12_a_reset_empties_a_table_and_writers_outlive_it(client: reverb.Client) -> None:
    with client.trajectory_writer(1) as writer:
        writer.append(np.float32(1))
        keys = set()
        for _ in range(2):
            writer.create_item("uniform", 1.0, writer.history[-1:])
            client.insert(np.float32(2), {"uniform": 1.0})
            writer.flush()
            [sample] = client.sample("uniform", emit_timesteps=False)
            assert 2 == sample.info.table_size
            keys.add(sample.info.key)
            client.reset("uniform")
            assert 0 == client.server_info()["uniform"].current_size
        assert 2 == len(keys)


def test_12_a_reset_lets_those_pass_who_wait_for_room(client: reverb.Client) -> None:
    for number in range(10):
        client.insert(number, {"queue": 1.0})
    thread = threading.Thread(target=lambda: client.insert(10, {"queue": 1.0}))
    thread.start()
    eventually_sync(lambda: 10 == client.server_info()["queue"].current_size)
    client.reset("queue")
    thread.join(20)
    assert not thread.is_alive()
    assert [10] == numbers(client, "queue", 1)


def test_15_a_starved_sample_ends_at_its_timeout(client: reverb.Client) -> None:
    begun_at = time.monotonic()
    with pytest.raises(reverb.DeadlineExceededError, match=r"within 0\.3 s"):
        next(client.sample("uniform", timeout_ms=300))
    assert 0.3 <= time.monotonic() - begun_at


def test_16_a_timeout_of_zero_gives_what_is_there(client: reverb.Client) -> None:
    client.insert(1, {"uniform": 1.0})
    assert 1 == next(client.sample("uniform", timeout_ms=0))[0].data[0]


def test_17_of_more_than_there_are_those_that_are_there_come_at_once(client: reverb.Client) -> None:
    for number in range(3):
        client.insert(number, {"queue": 1.0})
    samples = client.sample("queue", 5, timeout_ms=200)
    assert [0, 1, 2] == [int(next(samples)[0].data[0]) for _ in range(3)]
    with pytest.raises(reverb.DeadlineExceededError):
        next(samples)


def test_21_fifo_and_lifo_tables_give_their_order(client: reverb.Client) -> None:
    for number in range(4):
        client.insert(number, {"stack": 1.0, "queue": 1.0, "three": 1.0})
    assert [3, 2, 1, 0] == numbers(client, "stack", 4)
    assert [0, 1, 2, 3] == numbers(client, "queue", 4)
    assert [0, 0, 0] == numbers(client, "three", 3)


def test_24_priorities_decide_how_often_and_zero_is_never_drawn(client: reverb.Client) -> None:
    for number, priority in enumerate([1.0, 0.1, 0.0]):
        client.insert(number, {"prioritized": priority})
    drawn = np.bincount(numbers(client, "prioritized", 300), minlength=3) / 300
    np.testing.assert_allclose([0.909, 0.091, 0.0], drawn, atol=0.06)
    assert 0 == drawn[2]


def test_26_33_44_a_mutation_counts_and_unknown_keys_are_ignored(client: reverb.Client) -> None:
    for number in range(3):
        client.insert(number, {"prioritized": 1.0})
    keys: dict[int, int] = {}
    while len(keys) < 3:
        [sample] = client.sample("prioritized", emit_timesteps=False)
        assert pytest.approx(1 / 3) == sample.info.probability
        keys[int(sample.data[0][0])] = sample.info.key
    client.mutate_priorities(
        "prioritized", updates={keys[0]: 0.5, 10**6: 3.0}, deletes=[keys[2], 10**6 + 1]
    )
    assert 2 == client.server_info()["prioritized"].current_size
    seen: dict[int, tuple[float, float]] = {}
    while len(seen) < 2:
        [sample] = client.sample("prioritized", emit_timesteps=False)
        seen[sample.info.key] = (sample.info.priority, round(sample.info.probability, 3))
    assert {keys[0]: (0.5, 0.333), keys[1]: (1.0, 0.667)} == seen


@pytest.mark.parametrize("priority", [float("nan"), -1.0, float("inf")])
def test_28_what_is_no_priority_is_refused_and_the_table_goes_on(
    client: reverb.Client, priority: float
) -> None:
    client.insert(1, {"prioritized": 1.0})
    [sample] = client.sample("prioritized", emit_timesteps=False)
    with pytest.raises(ValueError, match="from 0 to 1e"):
        client.mutate_priorities("prioritized", updates={sample.info.key: priority})
    with pytest.raises(ValueError, match="from 0 to 1e"):
        client.insert(2, {"prioritized": priority})
    client.insert(3, {"prioritized": 1.0})
    assert {1, 3} == set(numbers(client, "prioritized", 30))


def test_29_30_a_heap_gives_the_extreme_for_certain(client: reverb.Client) -> None:
    for number, priority in enumerate([1.0, 5.0, 3.0, 5.0]):
        client.insert(number, {"max": priority})
    assert 3 == client.server_info()["max"].current_size
    [sample] = client.sample("max", emit_timesteps=False)
    assert (1, 5.0, 1.0) == (int(sample.data[0][0]), sample.info.priority, sample.info.probability)
    client.mutate_priorities("max", updates={sample.info.key: 5.0})
    assert [3] == numbers(client, "max", 1)


def test_32_a_sample_says_how_many_items_there_were(client: reverb.Client) -> None:
    for number in range(1, 4):
        client.insert(number, {"uniform": 1.0})
        [sample] = client.sample("uniform", emit_timesteps=False)
        assert number == sample.info.table_size


@pytest.mark.parametrize(
    "dtype", ["<f2", "<f4", "<f8", "|u1", "<u2", "<i4", "<i8", "|b1", "<c8", "<U5", "|S5"]
)
def test_34_arrays_come_back_as_they_were_written(client: reverb.Client, dtype: str) -> None:
    for shape in ((), (1,), (3, 2), (0, 2)):
        array = (np.arange(np.prod(shape, dtype=int)) % 2).reshape(shape).astype(dtype)
        client.reset("uniform")
        client.insert([array], {"uniform": 1.0})
        [[sample]] = client.sample("uniform")
        # Texts come back as wide as they are.
        kept = array.dtype if array.dtype.kind not in "US" else sample.data[0].dtype
        assert (kept, array.dtype.kind) == (sample.data[0].dtype, sample.data[0].dtype.kind)
        assert array.shape == sample.data[0].shape
        np.testing.assert_array_equal(array, sample.data[0])


def test_36_an_unknown_table_is_named_with_those_there_are(client: reverb.Client) -> None:
    with client.trajectory_writer(1) as writer:
        writer.append(1)
        for call in (
            lambda: writer.create_item("nowhere", 1.0, writer.history[-1:]),
            lambda: client.insert(1, {"nowhere": 1.0}),
            lambda: next(client.sample("nowhere")),
            lambda: client.mutate_priorities("nowhere", updates={1: 1.0}),
            lambda: client.reset("nowhere"),
        ):
            with pytest.raises(reverb.TableNotFoundError, match="no table is named 'nowhere'") as e:
                call()
            assert set(TABLES) == set(e.value.known)


def test_37_no_samples_cannot_be_asked_for(client: reverb.Client) -> None:
    with pytest.raises(ValueError, match="num_samples"):
        client.sample("uniform", 0)


def test_38_39_uses_are_counted_and_the_last_one_ends_an_item(client: reverb.Client) -> None:
    client.insert(1, {"twice": 1.0})
    counts = [
        sample.info.times_sampled for sample in client.sample("twice", 2, emit_timesteps=False)
    ]
    assert [1, 2] == counts
    assert 0 == client.server_info()["twice"].current_size


def test_40_at_capacity_the_oldest_go(client: reverb.Client) -> None:
    for number in range(15):
        client.insert(number, {"uniform": 1.0})
    assert 10 == client.server_info()["uniform"].current_size
    assert set(range(5, 15)) >= set(numbers(client, "uniform", 40))


def test_48_a_dataset_takes_as_many_as_it_is_told_and_no_more(
    server: reverb.Server, client: reverb.Client
) -> None:
    for number in range(10):
        client.insert(number, {"queue": 1.0})
    dataset = reverb.TimestepDataset(f"localhost:{server.port}", "queue", max_samples=4)
    assert [0, 1, 2, 3] == [int(sample.data) for sample in dataset]
    assert 6 == client.server_info()["queue"].current_size
    assert [4] == numbers(client, "queue", 1)


def test_54_closing_waits_until_all_items_are_there(client: reverb.Client) -> None:
    writer = client.trajectory_writer(3)
    for number in range(9):
        writer.append({"a": number})
        writer.create_item("uniform", 1.0, writer.history["a"][-1:])
    writer.close()
    assert 9 == client.server_info()["uniform"].current_size


def test_58_a_killed_server_loses_nothing_and_has_nothing_twice(tmp_path: Path) -> None:
    checkpointer = reverb.checkpointers.DefaultCheckpointer(str(tmp_path / "store"))
    tables = [reverb.Table.queue("q", 1000)]
    with (
        reverb.Server(tables, checkpointer=checkpointer) as server,
        server.localhost_client() as client,
        client.trajectory_writer(1) as writer,
    ):
        for number in range(60):
            writer.append(number)
            writer.create_item("q", 1.0, writer.history[-1:])
            if number == 30:
                server._server.restart()  # noqa: SLF001 - Reverb has no word for it
        writer.flush()
        assert list(range(60)) == numbers(client, "q", 60)


@pytest.mark.parametrize("is_reset", [False, True])
def test_60_items_are_held_to_the_signature_of_their_table_in_dtype_and_shape(
    server: reverb.Server, client: reverb.Client, is_reset: bool
) -> None:
    if is_reset:
        client.reset("whole")
    with server.localhost_client() as other, other.trajectory_writer(3) as writer:
        for _ in range(3):
            writer.append({"a": np.zeros(3), "b": 1, "c": np.zeros(4), "d": np.float32(1)})
        a, b, c, d = (writer.history[name] for name in "abcd")
        writer.create_item("whole", 1.0, {"a": a[-2:], "b": (b[-1],)})
        writer.create_item("whole", 1.0, [a[-3:], b[-1]])  # Names do not matter, as in Reverb.
        for wrong, why in [
            ({"a": c[-2:], "b": b[-1]}, r"array 0 .* is float64\[2, 4\], and float64\[\?, 3\] by"),
            ({"a": a[-2:], "b": b[-1:]}, r"array 1 .* is int64\[1\], and int64\[\] by .*'b.0'"),
            ({"a": a[-2:], "b": d[-1]}, r"array 1 .* is float32\[\], and int64\[\] by"),
            ({"a": a[-2:]}, "to have 2 arrays, by the table's signature, and has 1"),
        ]:
            with pytest.raises(ValueError, match=why):
                writer.create_item("whole", 1.0, wrong)
        writer.flush()
        with other.trajectory_writer(1, validate_items=False) as heedless:
            heedless.append({"a": 1})
            heedless.create_item("whole", 1.0, {"a": heedless.history["a"][-1:]})
        assert 3 == other.server_info()["whole"].current_size


def test_60_the_older_writer_and_insert_are_held_to_the_signature_of_a_step(
    client: reverb.Client,
) -> None:
    client.insert({"a": np.zeros(3)}, {"same": 1.0})
    with pytest.raises(ValueError, match=r"array 0 .* is float64\[4\], and float64\[3\] by"):
        client.insert({"a": np.zeros(4)}, {"queue": 1.0, "same": 1.0})
    assert 0 == client.server_info()["queue"].current_size
    with client.writer(3) as writer:
        for _ in range(3):
            writer.append({"a": np.ones(3)})
        for steps in (1, 3, 2):
            writer.create_item("same", steps, 1.0)
    with client.writer(3) as writer:
        writer.append({"a": np.ones(3, np.float32)})
        with pytest.raises(ValueError, match=r"is float32\[3\], and float64\[3\] by"):
            writer.create_item("same", 1, 1.0)
    assert 4 == client.server_info()["same"].current_size


def test_a_table_and_what_is_told_of_it_say_its_signature(client: reverb.Client) -> None:
    told = client.server_info()
    assert None is told["queue"].signature
    signature = told["whole"].signature
    assert ("float64", (None, 3)) == (signature["a"].dtype, signature["a"].shape)
    assert (("int64", ()),) == tuple((each.dtype, each.shape) for each in signature["b"])


def test_6_and_19_a_table_says_what_is_in_it_and_what_would_pass(client: reverb.Client) -> None:
    """As `SampleToInsertRatio(4, 2, 8)` does it in Reverb."""
    table = TABLES["ratio"]
    fresh = table.replace(name="fresh")
    for each in (table, fresh):
        assert (False, True) == (each.can_sample(1), each.can_insert(4))
        assert (each.name, 0) == (each.info.name, each.info.current_size)
    for number in range(2):
        client.insert(number, {"ratio": 1.0})
    assert (True, False) == (table.can_sample(8), table.can_sample(9))
    assert (True, False) == (table.can_insert(2), table.can_insert(3))
    assert 8 == len(numbers(client, "ratio", 8))
    assert (2, 8, False, True) == (
        table.info.current_size,
        table.info.sampled_count,
        table.can_sample(1),
        table.can_insert(4),
    )
    with pytest.raises(reverb.DeadlineExceededError, match="8 chunks were delivered"):
        next(client.sample("ratio", timeout_ms=0))


def test_a_writer_that_was_closed_takes_nothing_more(client: reverb.Client) -> None:
    writer = client.trajectory_writer(2)
    with writer:
        writer.append(1)
    writer.append(2)
    writer.create_item("uniform", 1.0, writer.history[:])
    writer.close()
    writer.close()
    assert 1 == client.server_info()["uniform"].current_size
    older = client.writer(2)
    older.append(1)
    older.close()
    for refused in (
        lambda: writer.append(3),
        lambda: writer.create_item("uniform", 1.0, writer.history[:]),
        writer.flush,
        writer.end_episode,
        lambda: older.append(2),
        lambda: older.create_item("uniform", 1, 1.0),
        older.flush,
    ):
        with pytest.raises(RuntimeError, match="close"):
            refused()
    with pytest.raises(ValueError, match="close"):
        older.close()


def test_items_of_other_lengths_fit_one_table(client: reverb.Client) -> None:
    with client.trajectory_writer(5) as writer:
        for number in range(5):
            writer.append(number)
            writer.create_item(
                "uniform", 1.0, {"all": writer.history[:], "last": writer.history[-1]}
            )
    lengths = {
        len(sample.data["all"])
        for sample in client.sample(
            "uniform", 60, emit_timesteps=False, unpack_as_table_signature=True
        )
    }
    assert {1, 2, 3, 4, 5} == lengths
    with pytest.raises(ValueError, match="cannot split"):
        next(client.sample("uniform"))


def test_named_tuples_and_batches_come_back(server: reverb.Server, client: reverb.Client) -> None:
    with client.trajectory_writer(2) as writer:
        for number in range(4):
            writer.append(Step({"image": np.full(3, number, np.uint8)}, float(number)))
            if number:
                item = Step(writer.history.observation, writer.history.reward)
                columns = Step({"image": item.observation["image"][-2:]}, item.reward[-2:])
                writer.create_item("queue", 1.0, columns)
    dataset = reverb.TrajectoryDataset(
        f"localhost:{server.port}", "queue", rate_limiter_timeout_ms=100
    )
    [batch] = dataset.batch(3)
    assert ((3, 2, 3), np.uint8) == (
        batch.data.observation["image"].shape,
        batch.data.observation["image"].dtype,
    )
    np.testing.assert_array_equal([[0, 1], [1, 2], [2, 3]], batch.data.reward)
    assert (3,) == batch.info.key.shape


def test_a_dataset_gives_the_structure_that_it_is_told(
    server: reverb.Server, client: reverb.Client
) -> None:
    client.insert([np.zeros(2, np.float32), np.int64(3)], {"uniform": 1.0})
    address = f"localhost:{server.port}"
    told = {"a": np.float32, "b": np.int64}
    [sample] = reverb.TimestepDataset(address, "uniform", dtypes=told).take(1)
    assert {"a": (2,), "b": ()} == {name: leaf.shape for name, leaf in sample.data.items()}
    with pytest.raises(ValueError, match="have dtypes"):
        next(iter(reverb.TimestepDataset(address, "uniform", dtypes={"a": np.float64})))


def test_56_the_older_writer_makes_items_of_the_latest_steps(client: reverb.Client) -> None:
    with client.writer(3) as writer:
        for number in range(5):
            writer.append([np.float32(number)])
            if number >= 2:
                writer.create_item("queue", 3, 1.0)
    got = [[float(step.data[0]) for step in item] for item in client.sample("queue", 3)]
    assert [[0, 1, 2], [1, 2, 3], [2, 3, 4]] == got


def test_46_server_info_counts_what_happened(client: reverb.Client) -> None:
    for number in range(2):
        client.insert(number, {"queue": 1.0})
    assert [0] == numbers(client, "queue", 1)
    info = client.server_info(timeout=10)["queue"]
    assert ("queue", 1, 10, 1) == (
        info.name,
        info.current_size,
        info.max_size,
        info.max_times_sampled,
    )
    assert set(TABLES) == set(client.server_info())


def test_68_a_server_that_is_started_again_has_its_tables_as_they_were(tmp_path: Path) -> None:
    checkpointer = reverb.checkpointers.DefaultCheckpointer(str(tmp_path / "store"))
    tables = [TABLES["prioritized"], TABLES["twice"], TABLES["whole"].replace(name="signed")]
    with (
        reverb.Server(tables, checkpointer=checkpointer) as server,
        server.localhost_client() as client,
    ):
        for number in range(3):
            client.insert({"a": np.full(2, number)}, {"prioritized": number, "twice": 1.0})
        [first] = client.sample("twice", emit_timesteps=False)
        assert client.server_address == client.checkpoint()
    with (
        reverb.Server(tables, checkpointer=checkpointer) as server,
        server.localhost_client() as client,
    ):
        [again] = client.sample("twice", emit_timesteps=False)
        assert (first.info.key, 2) == (again.info.key, again.info.times_sampled)
        np.testing.assert_array_equal(first.data[0], again.data[0])
        priorities = {
            int(sample.data[0][0, 0]): sample.info.priority
            for sample in client.sample("prioritized", 40, emit_timesteps=False)
        }
        assert {1: 1.0, 2: 2.0} == priorities
        assert (None, 3) == client.server_info()["signed"].signature["a"].shape
        with pytest.raises(ValueError, match="signature"):
            client.insert([1.0], {"signed": 1.0})


def test_71_a_port_in_use_is_a_clear_error(server: reverb.Server) -> None:
    with pytest.raises(breadbox.errors.UnavailableError, match=r"address|listen"):
        reverb.Server([reverb.Table.queue("q", 1)], port=server.port)


def insert_one(client: reverb.Client) -> None:
    """Runs in a process of its own."""
    with client:
        client.insert(5, {"uniform": 1.0})


def test_72_a_pickled_client_works_in_another_process(client: reverb.Client) -> None:
    process = multiprocessing.get_context("spawn").Process(target=insert_one, args=(client,))
    process.start()
    process.join(60)
    assert 0 == process.exitcode
    assert [5] == numbers(client, "uniform", 1)


def test_a_fragment_that_is_no_item_is_named(client: reverb.Client) -> None:
    from support.fragments import vector_fragment

    session_id = client.breadbox.watch_model(buffer="uniform").session_id
    fragment = vector_fragment(0)
    fragment.session_id = session_id
    client.breadbox.append(fragment, buffer="uniform")
    with pytest.raises(ValueError, match="is no item"):
        next(client.sample("uniform"))
