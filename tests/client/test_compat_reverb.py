"""Reverb's writers, histories, limiters and structures without a server.

Tests with a number hold the behaviour that docs/studies/reverb.md lists by that number.
"""

import copy
import math
import threading
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import pytest

import breadbox_adapters.reverb as reverb
from breadbox.client import connect
from breadbox.model.errors import (
    BackpressureError,
    UnavailableError,
    UnsupportedArrayError,
    WaitElapsedError,
)
from breadbox.model.fragment import Fragment
from breadbox.model.presets import UNLIMITED
from breadbox.model.types import (
    AdmissionOutcome,
    AppendResult,
    BufferConfig,
    BufferDescription,
    BufferState,
    FullPolicy,
    MinimumChunks,
    ModelState,
    SampleToInsertRatio,
    SchemaPolicy,
)
from breadbox_adapters.reverb.items import Signature, flatten, fragment_of, restored, stored
from breadbox_adapters.reverb.sampling import Draws, Stream
from breadbox_adapters.reverb.sending import ItemSender
from support import growth

LIMIT_S = 20.0


class Step(NamedTuple):
    """As Acme's adders write it."""

    observation: Any
    reward: Any


class Gate(ItemSender):
    """Takes items as a server does, once it is opened; keeps them."""

    def __init__(self, *, is_open: bool = True) -> None:
        self.items: list[tuple[str, Fragment]] = []
        self.error: Exception | None = None
        self.opened = threading.Event()
        if is_open:
            self.opened.set()

    def signature_of(self, table: str) -> None:
        """None has one."""

    def append_many(
        self,
        fragments: Iterable[Fragment],
        *,
        buffer: str | None = None,
        codecs: str | Mapping[str, str] | None = None,
        answered: Callable[[list[AppendResult]], None] | None = None,
    ) -> list[AppendResult]:
        fragments = list(fragments)
        assert self.opened.wait(LIMIT_S)
        if self.error is not None:
            raise self.error
        assert buffer is not None
        self.items += [(buffer, fragment) for fragment in fragments]
        return [AppendResult(AdmissionOutcome.ADMITTED)] * len(fragments)

    def trees(self) -> list[Any]:
        """What the items hold, without the axes that only fragments have."""
        return [
            {path: leaf[0] for path, leaf in fragment.extras["item"].items()}
            for _, fragment in self.items
        ]


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.opened.set()


@pytest.fixture
def writer(gate: Gate) -> Iterator[reverb.TrajectoryWriter]:
    with reverb.TrajectoryWriter(gate, 3) as made:
        yield made


def test_61_columns_may_differ_in_length_and_ints_squeeze_slices_keep_lists_gather(
    gate: Gate, writer: reverb.TrajectoryWriter
) -> None:
    for number in range(3):
        writer.append({"a": np.int32(number), "b": np.full(2, number, np.float32)})
    history = writer.history
    writer.create_item(
        "t",
        1.0,
        {
            "last": history["a"][-1],
            "two": history["b"][-2:],
            "mixed": history["a"][[1, 0, 2]],
            "nested": history["a"][:][1:],
        },
    )
    writer.flush()
    [item] = gate.trees()
    assert 2 == item["last"]
    assert () == item["last"].shape
    np.testing.assert_array_equal([[1, 1], [2, 2]], item["two"])
    np.testing.assert_array_equal([1, 0, 2], item["mixed"])
    np.testing.assert_array_equal([1, 2], item["nested"])
    assert (np.int32, np.float32) == (item["mixed"].dtype, item["two"].dtype)
    assert history["a"][-1].is_squeezed
    assert (2, 2) == history["b"][-2:].shape


def test_62_structure_may_grow_and_what_a_step_lacked_cannot_be_taken(
    gate: Gate, writer: reverb.TrajectoryWriter
) -> None:
    writer.append({"a": 1})
    writer.append({"a": 2, "b": {"c": 20}})
    writer.append({"a": 3})
    assert [3, 3] == [len(writer.history["a"]), len(writer.history["b"]["c"])]
    np.testing.assert_array_equal([20], writer.history["b"]["c"][1:2].numpy())
    with pytest.raises(ValueError, match=r"column 'b/c' number 0 was not given in its step"):
        writer.history["b"]["c"][-1]
    with pytest.raises(ValueError, match="cannot contain None"):
        writer.history["b"]["c"][:]


