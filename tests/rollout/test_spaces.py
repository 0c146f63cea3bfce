"""Spaces of every kind and dtype: what is recorded is what the environment executed."""

import json
import os
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from breadbox.model.errors import InvalidRequestError
from breadbox.model.trees import leaves, map_tree
from breadbox.writing.clipping import clipped
from breadbox_policies import ActResult, make_policy
from breadbox_rollout.acting.inference import Inference, play_round
from breadbox_rollout.environments.arrays import create_arrays, open_arrays
from breadbox_rollout.environments.environments import EnvSpec
from breadbox_rollout.environments.failures import RoundNotes
from breadbox_rollout.environments.space_codec import Space, decode_space, encode_space
from breadbox_rollout.environments.units import SingleUnit
from support.echo_env import SPACES, EchoEnv
from support.rollout_service import FakeService
from support.rollout_worker import running_worker

INTEGERS = [np.dtype(f"{kind}{size}") for kind in "iu" for size in (1, 2, 4, 8)]
FLOATS = [np.dtype(name) for name in ("float16", "float32", "float64", ">f4")]
SHAPES = st.sampled_from([(), (1,), (3,), (2, 3), (2, 1, 2)])


@st.composite
def boxes(draw: st.DrawFn) -> Space:
    shape, dtype = draw(SHAPES), draw(st.sampled_from([np.dtype(np.bool_), *INTEGERS, *FLOATS]))
    if dtype.kind == "b":
        return spaces.Box(0, 1, shape, np.bool_)
    limits = (-2.0, 2.0) if dtype.kind == "f" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    number = st.floats(*limits, width=16) if dtype.kind == "f" else st.integers(*limits)
    size = int(np.prod(shape))
    ends = [draw(st.tuples(*[number] * size)) for _ in range(2)]
    low, high = (
        np.array([choose(*pair) for pair in zip(*ends, strict=True)], dtype).reshape(shape)
        for choose in (min, max)
    )
    return spaces.Box(low, high, shape, dtype)


@st.composite
def discretes(draw: st.DrawFn) -> Space:
    dtype = draw(st.sampled_from(INTEGERS))
    count = draw(st.integers(1, 100))
    low, high = max(np.iinfo(dtype).min, -(2**40)), min(np.iinfo(dtype).max, 2**40)
    return spaces.Discrete(count, start=draw(st.integers(low, high - count)), dtype=dtype.type)


@st.composite
def multi_discretes(draw: st.DrawFn) -> Space:
    dtype, shape = draw(st.sampled_from(INTEGERS)), draw(SHAPES.filter(len))
    size = int(np.prod(shape))
    counts = draw(st.tuples(*[st.integers(1, 60)] * size))
    low = max(np.iinfo(dtype).min, -1000)
    starts = draw(st.tuples(*[st.integers(low, 60)] * size))
    return spaces.MultiDiscrete(
        np.array(counts, dtype).reshape(shape),
        dtype=dtype.type,
        start=np.array(starts, dtype).reshape(shape),
    )


LEAVES = (
    boxes()
    | discretes()
    | multi_discretes()
    | st.integers(1, 4).map(spaces.MultiBinary)
    | SHAPES.filter(len).map(spaces.MultiBinary)
)
ALL = st.recursive(
    LEAVES,
    lambda parts: (
        st.tuples(parts).map(spaces.Tuple)
        | st.tuples(parts, parts).map(spaces.Tuple)
        | st.tuples(parts, parts).map(lambda pair: spaces.Dict(list(zip("ba", pair, strict=True))))
    ),
    max_leaves=4,
)


def told(space: Space) -> Space:
    return decode_space(json.loads(json.dumps(encode_space(space))))


class Sampled(torch.nn.Module):
    """Acts with samples of a space, in the types that torch computes with."""

    def __init__(self, space: Space) -> None:
        super().__init__()
        self._space = space

    def initial_state(self, batch_size: int) -> None:
        return None

    def act(self, obs: Any, state: Any, first: Any, **_: Any) -> ActResult:
        def as_computed(leaf: Any) -> torch.Tensor:
            array = np.array(leaf)[None]
            dtype = np.float32 if array.dtype.kind == "f" else np.int64
            if array.dtype == np.uint64:  # Beyond what policies choose from.
                return torch.from_numpy(array)
            return torch.from_numpy(array.astype(dtype))

        return ActResult(
            map_tree(as_computed, self._space.sample()), torch.zeros(1), torch.zeros(1), None
        )


@given(ALL)
def test_an_environment_executes_the_action_that_is_recorded(space: Space) -> None:
    space.seed(0)
    env = EchoEnv(space)
    theirs, descriptor = create_arrays(told(space), told(space), 1)
    ours = open_arrays(descriptor, told(space), told(space), 1)
    os.close(descriptor)
    unit = SingleUnit(env, 0, theirs, None, None)
    unit.begin(1, RoundNotes())
    inference = Inference(Sampled(space), torch.device("cpu"))  # type: ignore[arg-type]
    for step in range(3):
        played = play_round([ours], inference, [None], 0)
        unit.answer(RoundNotes())
        recorded = map_tree(lambda leaf: leaf[0], played.decision.action)
        executed = env.executed[step]
        in_bounds = dict(leaves(clipped(space, recorded)))
        for path, leaf in leaves(executed):
            assert leaf.tolist() == np.asarray(in_bounds[path]).astype(leaf.dtype).tolist(), path
        assert env.observation_space.contains(executed)
        if step:
            before = dict(leaves(env.executed[step - 1]))
            for path, leaf in leaves(played.obs):
                assert before[path].tolist() == leaf[0].tolist(), path


