"""GAE against golden vectors, recorded cases, and a loop that is too simple to be wrong."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from breadbox.writing.advantages import (
    NO_SUCCESSOR,
    Advantages,
    VTrace,
    estimate_advantages,
    estimate_advantages_torch,
    find_successors,
)

HALF: dict[str, Any] = {"discount": 0.5, "gae_lambda": 0.5}

A0 = ("a", 0, [1, 2], [0, 1], [0, 0])
A1 = ("a", 1, [3, 4], [1, 0], [0, 0], 10, [0.25, 1], [3.25, 5])

# Each case: fragments of (worker, index, values, rewards, ended, next value, advantages, targets).
GOLDEN: dict[str, list[Any]] = {
    "one_fragment_without_end": [
        ("a", 0, [1, 2, 3], [0, 1, 0], [0, 0, 0], 4, [0.0625, 0.25, -1], [1.0625, 2.25, 2])
    ],
    "an_end_stops_the_recursion": [
        ("a", 0, [1, 2, 3], [0, 1, 0], [0, 1, 0], 4, [-0.25, -1, -1], [0.75, 1, 2])
    ],
    "consecutive_fragments_chain": [
        (*A0, None, [0.140625, 0.5625], [1.140625, 2.5625]),
        A1,
    ],
    "a_gap_does_not_chain": [
        (*A0, 6, [0.5, 2], [1.5, 4]),
        ("a", 2, *A1[2:]),
    ],
    "an_end_at_the_seam_stops_the_recursion": [
        ("a", 0, [1, 2], [0, 1], [0, 1], None, [-0.25, -1], [0.75, 1]),
        A1,
    ],
    "another_worker_in_between_changes_nothing": [
        (*A0, None, [0.140625, 0.5625], [1.140625, 2.5625]),
        ("b", 1, [0, 0], [1, 1], [0, 0], 0, [1.25, 1], [1.25, 1]),
        A1,
    ],
}


def oracle_cases() -> list[dict[str, Any]]:
    default = Path(__file__).parents[3] / "shared" / "oracles"
    path = Path(os.environ.get("BREADBOX_ORACLES", default)) / "gae.json"
    return json.loads(path.read_text()) if path.exists() else []


def test_golden_vectors_name_by_name() -> None:
    """All six, in the order given and reversed: the order of a batch carries no meaning."""
    for name, fragments in GOLDEN.items():
        for batch in (fragments, fragments[::-1]):
            worker, index, value, reward, ended, next_value, advantage, target = zip(
                *batch, strict=True
            )
            got = estimate_advantages(
                value=value,
                reward=reward,
                terminated=ended,
                next_value=[np.nan if v is None else v for v in next_value],
                successor=find_successors(worker, index),
                **HALF,
            )
            assert (name, np.array(advantage).tolist()) == (name, got.advantage.tolist())
            assert (name, np.array(target).tolist()) == (name, got.target.tolist())
            assert np.float32 == got.advantage.dtype == got.target.dtype


def test_recorded_cases_of_the_ancestor() -> None:
    cases = oracle_cases()
    if not cases:
        pytest.skip("no gae.json: set BREADBOX_ORACLES to the folder that holds it")
    for case in cases:
        fragments = case["fragments"]
        got = estimate_advantages(
            value=[f["values"] for f in fragments],
            reward=[f["rewards"] for f in fragments],
            terminated=[f["terminated"] for f in fragments],
            next_value=[np.nan if f["next_value"] is None else f["next_value"] for f in fragments],
            successor=find_successors(
                [f["worker"] for f in fragments], [f["index"] for f in fragments]
            ),
            discount=case["discount"],
            gae_lambda=case["gae_lambda"],
        )
        np.testing.assert_allclose(
            got.advantage,
            [f["advantages"] for f in fragments],
            atol=1e-5,
            err_msg=str(case["seed"]),
        )
        np.testing.assert_allclose(
            got.target, [f["targets"] for f in fragments], atol=1e-5, err_msg=str(case["seed"])
        )


def test_a_time_limit_bootstraps_from_the_final_observation_and_a_terminal_state_does_not() -> None:
    def first_step(**ends: Any) -> float:
        return float(
            estimate_advantages(
                value=[[1.0, 7.0]], reward=[[2.0, 0.0]], next_value=[0.0], **ends, **HALF
            ).advantage[0, 0]
        )

    nowhere, here = [[False, False]], [[True, False]]
    final = [[8.0, np.nan]]
    # A terminal state is worth nothing: 2 - 1.
    assert first_step(terminated=here, truncated=nowhere, final_value=final) == 1.0
    # A time limit goes on as if the episode had: 2 + 0.5 * 8 - 1.
    assert first_step(terminated=nowhere, truncated=here, final_value=final) == 5.0
    # Both at once: terminal.
    assert first_step(terminated=here, truncated=here, final_value=final) == 1.0
    # The final observation is unknown, so the step's own value stands in: 2 + 0.5 * 1 - 1.
    assert first_step(terminated=nowhere, truncated=here) == 1.5


def test_a_truncated_last_step_never_reads_the_next_episodes_value() -> None:
    got = estimate_advantages(
        value=[[1.0]],
        reward=[[0.0]],
        terminated=[[False]],
        truncated=[[True]],
        final_value=[[4.0]],
        next_value=[np.nan],
        **HALF,
    )
    assert got.advantage.tolist() == [[1.0]]


def test_a_discontinuity_bootstraps_instead_of_chaining() -> None:
    assert find_successors(["a", "a"], [4, 5]).tolist() == [1, NO_SUCCESSOR]
    assert find_successors(["a", "a"], [4, 5], discontinuities=[False, True]).tolist() == [
        NO_SUCCESSOR,
        NO_SUCCESSOR,
    ]


def test_fragments_of_two_sessions_never_chain() -> None:
    successors = find_successors(["a", "a"], [0, 1], session_ids=["s", "t"])
    assert successors.tolist() == [NO_SUCCESSOR, NO_SUCCESSOR]


def test_last_fragments_are_those_whose_next_index_is_absent() -> None:
    workers, indices = ["a", "a", "a", "b", "b"], [1, 2, 4, 2, 3]
    successors = find_successors(workers, indices)
    last = [(workers[i], indices[i]) for i in range(5) if successors[i] == NO_SUCCESSOR]
    assert last == [("a", 2), ("a", 4), ("b", 3)]


def test_a_missing_bootstrap_value_is_refused_by_position() -> None:
    with pytest.raises(ValueError, match=r"next_value\[1\] is not a number"):
        estimate_advantages(
            value=[[0.0], [0.0]],
            reward=[[0.0], [0.0]],
            terminated=[[True], [False]],
            next_value=[np.nan, np.nan],
            **HALF,
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward": [[0.0]]}, "reward must have the shape"),
        ({"value": [0.0, 0.0]}, "value must have shape"),
        ({"next_value": [0.0, 0.0]}, "next_value and successor"),
        ({"discount": 1.5}, "discount must be between"),
        ({"gae_lambda": float("nan")}, "gae_lambda must be between"),
        ({"successor": [0]}, "circle"),
        ({"successor": [3]}, "outside"),
        ({"step_count": [3]}, "step_count"),
        ({"step_count": [0]}, "step_count"),
    ],
)
def test_wrong_input_is_refused(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "value": [[0.0, 0.0]],
        "reward": [[0.0, 0.0]],
        "terminated": [[False, False]],
        "next_value": [0.0],
        **HALF,
    }
    with pytest.raises(ValueError, match=message):
        estimate_advantages(**(arguments | change))


def naive(case: dict[str, Any], discount: float, gae_lambda: float) -> np.ndarray:
    """Follow every step's own future, one step at a time, in Python floats."""
    batch_size, length = case["value"].shape
    advantage = np.zeros((batch_size, length))
    for b in range(batch_size):
        for t in range(case["step_count"][b]):
            total, weight, row, step = 0.0, 1.0, b, t
            while True:
                value = case["value"][row, step]
                end = case["terminated"][row, step] or case["truncated"][row, step]
                is_last = step + 1 == case["step_count"][row]
                follower = case["successor"][row]
                if case["terminated"][row, step]:
                    after = 0.0
                elif case["truncated"][row, step]:
                    final = case["final_value"][row, step]
                    after = value if np.isnan(final) else final
                elif not is_last:
                    after = case["value"][row, step + 1]
                elif follower >= 0:
                    after = case["value"][follower, 0]
                else:
                    after = case["next_value"][row]
                total += weight * (case["reward"][row, step] + discount * after - value)
                weight *= discount * gae_lambda
                if end or (is_last and follower < 0):
                    break
                row, step = (follower, 0) if is_last else (row, step + 1)
            advantage[b, t] = total
    return advantage


