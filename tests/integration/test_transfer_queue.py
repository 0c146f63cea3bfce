"""The functions of `transfer_queue` on a real server: what they keep, refuse and give back."""

import asyncio
import importlib.util
import pickle  # noqa: TID251 - Ray sends a batch's names by it
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import breadbox
from breadbox.testing import ServerProcess, start_server
from peers.packages import require

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(120),  # a process of its own imports torch
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]

require("tensordict", "transfer-queue")

from tensordict import NonTensorData, NonTensorStack, TensorDict  # noqa: E402

from breadbox_adapters import transfer_queue as tq  # noqa: E402
from breadbox_adapters.transfer_queue.rows import Rows  # noqa: E402
from breadbox_adapters.transfer_queue.runtime import runtime  # noqa: E402


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with start_server() as made:
        yield made


@pytest.fixture(autouse=True)
def partition(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[str]:
    """A buffer for the test alone, and a partition whose name has to be escaped."""
    monkeypatch.setenv("BREADBOX_SERVER", server.address)
    monkeypatch.setenv("BREADBOX_BUFFER", f"b{abs(hash(request.node.name))}")
    tq.init()
    yield "train/1: größer"
    tq.close()


def put(partition: str, keys: list[str], **columns: Any) -> tq.KVBatchMeta:
    return tq.kv_batch_put(keys, partition, TensorDict(columns, batch_size=[len(keys)]))


def plain(column: Any) -> list[Any]:
    return [each.tolist() if isinstance(each, torch.Tensor) else each for each in column]


DTYPES = [
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.bool, torch.uint8),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64),
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_come_back_bit_for_bit_with_type_and_shape(
    partition: str, dtype: torch.dtype
) -> None:
    columns = {
        "scalar": torch.tensor([0.1, -2.5, 3e4]).to(dtype),
        "one": torch.tensor([[0.1], [-2.5], [3e4]]).to(dtype),
        "matrix": torch.arange(18).reshape(3, 3, 2).to(dtype),
        "empty": torch.zeros(3, 0, dtype=dtype),
    }
    put(partition, ["a", "b", "c"], **columns)
    found = tq.kv_batch_get(["c", "a", "b"], partition)
    assert [3] == [*found.batch_size]
    for name, column in columns.items():
        rows = [*found[name].unbind()]
        assert {dtype} == {row.dtype for row in rows}
        expected = [column[i] for i in (2, 0, 1)]
        assert [row.shape for row in expected] == [row.shape for row in rows], name
        same = [torch.equal(a, b) for a, b in zip(expected, rows, strict=True)]
        assert [True] * 3 == same, name


def test_scalars_come_dense_and_rows_with_an_axis_jagged_whatever_their_lengths(
    partition: str,
) -> None:
    """verl reads `offsets()` also of prompts that all have one length, as TransferQueue gives."""
    put(partition, ["a", "b"], n=torch.tensor([1, 2]), same=torch.ones(2, 3))
    for key, length in (("a", 4), ("b", 2)):
        tq.kv_put(key, partition, {"ragged": torch.arange(length)})
    found = tq.kv_batch_get(["a", "b"], partition)
    assert (2,) == tuple(found["n"].shape)
    assert not found["n"].is_nested
    assert [0, 3, 6] == found["same"].offsets().tolist()
    assert [0, 4, 6] == found["ragged"].offsets().tolist()
    assert torch.jagged == found["ragged"].layout


def test_rows_that_no_jagged_tensor_holds_come_strided_or_as_a_stack(partition: str) -> None:
    shapes = {"a": (2, 3), "b": (2, 5)}
    for key, shape in shapes.items():
        tq.kv_put(key, partition, {"positions": torch.ones(shape), "kind": torch.ones(shape)})
    tq.kv_put("b", partition, {"kind": torch.ones(2, dtype=torch.int64)})
    found = tq.kv_batch_get(["a", "b"], partition)
    assert [(2, 3), (2, 5)] == [tuple(row.shape) for row in found["positions"].unbind()]
    assert [torch.float32, torch.int64] == [row.dtype for row in found["kind"]]