@given(ALL)
def test_a_space_survives_the_way_to_another_process_with_dtype_start_and_bounds(
    space: Space,
) -> None:
    def facts(of: Space) -> Any:
        if isinstance(of, spaces.Dict):
            return [(key, facts(part)) for key, part in of.items()]
        if isinstance(of, spaces.Tuple):
            return [facts(part) for part in of.spaces]
        names = ("low", "high", "n", "nvec", "start")
        held = {name: np.asarray(getattr(of, name)).tolist() for name in names if hasattr(of, name)}
        return type(of), of.shape, np.dtype(of.dtype).newbyteorder("="), held

    assert facts(space) == facts(told(space))


def test_bounds_of_a_large_box_are_kept() -> None:
    low = np.linspace(-1, 0, 100_000, dtype=np.float32)
    space = spaces.Box(low, low + 1, low.shape, np.float32)
    assert low.tolist() == told(space).low.tolist()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(5),
        spaces.Sequence(spaces.Discrete(2)),
        spaces.Graph(spaces.Discrete(2), None),
        spaces.OneOf([spaces.Discrete(2), spaces.MultiBinary(2)]),
    ],
    ids=lambda space: type(space).__name__,
)
def test_a_space_without_an_array_of_one_shape_is_refused_by_path(space: Space) -> None:
    with pytest.raises(InvalidRequestError, match="at a is not supported"):
        encode_space(spaces.Dict({"a": space}))


def test_memory_of_another_size_is_refused() -> None:
    narrow, wide = spaces.Discrete(400, dtype=np.int32), spaces.Discrete(400)
    _, descriptor = create_arrays(narrow, narrow, 32)
    with pytest.raises(InvalidRequestError, match="shared memory has"):
        open_arrays(descriptor, wide, wide, 32)
    os.close(descriptor)


@pytest.mark.parametrize("value", [-1, 300])
def test_an_observation_that_its_dtype_cannot_hold_is_a_mismatch(value: int) -> None:
    env = EchoEnv(spaces.Discrete(200, dtype=np.uint8))
    arrays, descriptor = create_arrays(env.observation_space, env.action_space, 1)
    os.close(descriptor)
    unit = SingleUnit(env, 0, arrays, None, None)
    env.reset = lambda **_: (value, {})  # type: ignore[method-assign]
    with pytest.raises(Exception, match="observation_mismatch"):
        unit.begin(0, RoundNotes())
    env.reset = lambda **_: (7, {})  # type: ignore[method-assign]
    unit.begin(0, RoundNotes())
    assert 7 == arrays.obs[0]


@pytest.mark.parametrize("factory", ["make", "make_vector"])
@pytest.mark.parametrize("name", sorted(SPACES))
def test_workers_record_what_environments_in_other_processes_execute(
    name: str, factory: str
) -> None:
    service = FakeService()
    service.publish("s", 0)
    spec = EnvSpec(name=f"support.echo_env:{factory}", options={"space": name})
    with running_worker(
        service, "", spec=spec, policy="random", env_count=6, envs_per_process=6
    ) as rollout:
        rollout.wait_for_fragments(12)
    dtypes = [np.dtype(leaf.dtype) for _, leaf in leaves(map_tree(np.array, SPACES[name].sample()))]
    for fragment in service.fragments:
        assert [1.0] * 4 == fragment.reward.tolist()
        recorded = [leaf for _, leaf in leaves(clipped(SPACES[name], fragment.action))]
        seen = [leaf for _, leaf in leaves(fragment.obs)]
        assert dtypes == [leaf.dtype for leaf in seen] == [leaf.dtype for leaf in recorded]
        within = ~fragment.first[1:]
        for leaf, before in zip(seen, recorded, strict=True):
            assert before[:-1][within].tolist() == leaf[1:][within].tolist()


@pytest.mark.parametrize("policy", ["mlp", "random"])
@pytest.mark.parametrize("name", sorted(SPACES))
def test_policies_act_within_the_space_and_judge_what_they_chose(name: str, policy: str) -> None:
    torch.manual_seed(0)
    space = SPACES[name]
    made = make_policy(policy, spaces.Box(-1, 1, (3,)), space)
    obs, first = torch.zeros(200, 3), torch.ones(200, dtype=torch.bool)
    for greedy in (False, True):
        acted = made.act(obs, None, first, greedy=greedy)
        judged = made.evaluate(
            obs[:, None], map_tree(lambda leaf: leaf[:, None], acted.action), None, first[:, None]
        )
        torch.testing.assert_close(acted.log_prob, judged.log_prob[:, 0])
        for row in range(200):
            action = map_tree(lambda leaf, row=row: leaf[row].detach().numpy(), acted.action)
            assert space.contains(_cast(space, clipped(space, action))), (greedy, action)


def _cast(space: "gymnasium.Space[Any]", action: Any) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _cast(part, action[key]) for key, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_cast(*pair) for pair in zip(space.spaces, action, strict=True))
    return np.asarray(action).astype(space.dtype)[()]
