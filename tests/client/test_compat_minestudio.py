"""MineStudio's types and data functions."""

import dataclasses
import enum
import json
import threading
from typing import Any

import numpy as np
import pytest
import torch

import breadbox
from breadbox.model import errors
from breadbox.payload import read_fragments
from breadbox_adapters.minestudio import (
    FragmentDataDict,
    FragmentIndex,
    GAEWorker,
    SampleFragment,
    StepRecord,
    auto_cat,
    auto_getitem,
    auto_pad,
    auto_slice,
    auto_stack,
    auto_to_numpy,
    auto_to_torch,
    batchify_next_obs,
    create_loader_pool,
    data_iter,
    fragment_id_of,
    from_fragment,
    get_last_fragment_indexes,
    limits_of,
    prepare_batch,
    recursive_detach,
    reference_of,
    to_fragment,
)
from support.fake_store import FakeStore
from support.minestudio import CONFIG, STEP_COUNT, alike, metadata_of, sample_fragment
from support.rich_fragments import rich_fragment, stored

# Conversions ------------------------------------------------------------------------------------


def test_a_fragment_comes_back_as_it_was() -> None:
    sample = sample_fragment(3)
    assert alike(sample, from_fragment(to_fragment(sample, metadata_of(sample))))


def test_a_native_learner_sees_ended_steps_states_without_batch_axis_and_numbered_episodes() -> (
    None
):
    sample = sample_fragment(3)
    fragment = to_fragment(sample, metadata_of(sample, version=4))
    assert sample.next_done.tolist() == fragment.terminated.tolist()
    assert not fragment.truncated.any()
    assert [(1, 4), (4, 3), (4, 3)] == [leaf.shape for leaf in fragment.in_state]
    assert [0, 0, 2, 2, 2, 2] == [
        fragment.episode_id.tolist().index(number) for number in fragment.episode_id
    ]
    assert (4, 4) == (fragment.model_version_min, fragment.model_version_max)


def test_episodes_have_the_same_number_in_every_fragment() -> None:
    one, other = (
        to_fragment(sample_fragment(fid), metadata_of(sample_fragment(fid))) for fid in (0, 1)
    )
    assert one.episode_id.tolist() == other.episode_id.tolist()
    assert min(one.episode_id) >= 0


def test_a_policy_without_state_has_none() -> None:
    sample = sample_fragment()
    sample.in_state = None
    assert from_fragment(to_fragment(sample, metadata_of(sample))).in_state is None


def stored_and_back(sample: SampleFragment) -> SampleFragment:
    """What a fragment becomes on its way through a payload."""
    store = FakeStore()
    references = stored(store, to_fragment(sample, metadata_of(sample)))
    (fragment,) = read_fragments(store, references)
    return from_fragment(fragment)