OBJECTS: list[Any] = [
    "größer",
    "",
    {"role": "user", "content": [{"type": "text", "text": "1+1"}]},
    [],
    {},
    None,
    [1, 2.5, True, None, float("inf"), 2**80],
    ("a", (1,)),
    {1: "a", (2, 3): "b"},
    {"$tuple": [1]},
    b"\x00\xff",
    "\ud800",
]


def test_objects_come_back_equal_and_of_their_types(partition: str) -> None:
    keys = [f"k{i:02}" for i in range(len(OBJECTS))]
    put(partition, keys, messages=NonTensorStack(*OBJECTS))
    found = [*tq.kv_batch_get(keys, partition)["messages"]]
    assert OBJECTS == found
    assert [type(each) for each in OBJECTS] == [type(each) for each in found]


def test_arrays_within_objects_keep_type_and_shape(partition: str) -> None:
    given: dict[str, Any] = {
        "pixels": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "scores": np.array([[1.5], [2.5]], np.float32),
        "one": np.float64(0.1),
        "names": np.array(["a", {"b": 1}], object),
        "none": torch.zeros(0, 2),
    }
    tq.kv_put("k", partition, {"extra": given})
    (found,) = tq.kv_batch_get("k", partition)["extra"]
    assert torch.equal(given["pixels"], found["pixels"])
    assert (np.float32, [[1.5], [2.5]]) == (found["scores"].dtype, found["scores"].tolist())
    assert (np.float64, 0.1) == (type(found["one"]), found["one"])
    assert ["a", {"b": 1}] == found["names"].tolist()
    assert (0, 2) == tuple(found["none"].shape)


def test_a_column_may_be_an_array_of_objects_or_one_value_for_all_rows(partition: str) -> None:
    objects = np.empty(2, object)
    objects[:] = [["a"], {"b": 1}]
    put(partition, ["a", "b"], o=objects, agent=NonTensorData("one"))
    found = tq.kv_batch_get(["a", "b"], partition)
    assert [["a"], {"b": 1}] == [*found["o"]]
    assert ["one", "one"] == [*found["agent"]]


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [1, object()]}, r"k\.x\.a\[1\]: builtins\.object"),
        ({"f": {1, 2}}, r"k\.x\.f: builtins\.set"),
        (Path("/"), r"k\.x: pathlib\..*Path"),
        (torch.zeros(2).to_sparse(), r"k\.x: a torch tensor"),
    ],
)
def test_what_is_no_tensor_and_no_json_is_refused_with_its_path(
    partition: str, value: Any, path: str
) -> None:
    with pytest.raises(TypeError, match=path):
        tq.kv_put("k", partition, {"x": value})
    assert {} == tq.kv_list(partition)


def test_tags_of_two_writers_merge_and_keep_their_types(partition: str) -> None:
    tag = {"is_prompt": True, "status": "pending", "global_steps": 3, "score": 0.5}
    more = {"min": None, "list": [1, "a"], "text": 'json:"x"', "n": np.int64(7)}
    tq.kv_put("k", partition, tag=tag)
    assert tag | more == tq.kv_put("k", partition, tag=more).tags[0]
    tq.kv_put("k", partition, tag={"status": "finished"})
    assert {partition: {"k": tag | more | {"status": "finished"}}} == tq.kv_list(partition)
    with pytest.raises(TypeError, match=r"k\.long: a tag has at most 64 bytes"):
        tq.kv_put("k", partition, tag={"long": "x" * 65})


def test_a_batch_of_puts_by_many_threads_loses_no_tag(partition: str) -> None:
    def write(number: int) -> None:
        for _ in range(5):
            tq.kv_batch_put(["a", "b"], partition, tags=[{f"t{number}": number}] * 2)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = {f"t{number}": number for number in range(8)}
    assert {"a": expected, "b": expected} == tq.kv_list(partition)[partition]


def test_the_last_value_of_a_column_counts_in_whatever_company_it_was_put(partition: str) -> None:
    put(partition, ["k"], a=torch.tensor([1]), b=torch.tensor([1]))
    put(partition, ["k"], a=torch.tensor([2]))
    put(partition, ["k"], a=torch.tensor([3]), b=torch.tensor([3]))
    put(partition, ["k"], b=torch.tensor([4]), c=NonTensorStack("x"))
    meta = put(partition, ["k"], c=torch.tensor([5]))
    found = tq.kv_batch_get_by_meta(meta)
    assert {"a": [3], "b": [4], "c": [5]} == {name: plain(found[name]) for name in found.keys()}  # noqa: SIM118