def test_62_a_slice_from_before_the_episode_is_refused_not_cut(
    writer: reverb.TrajectoryWriter,
) -> None:
    writer.append({"a": 1})
    writer.append({"a": 2})
    with pytest.raises(ValueError, match="cannot contain None"):
        writer.history["a"][-3:]
    with pytest.raises(IndexError):
        writer.history["a"][2]
    with pytest.raises(TypeError, match="a number, a slice or a list of numbers"):
        writer.history["a"]["b"]


def test_63_partial_steps_merge_into_one_and_a_field_given_twice_is_refused(
    gate: Gate, writer: reverb.TrajectoryWriter
) -> None:
    writer.append({"a": 1}, partial_step=True)
    assert 0 == writer.episode_steps
    with pytest.raises(ValueError, match=r"column 'a' has been set in this step"):
        writer.append({"a": 2, "b": 3})
    writer.append({"b": 3})
    assert 1 == writer.episode_steps
    writer.append({"b": 4}, partial_step=True)
    writer.append({"a": None, "c": 5}, partial_step=True)
    writer.append({"a": 6})
    assert 2 == writer.episode_steps
    assert [2, 2, 2] == [len(writer.history[name]) for name in "abc"]
    np.testing.assert_array_equal([1, 6], writer.history["a"][:].numpy())
    np.testing.assert_array_equal([3, 4], writer.history["b"][:].numpy())
    np.testing.assert_array_equal([5], writer.history["c"][[1]].numpy())


def test_64_steps_older_than_the_window_are_refused_as_expired(
    gate: Gate, writer: reverb.TrajectoryWriter
) -> None:
    writer.append({"a": 0})
    first = writer.history["a"][:]
    for number in range(1, 4):
        writer.append({"a": number})
    with pytest.raises(ValueError, match=r"column 'a' refers to a step that has expired"):
        writer.create_item("t", 1.0, first)
    with pytest.raises(RuntimeError, match="expired"):
        first.numpy()
    with pytest.raises(ValueError, match="no longer kept"):
        writer.history["a"][:]
    assert 4 == len(writer.history["a"])
    np.testing.assert_array_equal([1, 2, 3], writer.history["a"][-3:].numpy())


def test_64_a_column_may_keep_more_than_the_others(writer: reverb.TrajectoryWriter) -> None:
    writer.configure(("a",), num_keep_alive_refs=5)
    for number in range(5):
        writer.append({"a": number, "b": number})
    assert (5,) == writer.history["a"][:].shape
    writer.configure(("b",), num_keep_alive_refs=1)
    assert (1,) == writer.history["b"][-1:].shape
    with pytest.raises(ValueError, match="no longer kept"):
        writer.history["b"][-2]
    with pytest.raises(ValueError, match="positive"):
        writer.configure(("a",), num_keep_alive_refs=0)
    with pytest.raises(ValueError, match="max_chunk_length"):
        writer.configure(("a",), num_keep_alive_refs=1, max_chunk_length=2)


def test_60_another_dtype_shape_or_structure_is_refused_at_once_by_path(
    writer: reverb.TrajectoryWriter,
) -> None:
    writer.append({"a": {"b": np.zeros(2, np.float32)}})
    with pytest.raises(ValueError, match=r"'a/b' has had dtype float32, and now float64"):
        writer.append({"a": {"b": np.zeros(2)}})
    with pytest.raises(ValueError, match=r"'a/b' has had shape \[2\], and now \[3\]"):
        writer.append({"a": {"b": np.zeros(3, np.float32)}})
    with pytest.raises(ValueError, match="changed from dict to"):
        writer.append({"a": np.zeros(2, np.float32)})
    with pytest.raises(ValueError, match="is no array"):
        writer.append({"c": object()})
    assert 1 == len(writer.history["a"]["b"])
    assert 1 == writer.episode_steps


def test_60_texts_may_be_of_any_width(writer: reverb.TrajectoryWriter) -> None:
    writer.append({"a": "ab"})
    writer.append({"a": "abcd"})
    assert 2 == len(writer.history["a"])