class Level(enum.IntEnum):
    HIGH = 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("in_state", [np.ones((2, 1, 4), np.float32), np.zeros((2, 1, 4), np.float32)]),
        ("in_state", [np.ones((1, 4)), np.zeros((2, 4))]),
        ("in_state", {"h": (np.ones((1, 4)), None), "c": []}),
        ("in_state", [torch.ones(1, 4), torch.zeros(1, 4)]),
        ("in_state", 3.5),
        ("obs", {0: np.arange(6), 1: {2: np.ones((6, 2))}, "0": np.zeros(6)}),
        ("obs", {"task": ["shoot\0"] * 6, "image": np.ones((6, 2), np.uint8)}),
        ("obs", {"task": np.array(["a", "b", "c", "d", "e", "f"])}),
        ("obs", {"task": ["é", "", "b", "c", "d", "e"], "other": ["one", "two"]}),
        ("obs", {"info": np.array([{"a": 1}, None, "x", (1, 2), b"\0y\0", 2.5], object)}),
        ("obs", {"grid": np.array([["a", 1]] * 6, object), "scalar": 3, "shared": np.ones(2)}),
        ("obs", {"mixed": [1, "two", None, np.float32(3), 4j, {"five"}]}),
        ("obs", {"tensor": torch.ones(6, 2), "odd": torch.zeros(2), "empty": [], "none": None}),
        ("obs", torch.ones(6, 3)),
        ("obs", {("a", 1): np.arange(6), None: np.arange(6.0), True: np.arange(6)}),
        ("action", (np.arange(6), [np.ones((6, 1))])),
        ("next_obs", {"task": "shoot\0", "step": 7, "score": 0.5, "done": False, 4: "four"}),
        ("next_obs", {"large": 2**70, "tiny": np.uint8(3), "nan": float("inf"), "raw": b"\0\1\0"}),
        (
            "next_obs",
            {"when": np.datetime64("2025-01-01"), "z": np.array(4), "set": frozenset([1])},
        ),
        ("next_obs", {"names": ["a", "b\0"], "none": None, "o": np.array(["x", None], object)}),
        ("reward", np.arange(6.0)),
        ("reward", [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
        ("next_done", np.array([0, 1, 0, 0, 0, 1])),
        ("episode_uuids", ["one\0"] * 6),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_whatever_is_made_of_plain_things_comes_back_as_it_was(name: str, value: Any) -> None:
    sample = sample_fragment()
    setattr(sample, name, value)
    assert alike(sample, stored_and_back(sample))


@pytest.mark.parametrize(
    ("name", "value", "path"),
    [
        ("obs", {"x": [object()]}, "obs.x.0"),
        ("next_obs", {"level": Level.HIGH}, "next_obs.level"),
        ("obs", {"table": np.zeros(6, [("a", int)])}, "obs.table"),
    ],
)
def test_what_only_pickling_could_store_is_refused_by_its_path(
    name: str, value: Any, path: str
) -> None:
    sample = sample_fragment()
    setattr(sample, name, value)
    with pytest.raises(errors.UnsupportedArrayError, match=path):
        to_fragment(sample, metadata_of(sample))


def test_a_native_learner_sees_states_of_several_layers_as_they_are() -> None:
    sample = sample_fragment()
    sample.in_state = [np.ones((2, 1, 4), np.float32)]
    assert [(2, 1, 4)] == [leaf.shape for leaf in to_fragment(sample, metadata_of(sample)).in_state]


def test_a_fragment_that_was_written_natively_can_be_read() -> None:
    fragment = rich_fragment()
    sample = from_fragment(fragment)
    assert fragment.ended.tolist() == sample.next_done.tolist()
    assert [str(number) for number in fragment.episode_id] == sample.episode_uuids


def test_a_damaged_recipe_is_an_error_that_says_so() -> None:
    sample = sample_fragment()
    fragment = to_fragment(sample, metadata_of(sample))
    for text in (b"{[..x", b'{"obs":["eval"]}', b'{"obs":["dict",["one"]]}'):
        raw = len(text).to_bytes(8, "little") + text
        fragment.extras["minestudio"] = np.frombuffer(raw, np.uint8)[np.newaxis]
        with pytest.raises(errors.PayloadCorruptError, match="recipe"):
            from_fragment(fragment)


def test_a_fragment_knows_its_index_and_prints_itself(caplog: pytest.LogCaptureFixture) -> None:
    sample = sample_fragment(3)
    assert FragmentIndex("env-0", 3) == sample.index
    with caplog.at_level("INFO"):
        sample.print()
    assert 10 == len(caplog.records)
    assert "next_done" in caplog.text


@dataclasses.dataclass(frozen=True)
class Theirs:
    worker_uuid: str
    fid_in_worker: int


Theirs.__name__ = "FragmentIndex"


def test_an_index_is_the_same_key_as_minestudios_own() -> None:
    ours: Any = FragmentIndex("w", 1)
    theirs: Any = Theirs("w", 1)
    assert ours == theirs
    assert theirs == ours
    assert 7 == {ours: 7}[theirs] == {theirs: 7}[ours]
    assert FragmentIndex("w", 2) != theirs
    assert ours != ("w", 1)
    assert [theirs] == get_last_fragment_indexes([theirs, FragmentIndex("w", 0)])


def test_what_is_kept_by_fragment_is_stacked_for_a_batch() -> None:
    data = FragmentDataDict()
    samples = [sample_fragment(fid) for fid in range(3)]
    for sample in samples:
        data[sample.index] = {"logp": np.full(2, sample.fid_in_worker, np.float32)}
    batch = data.format_batch(samples[::-1], torch.device("cpu"))
    assert [[2, 2], [1, 1], [0, 0]] == batch["logp"].tolist()
    with pytest.raises(KeyError):
        data.format_batch([sample_fragment(9)], "cpu")


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "7", '{"metadata": {}}', "x" * 50, '{"metadata":1}']
)
def test_a_fragment_id_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(errors.InvalidRequestError, match="fragment_id"):
        reference_of(text)


def test_a_fragment_id_is_plain_text_that_names_what_to_load() -> None:
    payload = breadbox.model.types.PayloadReference("0" * 32, 100, 0)
    metadata = breadbox.model.types.FragmentMetadata(
        worker_id="w",
        fragment_index=1,
        session_id="s",
        model_version_min=1,
        model_version_max=1,
        payload=payload,
        step_count=4,
    )
    reference = breadbox.types.FragmentReference(metadata, 5, 0, 1)
    fragment_id = fragment_id_of(reference)
    assert "w" == json.loads(fragment_id)["metadata"]["worker_id"]
    assert reference == reference_of(fragment_id)