def test_many_columns_with_long_names(partition: str) -> None:
    names = [f"a_rather_long_name_of_a_column_{i}, with/odd\\signs" for i in range(20)]
    put(partition, ["k"], **{name: torch.tensor([i]) for i, name in enumerate(names)})
    found = tq.kv_batch_get("k", partition, names)
    assert [*range(20)] == [found[name].item() for name in names]


def test_keys_and_partitions_of_any_signs_do_not_meet(partition: str) -> None:
    pairs = [("p", "a:b"), ("p:a", "b"), ("p%3A", "a"), ("p", "%3Aa"), ("p", " /\\ü\n"), ("p", "*")]
    for number, (place, key) in enumerate(pairs):
        tq.kv_put(key, place, {"x": torch.tensor(number)})
    for number, (place, key) in enumerate(pairs):
        assert [number] == tq.kv_batch_get(key, place)["x"].tolist()
    tq.kv_clear("a:b", "p")
    assert {"b"} == {*tq.kv_list("p:a")["p:a"]}


def test_mistakes_are_value_errors(partition: str) -> None:
    put(partition, ["a", "b"], x=torch.arange(2))
    fields = TensorDict({"x": torch.arange(2)}, batch_size=[2])
    mistakes: list[tuple[Any, str]] = [
        (lambda: tq.kv_put("k", partition), "neither"),
        (lambda: tq.kv_put("k", partition, TensorDict({"x": torch.tensor(1)})), "batch_size"),
        (lambda: tq.get_client().put(TensorDict({}), partition_id=partition), "batch_size"),
        (lambda: tq.kv_batch_put(["a"], partition, fields), "do not match"),
        (lambda: tq.kv_batch_put(["a", "b"], partition, fields, [{}]), "do not match"),
        (lambda: tq.kv_batch_put(["a", "a"], partition, fields), "duplicated keys"),
        (lambda: tq.kv_put("a", partition, {"x": torch.nested.nested_tensor([[1]])}), "batch"),
        (lambda: tq.kv_batch_get(["a", "zz"], partition), "not found.*zz"),
        (lambda: tq.kv_batch_get("a", "elsewhere"), "not found"),
        (lambda: tq.kv_batch_get_by_meta(tq.KVBatchMeta(["a"], [{}])), "partition_id"),
        (lambda: tq.kv_batch_get([], partition), "empty"),
        (lambda: tq.KVBatchMeta(["a", "a"], [{}, {}]), "duplicated keys"),
        (lambda: tq.KVBatchMeta(["a"], []), "tags"),
        (lambda: tq.KVBatchMeta([], [], fields=["x", "x"]), "duplicated fields"),
    ]
    for call, text in mistakes:
        with pytest.raises(ValueError, match=text):
            call()
    tq.kv_put("tags", partition, tag={"a": 1})
    with pytest.raises(ValueError, match="ready"):
        tq.kv_batch_get(["a", "tags"], partition)
    assert ["a", "b", "tags"] == [*tq.kv_list(partition)[partition]]


def test_a_selected_column_that_not_all_rows_have_is_left_out(partition: str) -> None:
    """verl selects `values` and `ref_log_prob` also where there is no critic and no reference."""
    put(partition, ["a", "b"], x=torch.arange(2))
    put(partition, ["a"], y=torch.arange(1))
    found = tq.kv_batch_get(["a", "b"], partition, ["x", "y", "values"])
    assert ["x"] == [*found.keys()]


def test_a_task_takes_each_row_once_and_another_task_takes_it_too(partition: str) -> None:
    client = tq.get_client()
    put(partition, ["a", "b", "c"], x=torch.arange(3))
    ask: dict[str, Any] = {"data_fields": ["x"], "partition_id": partition}
    first = client.get_meta(batch_size=2, task_name="read", **ask)
    assert ["a", "b"] == client.kv_retrieve_keys(first.global_indexes, partition)
    assert [0, 1] == client.get_data(first)["x"].tolist()
    assert not client.check_consumption_status("read", partition)
    assert 0 == client.get_meta(batch_size=2, task_name="read", **ask).size
    assert 1 == client.get_meta(batch_size=1, task_name="read", **ask).size
    assert client.check_consumption_status("read", partition)
    assert 3 == client.get_meta(batch_size=3, task_name="train", **ask).size
    assert not client.check_consumption_status("read", "nowhere")