def test_what_is_appended_may_be_written_over(writer: reverb.TrajectoryWriter) -> None:
    observation = np.zeros(2)
    for number in range(2):
        observation[:] = number
        writer.append(observation)
    np.testing.assert_array_equal([[0, 0], [1, 1]], writer.history[:].numpy())


def test_49_nothing_is_sent_that_is_in_no_item(gate: Gate, writer: reverb.TrajectoryWriter) -> None:
    for number in range(3):
        writer.append({"a": number, "b": number})
    writer.create_item("t", 1.0, writer.history["a"][-1:])
    writer.end_episode()
    assert 1 == len(gate.items)
    np.testing.assert_array_equal([[2]], gate.items[0][1].extras["item"])


def test_items_are_of_columns_alone(writer: reverb.TrajectoryWriter) -> None:
    with pytest.raises(RuntimeError, match="before append"):
        _ = writer.history
    writer.append({"a": 1})
    with pytest.raises(TypeError, match="must be TrajectoryColumn"):
        writer.create_item("t", 1.0, {"a": np.zeros(1)})
    with pytest.raises(ValueError, match="at least one column"):
        writer.create_item("t", 1.0, {})
    with pytest.raises(ValueError, match="no steps"):
        writer.create_item("t", 1.0, writer.history["a"][1:])


@pytest.mark.parametrize("priority", [float("nan"), -1.0, float("inf"), -float("inf")])
def test_28_what_is_no_priority_is_refused_and_harms_nothing(
    gate: Gate, writer: reverb.TrajectoryWriter, priority: float
) -> None:
    writer.append({"a": 1})
    with pytest.raises(ValueError, match="from 0 to 1e"):
        writer.create_item("t", priority, writer.history["a"][:])
    writer.create_item("t", 0.0, writer.history["a"][:])
    writer.flush()
    assert [(0, 0.0)] == [(each.fragment_index, each.priority) for _, each in gate.items]


def test_the_end_of_an_episode_clears_the_history_unless_told_otherwise(
    writer: reverb.TrajectoryWriter,
) -> None:
    writer.append({"a": 1})
    old = writer.history["a"][:]
    writer.end_episode(clear_buffers=False)
    assert (0, 1) == (writer.episode_steps, len(writer.history["a"]))
    writer.append({"a": 2})
    np.testing.assert_array_equal([1, 2], writer.history["a"][:].numpy())
    writer.end_episode()
    assert 0 == len(writer.history["a"])
    with pytest.raises(ValueError, match="expired"):
        writer.create_item("t", 1.0, old)


def test_57_flush_leaves_as_many_pending_as_it_is_told() -> None:
    gate = Gate(is_open=False)
    with reverb.TrajectoryWriter(gate, 1) as writer:
        writer.append({"a": 1})
        for table in ("t", "u", "t"):
            writer.create_item(table, 1.0, writer.history["a"][:])
        writer.flush(block_until_num_items=3, timeout_ms=10)
        with pytest.raises(reverb.DeadlineExceededError, match="within 10 ms"):
            writer.flush(block_until_num_items=2, timeout_ms=10)
        with pytest.raises(reverb.DeadlineExceededError):
            writer.end_episode(timeout_ms=1)
        assert (0, 0) == (writer.episode_steps, len(writer.history["a"]))
        with pytest.raises(ValueError, match=">= 0"):
            writer.flush(block_until_num_items=-1)
        gate.opened.set()
        writer.flush()
        assert ["t", "t", "u"] == sorted(table for table, _ in gate.items)
        writer.append({"a": 2})
        writer.create_item("t", 1.0, writer.history["a"][:])
    assert 4 == len(gate.items)


def test_56_the_older_writer_blocks_at_its_number_of_unconfirmed_items() -> None:
    gate = Gate(is_open=False)
    blocked, passed = threading.Event(), threading.Event()

    def write() -> None:
        with reverb.Writer(gate, 2, 2) as writer:
            writer.append_sequence({"a": np.arange(3)})
            writer.create_item("t", 2, 1.0)
            writer.create_item("t", 2, 1.0)
            blocked.set()
            writer.create_item("t", 1, 1.0)
            passed.set()

    thread = threading.Thread(target=write)
    thread.start()
    assert blocked.wait(LIMIT_S)
    assert not passed.wait(0.2)
    gate.opened.set()
    thread.join(LIMIT_S)
    assert passed.is_set()
    assert [[1, 2], [1, 2], [2]] == [item["a"].tolist() for item in gate.trees()]