@pytest.mark.parametrize("seed", range(20))
def test_random_batches_agree_with_a_walk_along_each_steps_future(seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch_size, length = int(rng.integers(1, 12)), int(rng.integers(1, 9))
    shape = (batch_size, length)
    workers = rng.integers(0, 3, batch_size).tolist()
    indices = rng.permutation(batch_size).tolist()
    case: dict[str, Any] = {
        "value": rng.normal(size=shape),
        "reward": rng.normal(size=shape),
        "terminated": rng.random(shape) < 0.2,
        "truncated": rng.random(shape) < 0.2,
        "final_value": np.where(rng.random(shape) < 0.5, rng.normal(size=shape), np.nan),
        "next_value": rng.normal(size=batch_size),
        "successor": find_successors(
            workers, indices, discontinuities=(rng.random(batch_size) < 0.2).tolist()
        ),
        "step_count": rng.integers(1, length + 1, batch_size),
    }
    got = estimate_advantages(**case, discount=0.97, gae_lambda=0.9)
    np.testing.assert_allclose(
        got.advantage, naive(case, 0.97, 0.9), atol=1e-6, err_msg=f"seed {seed}"
    )
    padding = np.arange(length)[None, :] >= case["step_count"][:, None]
    assert not got.target[padding].any()


def test_sums_are_kept_in_float64() -> None:
    """In float32 a reward of 1 is lost beside 2**25; in float64 it is not."""
    big = float(2**25)
    got = estimate_advantages(
        value=[[0.0, 0.0, 0.0]],
        reward=[[1.0, big, -big]],
        terminated=[[False, False, True]],
        next_value=[np.nan],
        discount=1.0,
        gae_lambda=1.0,
    )
    assert got.advantage[0, 0] == 1.0


def test_an_empty_batch_has_no_advantages() -> None:
    empty = np.zeros((0, 4))
    got = estimate_advantages(
        value=empty, reward=empty, terminated=empty, next_value=np.zeros(0), **HALF
    )
    assert got.advantage.shape == (0, 4)


def test_the_torch_face_gives_the_same_on_the_device_of_its_input() -> None:
    value = torch.tensor([[1.0, 2.0, 3.0]], requires_grad=True)
    advantage, target = estimate_advantages_torch(
        value=value,
        reward=torch.tensor([[0.0, 1.0, 0.0]]),
        terminated=torch.tensor([[False, False, False]]),
        next_value=torch.tensor([4.0]),
        **HALF,
    )
    assert advantage.tolist() == [[0.0625, 0.25, -1.0]]
    assert target.tolist() == [[1.0625, 2.25, 2.0]]
    assert (advantage.dtype, advantage.device, advantage.requires_grad) == (
        torch.float32,
        value.device,
        False,
    )


# V-trace -----------------------------------------------------------------------------------------


class Recorded:
    """Random fragments of two workers, in random order; one of them is missing."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        names = [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 2), ("b", 3)]
        self.names = [names[i] for i in rng.permutation(len(names))]
        shape = (len(names), 5)
        self.value, self.reward = rng.normal(size=(2, *shape))
        self.ratio = np.exp(rng.normal(size=shape))
        self.terminated = rng.random(shape) < 0.15
        self.truncated = (rng.random(shape) < 0.15) & ~self.terminated
        final = rng.normal(size=shape)
        self.final = np.where(rng.random(shape) < 0.5, final, np.nan)
        self.next_value = rng.normal(size=len(names))

    def estimated(
        self, correction: VTrace | None, discount: float = 0.9, gae_lambda: float = 0.8
    ) -> Advantages:
        workers, indices = zip(*self.names, strict=True)
        return estimate_advantages(
            value=self.value,
            reward=self.reward,
            terminated=self.terminated,
            truncated=self.truncated,
            next_value=self.next_value,
            final_value=self.final,
            successor=find_successors(workers, indices),
            discount=discount,
            gae_lambda=gae_lambda,
            correction=correction,
        )

    def steps_from(self, row: int, step: int) -> list[tuple[int, int]]:
        """The steps from one on, to the end of its episode or of what was recorded."""
        worker, index = self.names[row]
        found = []
        while True:
            found.append((row, step))
            if self.terminated[row, step] or self.truncated[row, step]:
                return found
            step += 1
            if step == self.value.shape[1]:
                index, step = index + 1, 0
                if (worker, index) not in self.names:
                    return found
                row = self.names.index((worker, index))

    def value_behind(self, row: int, step: int) -> float:
        if self.terminated[row, step]:
            return 0.0
        if self.truncated[row, step]:
            known = not np.isnan(self.final[row, step])
            return float(self.final[row, step] if known else self.value[row, step])
        behind = self.steps_from(row, step)[1:]
        return float(self.value[behind[0]] if behind else self.next_value[row])

    def naive_target(self, place: tuple[int, int], limits: VTrace, gamma: float, lam: float) -> Any:
        """The sum of the paper's definition, term by term."""
        total, factor = self.value[place], 1.0
        for row, step in self.steps_from(*place):
            ratio = self.ratio[row, step]
            surprise = (
                self.reward[row, step]
                + gamma * self.value_behind(row, step)
                - self.value[row, step]
            )
            total += factor * min(limits.rho_max, ratio) * surprise
            factor *= gamma * lam * min(limits.c_max, ratio)
        return total


@pytest.mark.parametrize("seed", range(20))
def test_v_trace_is_the_sum_that_defines_it(seed: int) -> None:
    held = Recorded(seed)
    rng = np.random.default_rng(1000 + seed)
    gamma, lam = rng.uniform(0.5, 1.0, size=2)
    correction = VTrace(held.ratio, rho_max=rng.uniform(0.5, 3), c_max=rng.uniform(0.3, 2))
    got = held.estimated(correction, gamma, lam)
    for place in np.ndindex(held.value.shape):
        wanted = held.naive_target(place, correction, gamma, lam)
        assert got.target[place] == pytest.approx(wanted, rel=1e-5, abs=1e-5), (seed, place)
        behind = held.steps_from(*place)[1:]
        following = (
            held.naive_target(behind[0], correction, gamma, lam)
            if behind
            else held.value_behind(*place)
        )
        behind_value = held.value_behind(*place)
        surprise = held.reward[place] + gamma * behind_value - held.value[place]
        wanted = surprise + gamma * lam * (following - behind_value)
        assert got.advantage[place] == pytest.approx(wanted, rel=1e-5, abs=1e-5), (seed, place)


def test_v_trace_of_fresh_data_is_generalised_advantage_estimation() -> None:
    held = Recorded(1)
    fresh = VTrace(np.ones_like(held.value), rho_max=9.0, c_max=9.0)
    for gae_lambda in (0.0, 0.8, 1.0):
        plain = held.estimated(None, gae_lambda=gae_lambda)
        corrected = held.estimated(fresh, gae_lambda=gae_lambda)
        np.testing.assert_allclose(plain.target, corrected.target, atol=1e-6)
        np.testing.assert_allclose(plain.advantage, corrected.advantage, atol=1e-6)


def test_v_trace_with_lambda_one_of_fresh_data_has_n_step_returns_for_targets() -> None:
    held = Recorded(2)
    got = held.estimated(VTrace(np.ones_like(held.value)), 0.9, 1.0)
    for place in np.ndindex(held.value.shape):
        steps = held.steps_from(*place)
        rewards = sum(0.9**n * held.reward[each] for n, each in enumerate(steps))
        wanted = rewards + 0.9 ** len(steps) * held.value_behind(*steps[-1])
        assert got.target[place] == pytest.approx(wanted, rel=1e-5, abs=1e-5)


def test_v_trace_learns_nothing_from_actions_that_the_policy_would_never_take() -> None:
    held = Recorded(3)
    never = held.estimated(VTrace(np.zeros_like(held.value)))
    np.testing.assert_allclose(held.value, never.target, atol=1e-6)


@pytest.mark.parametrize(
    "wrong",
    [
        VTrace(np.ones((2, 2))),
        VTrace(np.full((6, 5), np.nan)),
        VTrace(-np.ones((6, 5))),
        VTrace(np.ones((6, 5)), rho_max=0.0),
        VTrace(np.ones((6, 5)), c_max=-1.0),
    ],
)
def test_a_correction_that_does_not_fit_is_refused(wrong: VTrace) -> None:
    with pytest.raises(ValueError, match="must"):
        Recorded(0).estimated(wrong)