def test_limits_are_mapped_and_a_reuse_below_one_is_one() -> None:
    limits = limits_of({**CONFIG, "max_reuse": 0})
    assert (64, 2, 1, 2) == (
        limits.capacity_chunks,
        limits.staleness_max,
        limits.uses_max,
        limits.fragments_per_chunk,
    )


def test_bytes_follow_from_chunks_unless_they_are_given() -> None:
    assert 2**62 == limits_of(CONFIG).capacity_bytes
    assert 5 == limits_of({**CONFIG, "capacity_bytes": 5}).capacity_bytes


def test_steps_are_records() -> None:
    step = StepRecord("w", {}, None, {}, 0.0, True, False, -1, "e", "")
    assert ("w", True, -1) == (step.worker_uuid, step.last_terminated, step.model_version)


# Data functions ---------------------------------------------------------------------------------


def test_the_last_fragment_of_each_run_is_found() -> None:
    indexes = [FragmentIndex(w, i) for w, i in [("a", 1), ("a", 2), ("a", 4), ("b", 2), ("b", 3)]]
    wanted = [FragmentIndex("a", 4), FragmentIndex("b", 3), FragmentIndex("a", 2)]
    assert wanted == get_last_fragment_indexes(indexes)


@pytest.mark.parametrize(
    ("items", "stacked"),
    [
        ([np.zeros(2), np.ones(2)], np.array([[0.0, 0.0], [1.0, 1.0]])),
        (["a", "b"], ["a", "b"]),
        ([{"x": 1, "y": 2}, {"y": 4, "x": 3}], {"x": np.array([1, 3]), "y": np.array([2, 4])}),
        ([[1, 2.0], [3, 4.0]], [np.array([1, 3]), np.array([2.0, 4.0])]),
        ([True, False], np.array([True, False])),
        ([None, None], [None, None]),
        ([(1, 2), (3, 4)], [(1, 2), (3, 4)]),
        ([np.True_, np.False_], [np.True_, np.False_]),
        ([[1, 2], [3, 4, 5]], [np.array([1, 3]), np.array([2, 4])]),
        ([np.float32(1), np.float32(2)], np.array([1, 2], np.float32)),
    ],
)
def test_values_are_stacked_by_the_kind_of_the_first(items: list[Any], stacked: Any) -> None:
    assert alike(stacked, auto_stack(items))


def test_a_key_that_another_lacks_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        auto_stack([{"x": 1}, {}])


def test_a_list_that_is_shorter_than_the_first_is_an_index_error() -> None:
    with pytest.raises(IndexError):
        auto_stack([[1, 2], [3]])


def test_tensors_are_copies_and_keep_their_shape() -> None:
    array, scalar = np.zeros(3), np.array(4.0)
    made = auto_to_torch({"a": [array], "b": (scalar,), "c": "text"}, "cpu")
    made["a"][0][0] = 7
    assert (0.0, (), "text") == (array[0], tuple(made["b"][0].shape), made["c"])
    with pytest.raises(TypeError):
        auto_to_torch(np.array(["text"]), "cpu")


def test_trees_are_cut_joined_lengthened_and_detached() -> None:
    tensor = torch.arange(8.0, requires_grad=True).reshape(2, 4)
    texts = [["a", "b", "c", "d"]] * 2
    tree = {"x": tensor, "y": texts, "z": None}
    assert (2, 2) == tuple(auto_slice(tree, 1, 3, dim=1)["x"].shape)
    assert [["b", "c"]] * 2 == auto_slice(tree, 1, 3, dim=1)["y"]
    assert texts[1:2] == auto_slice(texts, 1, 2, dim=1, type_list=1)
    joined = auto_cat([{"x": tensor, "y": [["a"]], "z": None}] * 2, dim=1)
    assert ((2, 8), None) == (tuple(joined["x"].shape), joined["z"])
    assert ["a", "b"] == auto_cat([["a"], ["b"]])
    padded = auto_pad({"x": np.ones((2, 3)), "y": ["a", "b"]}, 2)
    assert ((4, 3), 6.0, ["a", "b", "a", "a"]) == (
        padded["x"].shape,
        padded["x"].sum(),
        padded["y"],
    )
    assert [3.0, 7.0] == auto_getitem({"x": tensor.T}, 3)["x"].tolist()
    detached = recursive_detach([tensor, (tensor, "text")])
    assert [False, False] == [detached[0].requires_grad, detached[1][0].requires_grad]
    assert isinstance(auto_to_numpy({"x": [tensor.detach()]})["x"][0], np.ndarray)
    for refused, error in (
        (lambda: auto_slice(1, 0, 1, 0), ValueError),
        (lambda: auto_cat([1]), ValueError),
        (lambda: auto_pad(1, 1), NotImplementedError),
        (lambda: auto_getitem([1], 0), NotImplementedError),
    ):
        with pytest.raises(error):
            refused()