def test_59_an_error_is_raised_by_every_later_call_with_its_own_words() -> None:
    gate = Gate()
    gate.error = UnavailableError("the server burnt down")
    writer = reverb.TrajectoryWriter(gate, 1)
    writer.append({"a": 1})
    writer.create_item("t", 1.0, writer.history["a"][:])
    for _ in range(2):
        with pytest.raises(reverb.ReverbError, match="burnt down"):
            writer.flush()
        with pytest.raises(reverb.ReverbError, match="burnt down"):
            writer.create_item("t", 1.0, writer.history["a"][:])
    with pytest.raises(reverb.ReverbError, match="burnt down"):
        writer.close()


def test_67_leaving_the_block_flushes_unless_the_services_error_passes() -> None:
    gate = Gate()
    writer = reverb.TrajectoryWriter(gate, 1)
    writer.append({"a": 1})

    def fail_in_block(error: Exception) -> None:
        with writer:
            writer.create_item("t", 1.0, writer.history["a"][:])
            raise error

    with pytest.raises(KeyError):
        fail_in_block(KeyError())
    assert 1 == len(gate.items)
    gate.opened.clear()
    with pytest.raises(reverb.ReverbError):
        fail_in_block(reverb.ReverbError())
    assert 1 == len(gate.items)
    gate.opened.set()


@pytest.mark.parametrize(
    "make",
    [
        lambda: reverb.rate_limiters.MinSize(0),
        lambda: reverb.rate_limiters.SampleToInsertRatio(0.0, 1, 10.0),
        lambda: reverb.rate_limiters.SampleToInsertRatio(-1.0, 1, 10.0),
        lambda: reverb.rate_limiters.SampleToInsertRatio(5.0, 1, (0.0, 9.9)),
        lambda: reverb.rate_limiters.SampleToInsertRatio(1.0, 1, 0.5),
        lambda: reverb.rate_limiters.SampleToInsertRatio(1.0, 10, (10.1, 100.0)),
    ],
)
def test_20_limiters_that_can_never_work_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match=r"must be"):
        make()


def test_20_a_limiter_that_locks_one_thread_out_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="will wait for itself"):
        reverb.rate_limiters.SampleToInsertRatio(1.0, 10, (0.0, 9.0))


def a_table(**changes: Any) -> reverb.Table:
    given: dict[str, Any] = {
        "name": "t",
        "sampler": reverb.selectors.Uniform(),
        "remover": reverb.selectors.Fifo(),
        "max_size": 10,
        "rate_limiter": reverb.rate_limiters.MinSize(1),
    }
    return reverb.Table(**(given | changes))


def test_72_tables_without_name_or_room_are_refused() -> None:
    with pytest.raises(ValueError, match="name"):
        a_table(name="")
    with pytest.raises(ValueError, match="max_size"):
        a_table(max_size=0)
    with pytest.raises(ValueError, match="same priority_exponent"):
        a_table(
            sampler=reverb.selectors.Prioritized(1.0), remover=reverb.selectors.Prioritized(0.5)
        )
    with pytest.raises(ValueError, match="from 0 to 8"):
        reverb.selectors.Prioritized(-1.0)
    with connect("localhost:1") as nobody:
        with pytest.raises(ValueError, match="at least one table"):
            reverb.create_tables(nobody, [])
        with pytest.raises(ValueError, match="several tables are named 't'"):
            reverb.create_tables(nobody, [a_table(), a_table(max_size=3)])


def test_72_a_copy_of_a_client_names_the_same_server() -> None:
    with reverb.Client("localhost:1", token="secret") as client, copy.copy(client) as another:
        assert client is not another
        assert "localhost:1" == another.server_address
        assert "Client, server_address=localhost:1" == repr(another)


def test_71_a_server_that_is_away_ends_in_a_deadline_that_was_given() -> None:
    with (
        reverb.Client("127.0.0.1:1") as client,
        pytest.raises(reverb.DeadlineExceededError, match="within 1 s"),
    ):
        client.server_info(timeout=1)