def test_a_row_that_is_cleared_while_a_task_takes_it_stays_cleared(
    partition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(partition, ["a", "b"], x=torch.arange(2))
    take = Rows.take

    async def clear_before(self: Rows, rows: Any, task: str) -> Any:
        await tq.async_kv_clear("a", partition)
        return await take(self, rows, task)

    monkeypatch.setattr(Rows, "take", clear_before)
    client = tq.get_client()
    taken = client.get_meta(["x"], 2, partition, task_name="read")
    assert ["b"] == client.kv_retrieve_keys(taken.global_indexes, partition)
    assert ["b"] == [*tq.kv_list(partition)[partition]]
    monkeypatch.setattr(Rows, "take", take)
    put(partition, ["a"], x=torch.arange(1))
    assert 1 == client.get_meta(["x"], 1, partition, task_name="read").size


def test_a_row_that_is_cleared_while_others_are_read_is_left_out(
    partition: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a checkpoint, and by a task that looks which rows another one was faster to take."""
    put(partition, ["a", "b", "c"], x=torch.arange(3))
    read = breadbox.aio.Client.read_members
    to_clear = ["a"]

    async def clear_before(self: Any, *args: Any, **options: Any) -> Any:
        while to_clear:
            await tq.async_kv_clear(to_clear.pop(), partition)
        return await read(self, *args, **options)

    monkeypatch.setattr(breadbox.aio.Client, "read_members", clear_before)
    tq.save_checkpoint(tmp_path)

    async def take_beside_another() -> list[Any]:
        rows = await runtime.rows()
        found = [*(await rows.listed(partition)).values()]
        await rows.take(found[:1], "read")
        to_clear.append("c")
        return [*await rows.take(found, "read")]

    assert [] == runtime.start(take_beside_another()).result()
    tq.load_checkpoint(tmp_path)
    assert ["b", "c"] == [*tq.kv_list(partition)[partition]]


FORK = """
import asyncio, os
from breadbox_adapters.transfer_queue.runtime import runtime
runtime.start(asyncio.sleep(0)).result()
with runtime._lock:  # As a call of another thread holds it.
    child = os.fork()
    if not child:
        runtime.start(asyncio.sleep(0)).result()
        os._exit(0)
raise SystemExit(os.waitpid(child, 0)[1])
"""


def test_a_child_is_not_stopped_by_a_call_of_another_thread_while_it_was_forked() -> None:
    """In a process of its own, that has no connection: gRPC has its own rules for forks."""
    assert 0 == subprocess.run([sys.executable, "-c", FORK], timeout=60, check=False).returncode


def test_tasks_in_many_threads_take_no_row_twice(partition: str) -> None:
    keys = [f"k{i:02}" for i in range(40)]
    put(partition, keys, x=torch.arange(40))
    taken: list[int] = []

    def take() -> None:
        client = tq.get_client()
        while meta := client.get_meta(["x"], 4, partition, task_name="read"):
            taken.extend(meta.global_indexes)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({*taken}) == len(taken)


def test_a_batch_is_written_back_by_its_numbers_without_old_tags(partition: str) -> None:
    client = tq.get_client()
    tq.kv_put("a", partition, {"x": torch.tensor([1, 2])}, {"status": "running"})
    meta = client.kv_retrieve_meta(["a"], partition)
    tq.kv_put("a", partition, tag={"status": "finished"})
    meta.update_custom_meta([{"score": 1}])
    meta = client.put(TensorDict({"y": torch.tensor([[3]])}, batch_size=[1]), meta)
    assert {"status": "finished", "score": 1} == tq.kv_list(partition)[partition]["a"]
    assert ["x", "y"] == meta.field_names
    assert [[3]] == plain(client.get_data(meta)["y"])
    new = client.put(TensorDict({"x": torch.arange(2)}, batch_size=[2]), partition_id="new")
    assert [0, 1] == client.get_data(new)["x"].tolist()


async def test_the_awaited_client_is_what_verls_workers_read_and_write_by(partition: str) -> None:
    client = tq.get_client()
    await tq.async_kv_batch_put(["b", "a"], partition, tags=[{"n": 1}, {"n": 2}])
    fields = TensorDict({"x": torch.arange(2)}, batch_size=[2])
    meta = await tq.async_kv_batch_put(["b", "a"], partition, fields)
    meta.reorder([1, 0])
    assert (["a", "b"], [{"n": 2}, {"n": 1}]) == (meta.keys, meta.tags)
    rows = await client.async_kv_retrieve_meta(meta.keys, partition)
    rows.extra_info = {"temperature": 1.0}
    assert [1, 0] == (await client.async_get_data(rows))["x"].tolist()
    rows = await client.async_put(TensorDict({"y": torch.ones(2, 3)}, batch_size=[2]), rows)
    assert ["x", "y"] == rows.field_names
    assert meta.keys == await client.async_kv_retrieve_keys(rows.global_indexes, partition)
    assert ["a", "b"] == [*(await tq.async_kv_list(partition))[partition]]
    found = await tq.async_kv_batch_get_by_meta(meta, "x")
    assert [1, 0] == found["x"].tolist()
    taken = await client.async_get_meta(["y"], 2, partition, task_name="read")
    assert taken.global_indexes == rows.global_indexes
    assert await client.async_check_consumption_status("read", partition)
    await tq.async_kv_clear("a", partition)
    with pytest.raises(ValueError, match="not found"):
        await client.async_get_data(rows)


def test_batches_are_cut_joined_and_pickled(partition: str) -> None:
    keys = [f"k{i}" for i in range(5)]
    meta = put(partition, keys, x=torch.arange(5))
    rows = tq.get_client().kv_retrieve_meta(keys, partition)
    assert [2, 2, 1] == [each.size for each in meta.chunk(3)] == [len(e) for e in rows.chunk(3)]
    assert meta.keys == tq.KVBatchMeta.concat(meta.chunk(3)).keys
    joined = tq.BatchMeta.concat(pickle.loads(pickle.dumps(rows.chunk(2))))
    assert rows.global_indexes == joined.global_indexes
    assert joined.is_ready
    assert [*range(5)] == tq.get_client().get_data(joined.select_fields(["x"]))["x"].tolist()


def test_rows_outlive_connections_and_servers(partition: str, server: ServerProcess) -> None:
    put(partition, ["a"], x=torch.tensor([7]))
    tq.kv_put("a", partition, tag={"status": "finished"})
    tq.close()
    server.restart()
    assert [7] == tq.kv_batch_get("a", partition)["x"].tolist()
    assert {"status": "finished"} == tq.kv_list(partition)[partition]["a"]


@pytest.mark.parametrize(
    ("resume", "expected"),
    [("", {"a": 1, "b": 1}), ("union", {"a": 2, "b": 1, "c": 2})],
)
def test_a_checkpoint_is_exact_or_keeps_what_came_since(
    partition: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    resume: str,
    expected: dict[str, int],
) -> None:
    monkeypatch.setenv("BREADBOX_TQ_RESUME", resume)
    client = tq.get_client()
    big = torch.arange(100_000, dtype=torch.float32).bfloat16()
    for key in "ab":
        tq.kv_put(key, partition, {"big": big, "m": [{"a": 1}]}, {"version": 1, "only": 1})
    client.get_meta(["big"], 1, partition, task_name="read")
    tq.save_checkpoint(tmp_path / "c")
    tq.save_checkpoint(tmp_path / "c", metadata={"step": 1})
    assert 2 == len([*(tmp_path / "c").iterdir()])
    tq.kv_clear("b", partition)
    for key in "ac":
        tq.kv_put(key, partition, {"late": torch.tensor(1)}, {"version": 2})
    tq.load_checkpoint(tmp_path / "c")
    found = tq.kv_list(partition)[partition]
    assert expected == {key: tag["version"] for key, tag in found.items()}
    assert [True] == [torch.equal(big, each) for each in tq.kv_batch_get("b", partition)["big"]]
    assert [[{"a": 1}]] == [*tq.kv_batch_get("b", partition)["m"]]
    if not resume:
        assert ["big", "m"] == sorted(tq.kv_batch_get("a", partition).keys())
        assert 1 == client.get_meta(["big"], 1, partition, task_name="read").size
        assert client.check_consumption_status("read", partition)
    with pytest.raises(FileNotFoundError):
        tq.load_checkpoint(tmp_path / "none")


def test_a_checkpoint_that_is_not_whole_is_refused_and_leaves_the_rows(
    partition: str, tmp_path: Path
) -> None:
    put(partition, ["a"], x=torch.arange(1000).reshape(1, -1))
    tq.save_checkpoint(tmp_path)
    (rows,) = tmp_path.glob("rows-*.bin")
    whole = rows.read_bytes()
    rows.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=f"has {len(whole) - 1} bytes, not {len(whole)}"):
        tq.load_checkpoint(tmp_path)
    assert [*range(1000)] == tq.kv_batch_get("a", partition)["x"][0].tolist()
    rows.write_bytes(whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:])
    with pytest.raises(breadbox.errors.PayloadCorruptError):
        tq.load_checkpoint(tmp_path)
    assert [*range(1000)] == tq.kv_batch_get("a", partition)["x"][0].tolist()


def test_a_buffer_of_another_kind_is_refused_and_keeps_its_session(
    monkeypatch: pytest.MonkeyPatch, server: ServerProcess
) -> None:
    tq.close()
    with breadbox.connect(server.address, buffer="steps") as client:
        client.create_buffer("steps", breadbox.BufferConfig())
        client.start_session("run")
        monkeypatch.setenv("BREADBOX_BUFFER", "steps")
        with pytest.raises(ValueError, match="'steps' keeps no rows"):
            tq.init()
        assert "run" == client.get_buffer().session_id


def test_rows_of_another_session_stay_and_are_used(
    monkeypatch: pytest.MonkeyPatch, server: ServerProcess
) -> None:
    tq.close()
    limits = breadbox.BufferConfig(assembly=breadbox.AssemblyPolicy.GROUPS, fragments_per_chunk=0)
    with breadbox.connect(server.address, buffer="theirs") as client:
        client.create_buffer("theirs", limits)
        client.start_session("run")
        client.attach(breadbox.Part("p:a", numbers={"n": 1}))
        monkeypatch.setenv("BREADBOX_BUFFER", "theirs")
        tq.init()
        tq.kv_put("b", "p", tag={"n": 2})
        assert {"p": {"a": {"n": 1}, "b": {"n": 2}}} == tq.kv_list("p")
        assert "run" == client.get_buffer().session_id
    tq.close()


async def test_awaited_functions_leave_the_callers_loop_running(
    partition: str, server: ServerProcess
) -> None:
    """While the server is away a put waits; the loop's other tasks go on."""
    await tq.async_kv_put("a", partition, {"x": torch.tensor(1)})
    server.kill()
    waiting = asyncio.ensure_future(tq.async_kv_put("b", partition, {"x": torch.tensor(2)}))  # noqa: TID251
    longest, before = 0.0, time.monotonic()
    for _ in range(50):
        await asyncio.sleep(0.01)
        longest, before = max(longest, time.monotonic() - before), time.monotonic()
    assert not waiting.done()
    await asyncio.to_thread(server.start)
    await waiting
    assert longest < 0.4
    found = await tq.async_kv_batch_get(["a", "b"], partition)
    assert [1, 2] == found["x"].tolist()


def test_the_module_is_on_the_path_that_the_command_prints_and_nowhere_else() -> None:
    assert importlib.util.find_spec("transfer_queue") is None
    folder = subprocess.run(
        [sys.executable, "-m", "breadbox.cli.main", "transfer-queue-path"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    program = "import transfer_queue as t; print(t.KVBatchMeta.__module__, len(t.__all__))"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {folder!r}); {program}"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert f"{tq.KVBatchMeta.__module__} {len(tq.__all__)}" == done.stdout.strip()
    assert (Path(folder) / "transfer_queue" / "config.yaml").is_file()