class Model:
    """What `prepare_batch` needs of a model."""

    device = torch.device("cpu")

    @staticmethod
    def merge_state(states: list[Any]) -> list[torch.Tensor]:
        return [torch.cat(parts, dim=0) for parts in zip(*states, strict=True)]


def test_a_batch_is_prepared_for_the_model() -> None:
    samples = [sample_fragment(fid) for fid in range(3)]
    for sample in samples:
        del sample.obs["task"]
    batch = prepare_batch(Model(), samples)
    assert (3, STEP_COUNT, 8, 8, 3) == tuple(batch["obs"]["image"].shape)
    assert (3, STEP_COUNT, 1) == tuple(batch["action"]["buttons"].shape)
    assert torch.bool == batch["first"].dtype
    assert [(3, 1, 4), (3, 4, 3), (3, 4, 3)] == [tuple(leaf.shape) for leaf in batch["state"]]


def test_the_next_observation_gets_axes_of_batch_and_time() -> None:
    obs = batchify_next_obs(sample_fragment().next_obs, torch.device("cpu"))
    assert (1, 1, 8, 8, 3) == tuple(obs["image"].shape)
    assert [["shoot"]] == obs["task"]


# Advantages -------------------------------------------------------------------------------------


def infos(*rows: tuple[str, int, list[float], list[float], list[int], float | None]) -> Any:
    made = {}
    for worker, fid, values, rewards, dones, next_value in rows:
        info: dict[str, Any] = {
            "vpred": np.array(values, np.float32),
            "reward": np.array(rewards, np.float32),
            "next_done": np.array(dones, np.bool_),
        }
        if next_value is not None:
            info["next_vpred"] = next_value
        made[FragmentIndex(worker, fid)] = info
    return made


def test_advantages_run_on_over_fragments_that_follow_each_other() -> None:
    """Reckoned by MineStudio's own worker from these numbers."""
    worker = GAEWorker(discount=0.5, gae_lambda=0.5)
    worker.update_gae_infos(infos(("a", 0, [1, 2], [0, 1], [0, 0], None)))
    worker.update_gae_infos(
        infos(("a", 1, [3, 4], [1, 0], [0, 0], 10), ("b", 1, [0, 0], [1, 1], [0, 0], 0))
    )
    worker.calculate_target()
    targets, advantages = worker.get_target([FragmentIndex("a", 0), FragmentIndex("b", 1)])
    assert [0.140625, 0.5625] == advantages[FragmentIndex("a", 0)].tolist()
    assert [1.140625, 2.5625] == targets[FragmentIndex("a", 0)].tolist()
    assert [1.25, 1.0] == advantages[FragmentIndex("b", 1)].tolist()
    worker.reset()
    assert {} == worker.gae_infos


def test_a_gap_ends_a_run_and_the_end_of_an_episode_cuts_it() -> None:
    worker = GAEWorker(0.5, 0.5)
    worker.update_gae_infos(
        infos(("a", 0, [1, 2], [0, 1], [0, 0], 6), ("a", 2, [3, 4], [1, 0], [0, 1], 10))
    )
    worker.calculate_target()
    assert [0.5, 2.0] == worker.advantages[FragmentIndex("a", 0)].tolist()
    assert [-1.0, -4.0] == worker.advantages[FragmentIndex("a", 2)].tolist()


def test_what_is_not_a_number_is_told_with_its_fragment() -> None:
    worker = GAEWorker(0.5, 0.5)
    worker.update_gae_infos(infos(("a", 0, [1.0], [float("nan")], [0], 0)))
    with pytest.raises(FloatingPointError, match="fid_in_worker=0"):
        worker.calculate_target()


# Loading ----------------------------------------------------------------------------------------


class Numbers:
    """Stands for an interface: the fragment of an id is a number."""

    def load_fragment(self, fragment_id: str) -> int:
        return 10 * int(fragment_id)


def test_data_iter_yields_groups_of_every_record_once() -> None:
    """As the ancestor did: shuffled, as they arrive, the last group short, index and fragment."""
    pool = create_loader_pool(4, interface=Numbers())  # type: ignore[arg-type]
    records = [(FragmentIndex("w", number), str(number)) for number in range(10)]
    groups = list(data_iter(pool, records, 4, 2))
    assert [4, 4, 2] == [len(group["index"]) for group in groups]
    pairs = [
        pair for group in groups for pair in zip(group["index"], group["fragment"], strict=True)
    ]
    assert {index: 10 * index.fid_in_worker for index, _ in records} == dict(pairs)
    assert [] == [each for each in threading.enumerate() if each.name.startswith("loader")]


def test_groups_of_data_iter_have_a_record_at_least() -> None:
    pool = create_loader_pool(1, interface=Numbers())  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidRequestError, match="batch_size"):
        list(data_iter(pool, [], 0, 2))