def test_a_table_is_a_buffer_of_its_limits() -> None:
    config = a_table(max_times_sampled=3, sampler=reverb.selectors.Prioritized(0.5)).config()
    assert (10, 3, FullPolicy.EVICT) == (
        config.capacity_chunks,
        config.uses_max,
        config.full_policy,
    )
    assert ("prioritised", 0.5, "oldest_first", True) == (
        config.sampler,
        config.priority_exponent,
        config.remover,
        config.with_replacement,
    )
    assert MinimumChunks(1) == config.limiter
    assert SchemaPolicy.ANY is config.schema
    queue = reverb.Table.queue("q", 7).config()
    assert (7, 1, FullPolicy.BLOCK, "oldest_first", MinimumChunks(1)) == (
        queue.capacity_chunks,
        queue.uses_max,
        queue.full_policy,
        queue.sampler,
        queue.limiter,
    )
    assert "newest_first" == reverb.Table.stack("s", 7).config().sampler
    limiter = reverb.rate_limiters.SampleToInsertRatio(2.0, 100, 20.0)
    assert (
        SampleToInsertRatio(2.0, 20.0, 100, 200.0) == a_table(rate_limiter=limiter).config().limiter
    )
    assert UNLIMITED == a_table().config().uses_max


def test_a_signature_comes_back_from_what_keeps_it_in_its_structure() -> None:
    spec = SimpleNamespace(shape=(None, 2), dtype=np.float32)
    unknown = SimpleNamespace(shape=SimpleNamespace(rank=None), dtype=np.str_)
    given = {"b": [np.zeros(3), spec], "a": Step((unknown,), None), "(odd": np.int8(1)}
    signature = Signature.of(given)
    found = Signature.unpacked(signature.packed())
    assert signature.specs["b"] == found.specs["b"]
    assert ("text", None) == (found.specs["a"].observation[0].dtype, found.specs["a"][0][0].shape)
    assert None is found.specs["a"].reward
    assert "float32[?, 2]" == str(found.specs["b"][1])
    assert ("int8", ()) == (found.specs["(odd"].dtype, found.specs["(odd"].shape)
    assert None is Signature.unpacked({"layer.weight": np.zeros(3)})
    item = {"b": [np.ones(3), np.ones((7, 2), np.float32)], "a": (np.array("w"),), "c": np.int8(2)}
    found.check("t", [item["c"], item["a"], item["b"]], is_of_steps=False)


class FullTable:
    """Tables of a client that have room only at certain calls; a call takes seconds."""

    def __init__(self, rooms: list[bool], call_s: float) -> None:
        self.buffer = "queue"
        self.now = 0.0
        self._rooms, self._call_s = iter(rooms), call_s

    def watch_model(self, **_: Any) -> ModelState:
        return ModelState("reverb", 0, None)

    def append_many(self, fragments: Sequence[Fragment], **_: Any) -> list[AppendResult]:
        self.now += self._call_s
        if next(self._rooms):
            return [AppendResult(AdmissionOutcome.ADMITTED)] * len(fragments)
        error = BackpressureError("buffer full at 10 of 10 chunks", 0.1)
        error.results = (AppendResult(AdmissionOutcome.BUFFER_FULL),) * len(fragments)
        raise error


def test_an_insert_that_waits_for_room_says_so_twice_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # A call each 2 s: at 2 s it waits, at 32 and 62 s this is said; it begins anew after room.
    table = FullTable([*[False] * 40, True, *[False] * 14, True], call_s=2.0)
    sender = ItemSender(cast(Any, table), clock=lambda: table.now)
    for index, said_count in ((0, 2), (1, 2)):
        sender.insert(fragment_of([np.zeros(1)], 1.0, worker_id="w", index=index), "queue")
        said = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
        line = "inserting into table 'queue' waits: buffer full at 10 of 10 chunks"
        assert [line] * said_count == said


class Starved:
    """A table without items: a fetch waits for nothing, and says so."""

    def __init__(self) -> None:
        self.waits_s: list[float] = []

    def watch_model(self, **_: Any) -> ModelState:
        return ModelState("reverb", 0, None)

    def get_buffer(self, _: str) -> BufferDescription:
        return BufferDescription("t", BufferConfig(uses_max=1), "reverb", 0, BufferState())

    def fetch(self, count: int, max_wait_s: float, **_: Any) -> Any:
        self.waits_s.append(max_wait_s)
        if len(self.waits_s) > 2:
            raise UnavailableError("enough")
        raise WaitElapsedError(max_wait_s, "0 of 1 chunks are there")


def test_a_sample_that_waits_says_so_twice_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    table = Starved()
    with pytest.raises(UnavailableError):
        next(Draws(cast(Any, table), "t", at_once=1, wait_s=math.inf)(1))
    assert [30.0, 30.0, 30.0] == table.waits_s
    said = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert ["sampling table 't' waits: 0 of 1 chunks are there"] * 2 == said


def test_structures_come_back_as_they_were_stored() -> None:
    tree = {
        "z": [np.array(1), (np.array(2), None)],
        "(odd": {"((": np.array(3)},
        "step": Step(np.array(4), {"(Step)reward": np.array(5)}),
        "a": np.array(6),
    }
    known: dict[tuple[str, ...], type] = {}
    back = restored(stored(tree), known)
    assert repr(tree) == repr(back)
    again = restored(stored(tree), known)
    assert type(again["step"]) is type(back["step"])
    assert [3, 6, 4, 5, 1, 2] == [int(leaf) for leaf in flatten(tree)]


def test_keys_that_are_no_texts_come_back_as_they_were() -> None:
    tree = {
        2: {(0, "a"): [np.array(1)], (1, (2.5,)): Step(np.array(2), None)},
        np.int64(1): np.array(3),
    }
    assert repr({2: tree[2], 1: np.array(3)}) == repr(restored(stored(tree)))
    assert [3, 1, 2] == [int(leaf) for leaf in flatten(tree)]
    with pytest.raises(TypeError):
        stored({object(): np.array(1)})


def test_a_named_tuple_has_its_fields_in_their_order_whatever_order_entries_are_kept_in() -> None:
    shuffled = namedtuple("shuffled", "reward action discount")
    held = stored(shuffled(np.array(1.0), np.array(2.0), {"b": np.array(3.0), "a": np.array(4.0)}))
    for kept in (held, dict(sorted(held.items())), dict(reversed(held.items()))):
        reward, action, discount = restored(kept)
        assert (1.0, 2.0, 3.0, 4.0) == (reward, action, discount["b"], discount["a"])
        assert ("reward", "action", "discount") == restored(kept)._fields


def test_named_tuples_of_earlier_versions_have_their_fields_by_name() -> None:
    back = restored({"(Old)reward": np.array(1.0), "(Old)action": np.array(2.0)})
    assert (1.0, 2.0) == (back.reward, back.action)


def test_a_batch_of_items_has_each_column_by_its_name_or_is_refused() -> None:
    items = [{"a": np.array(1), "b": np.array(2)}, {"b": np.array(2), "a": np.array(1)}]
    (batch,) = Stream(lambda: iter(items)).batch(2)
    assert {"a": [1, 1], "b": [2, 2]} == {key: each.tolist() for key, each in batch.items()}
    others = [{"a": np.array(1)}, {"b": np.array(2)}]
    with pytest.raises(ValueError, match="other columns"):
        list(Stream(lambda: iter(others)).batch(2))


def test_a_masked_array_is_no_step_because_its_mask_would_be_lost(
    writer: reverb.TrajectoryWriter,
) -> None:
    with pytest.raises(UnsupportedArrayError, match=r"a.*mask apart"):
        writer.append({"a": np.ma.masked_array(np.zeros(2), True)})


@growth.marked
def test_each_step_of_a_long_episode_takes_as_long_to_look_back_from_as_one_of_a_short(
    gate: Gate,
) -> None:
    def looking_back(step_count: int) -> Callable[[], object]:
        writer = reverb.TrajectoryWriter(gate, 2)
        for number in range(step_count):
            writer.append(np.int64(number))
        return lambda: [writer.history[-1:] for _ in range(step_count)]

    growth.check(looking_back, 8192)
