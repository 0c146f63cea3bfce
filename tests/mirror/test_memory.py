"""Steps in memory against a naive list of them."""

import itertools
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from breadbox.mirror import Prioritised, StepMemory
from breadbox.model.errors import InvalidRequestError, TreeMismatchError, WaitElapsedError
from breadbox.model.fragment import Fragment
from mirror.worlds import NaiveStep, NaiveWorker
from support import growth
from support.fragments import vector_fragment
from support.sequences import sequence

CHUNK = 1 << 24


class World:
    """A memory, and beside it the naive list of what it should hold."""

    def __init__(self, seed: int, capacity: int, *, depth: int = 0, worker_count: int = 3) -> None:
        self.rng = np.random.default_rng(seed)
        self.memory = StepMemory(capacity, seed=seed, frame_stack={"obs": 2} if depth > 1 else None)
        self.capacity = capacity
        self.workers = [
            NaiveWorker(f"w{i}", np.random.default_rng([seed, i]), depth, now=i * 1e4)
            for i in range(worker_count)
        ]
        self.steps: list[NaiveStep] = []
        self.gone: list[NaiveStep] = []
        self.chunk_id = 0

    def play(self, fragment_count: int) -> None:
        for _ in range(fragment_count):
            worker = self.workers[self.rng.integers(len(self.workers))]
            self.chunk_id += int(self.rng.integers(1, 3))
            drop = 2 if self.rng.random() < 0.15 else 0
            count = int(self.rng.integers(1, 9))
            fragment, steps = worker.fragment(count, self.chunk_id * CHUNK, drop=drop)
            self.memory.extend(fragment, self.chunk_id)
            self.steps += steps
        kept = self.memory.step_count
        self.gone += self.steps[: len(self.steps) - kept]
        self.steps = self.steps[len(self.steps) - kept :]

    def by_handle(self) -> dict[int, NaiveStep]:
        return {step.handle: step for step in self.steps}


def values(obs: Any) -> list[float]:
    """The newest number that observations show."""
    flat = obs.reshape(*obs.shape[:1], -1)
    return [float(each) for each in flat[:, -1]]


def windows(step: NaiveStep, n_step: int) -> list[NaiveStep]:
    window = [step]
    while len(window) < n_step:
        last = window[-1]
        if last.terminated or last.truncated or last.follower is None:
            break
        if not last.follower.is_usable:
            break
        window.append(last.follower)
    return window


@pytest.mark.parametrize("depth", [0, 1, 4])
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), n_step=st.sampled_from([1, 3, 7]))
def test_windows_are_those_of_a_naive_list(depth: int, n_step: int, seed: int) -> None:
    world = World(seed, capacity=40, depth=depth)
    gamma = 0.9
    for _ in range(6):
        world.play(4)
        known = world.by_handle()
        assert sum(step.is_usable for step in world.steps) == len(world.memory)
        if not len(world.memory):
            continue
        batch = world.memory.sample(32, n_step=n_step, gamma=gamma)
        for row, handle in enumerate(batch.handle.tolist()):
            step = known[handle]
            window = windows(step, n_step)
            last = window[-1]
            assert step.is_usable
            assert step.obs == values(batch.obs)[row]
            assert last.next_obs == values(batch.next_obs)[row]
            assert step.obs == batch.action[row]
            assert 2 * step.obs == batch.extras["twice"][row]
            assert step.episode_id == batch.episode_id[row]
            assert (last.terminated, last.truncated) == (
                batch.terminated[row],
                batch.truncated[row],
            )
            returns = sum(gamma**k * each.reward for k, each in enumerate(window))
            assert returns == pytest.approx(float(batch.reward[row]), rel=1e-5)
            assert gamma ** len(window) == pytest.approx(float(batch.discount[row]), rel=1e-5)


@pytest.mark.parametrize("depth", [1, 4])
def test_frames_are_whole_stacks_whatever_was_evicted(depth: int) -> None:
    world = World(7, capacity=60, depth=depth)
    for _ in range(80):
        world.play(3)
        batch = world.memory.at(np.arange(world.memory.step_count))
        for array, name in ((batch.obs, "obs"), (batch.next_obs, "next_obs")):
            newest = [getattr(step, name) for step in world.steps]
            assert newest == values(array)
            assert (len(newest), 3, 5, depth) == array.shape
            # Of one frame all elements are alike; and frames never go back.
            assert (array == array[:, :1, :1]).all()
            assert (np.diff(array[:, 0, 0], axis=-1) >= 0).all()


def test_a_stack_of_frames_takes_little_more_than_one_frame_for_each_step() -> None:
    stacked = StepMemory(4096, frame_stack={"obs": 0})
    step_count, frame = 64, np.zeros((84, 84), np.uint8)
    for index in range(80):
        frames = np.stack([frame + index % 7 + t % 5 for t in range(step_count + 4)])
        obs = np.stack([frames[t : t + 4] for t in range(step_count + 1)])
        fragment = vector_fragment(index, step_count=step_count)
        stacked.extend(replace(fragment, obs=obs[:-1], next_obs=obs[-1]), index)
    whole = 2 * 4096 * 4 * frame.nbytes
    assert 4096 == stacked.step_count
    assert stacked.size_bytes < whole / 6


def test_observations_that_are_no_stacks_are_not_altered() -> None:
    rng = np.random.default_rng(3)
    memory = StepMemory(100, frame_stack={"obs": 0})
    seen = rng.integers(0, 255, (9, 4, 6), dtype=np.uint8)
    memory.extend(replace(vector_fragment(step_count=8), obs=seen[:-1], next_obs=seen[-1]))
    batch = memory.at(range(8))
    assert (seen[:-1] == batch.obs).all()
    assert (seen[1:] == batch.next_obs).all()


def test_the_same_seed_draws_the_same_steps() -> None:
    worlds = [World(1, 100) for _ in range(2)]
    for world in worlds:
        world.play(20)
    drawn = [world.memory.sample(64).handle.tolist() for world in worlds]
    assert drawn[0] == drawn[1]
    assert drawn[0] != worlds[0].memory.sample(64).handle.tolist()


def test_every_step_is_drawn_as_often_as_any_other() -> None:
    world = World(11, 64)
    world.play(40)
    counts = Counter(world.memory.sample(64_000).handle.tolist())
    expected = 64_000 / len(world.memory)
    usable = [step.handle for step in world.steps if step.is_usable]
    chi_square = sum((counts[handle] - expected) ** 2 / expected for handle in usable)
    assert counts.keys() == set(usable)
    assert chi_square < degrees(len(usable) - 1)


def degrees(freedom: int) -> float:
    """A chi-square that is exceeded about once in ten thousand times."""
    return float(freedom * (1 - 2 / (9 * freedom) + 3.72 * np.sqrt(2 / (9 * freedom))) ** 3)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, 2.0])
def test_steps_are_drawn_in_proportion_to_their_priorities(alpha: float) -> None:
    world = World(5, 48)
    world.play(40)
    memory = world.memory
    how = Prioritised(alpha=alpha, beta=0.5)
    handles = [step.handle for step in world.steps if step.is_usable]
    priorities = np.random.default_rng(1).exponential(size=len(handles)) + 0.01
    memory.update_priorities(handles, priorities)
    count = 100_000
    batch = memory.sample(count, prioritised=how)
    share = priorities**alpha / (priorities**alpha).sum()
    counts = Counter(batch.handle.tolist())
    drawn = np.array([counts[handle] for handle in handles])
    chi_square = ((drawn - count * share) ** 2 / (count * share)).sum()
    assert chi_square < degrees(len(handles) - 1)
    weight = dict(zip(handles, (share * len(handles)) ** -0.5, strict=True))
    wanted = np.array([weight[handle] for handle in batch.handle.tolist()])
    np.testing.assert_allclose(batch.weight, wanted / wanted.max(), rtol=1e-4)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_no_handle_ever_changes_another_step(seed: int) -> None:
    world = World(seed, 50)
    rng = np.random.default_rng(seed)
    world.play(5)
    expected: dict[int, float] = {}
    highest, late = 1.0, 0
    for _ in range(15):
        known = world.by_handle()
        pool = [step.handle for step in itertools.chain(world.steps, world.gone[-30:])]
        handles = rng.choice(pool, size=min(10, len(pool)), replace=False)
        new = rng.exponential(size=len(handles)) + 0.1
        for handle, priority in zip(handles.tolist(), new.tolist(), strict=True):
            if handle not in known:
                late += 1
            elif known[handle].is_usable:
                expected[handle] = priority
                highest = max(highest, priority)
        before = {step.handle for step in world.steps}
        world.memory.update_priorities(handles, new)
        world.play(2)
        for step in world.steps:
            if step.handle not in before:
                expected[step.handle] = highest if step.is_usable else 0.0
        kept = [step.handle for step in world.steps]
        told = world.memory.priorities(kept)
        default = [expected.get(step.handle, float(step.is_usable)) for step in world.steps]
        assert default == pytest.approx(told.tolist())
        gone = [step.handle for step in world.gone]
        assert not world.memory.holds(gone).any()
        assert np.isnan(world.memory.priorities(gone)).all()
    assert late == world.memory.late_update_count


def test_a_step_of_priority_zero_is_not_drawn() -> None:
    memory = StepMemory(100, seed=0)
    memory.extend(vector_fragment(step_count=10))
    handles = memory.at(range(10)).handle
    assert 9 == memory.update_priorities(handles[:9], np.zeros(9))
    drawn = memory.sample(100, prioritised=True)
    assert {int(handles[9])} == set(drawn.handle.tolist())
    memory.update_priorities(handles, np.zeros(10))
    with pytest.raises(InvalidRequestError, match="all priorities 0"):
        memory.sample(1, prioritised=True)


def test_a_new_step_has_the_highest_priority_there_was() -> None:
    memory = StepMemory(100, seed=0)
    memory.extend(vector_fragment(0, step_count=4))
    memory.update_priorities(memory.at([0, 1]).handle, [7.5, 2.0])
    memory.update_priorities(memory.at([0]).handle, [0.5])
    memory.extend(vector_fragment(1, step_count=4))
    assert [0.5, 2.0, 1.0, 1.0, *[7.5] * 4] == memory.priorities(
        memory.at(range(8)).handle
    ).tolist()


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_sequences_are_those_of_a_naive_list(seed: int) -> None:
    world = World(seed, capacity=60)
    for _ in range(4):
        world.play(6)
        if not len(world.memory):
            continue
        known = world.by_handle()
        batch = world.memory.sample_sequences(16, length=5, burn_in=3)
        assert (16, 8) == batch.mask.shape
        assert [True] * 3 + [False] * 5 == batch.is_burn_in.tolist()
        for row in range(16):
            expected: list[NaiveStep] = [known[int(batch.handle[row, 0])]]
            while len(expected) < 8 and (follower := expected[-1].follower) is not None:
                expected.append(follower)
            count = len(expected)
            assert [True] * count + [False] * (8 - count) == batch.mask[row].tolist()
            assert [step.handle for step in expected] == batch.handle[row, :count].tolist()
            assert [step.obs for step in expected] == batch.obs[row, :count, 0].tolist()
            assert [step.next_obs for step in expected] == batch.next_obs[row, :count, 0].tolist()
            assert [step.first for step in expected] == batch.first[row, :count].tolist()
            assert (batch.handle[row, count:] == -1).all()
            assert (batch.obs[row, count:] == 0).all()
            assert not batch.ended[row, count:].any()


@pytest.mark.parametrize(("burn_in", "length"), [(0, 4), (1, 1), (3, 5), (7, 2)])
def test_burn_in_comes_before_the_steps_to_learn_from_and_adds_to_them(
    burn_in: int, length: int
) -> None:
    memory = StepMemory(100, seed=0)
    memory.extend(vector_fragment(step_count=40))
    batch = memory.sample_sequences(8, length=length, burn_in=burn_in)
    assert (8, burn_in + length) == batch.mask.shape == batch.handle.shape
    assert [True] * burn_in + [False] * length == batch.is_burn_in.tolist()


def test_burn_in_and_length_are_together_at_most_65_536() -> None:
    memory = StepMemory(100, seed=0)
    memory.extend(vector_fragment(step_count=10))
    assert (1, 65_536) == memory.sample_sequences(1, length=65_533, burn_in=3).mask.shape
    assert (1, 65_536) == memory.sample_sequences(1, length=1, burn_in=65_535).mask.shape
    for burn_in, length in ((4, 65_533), (65_536, 1), (-1, 5), (0, 0), (0, 65_537)):
        with pytest.raises(InvalidRequestError, match=r"burn_in|length"):
            memory.sample_sequences(1, length=length, burn_in=burn_in)


def test_sequences_begin_where_the_recurrent_state_is_known() -> None:
    memory = StepMemory(64, seed=2)
    for index in range(12):
        state = {"h": np.full(2, index, np.float32)}
        memory.extend(replace(vector_fragment(index, step_count=8), in_state=state))
    batch = memory.sample_sequences(32, length=16)
    assert (batch.obs[:, 0, 0] == batch.in_state["h"][:, 0]).all()
    assert set(range(4, 12)) == set(batch.obs[:, 0, 0].astype(int).tolist())
    newest = batch.obs[:, 0, 0] == 11
    assert (8 == batch.mask[newest].sum(axis=1)).all()
    assert batch.mask[~newest].all()


def test_sequences_by_priority_begin_with_fragments_in_proportion_to_their_steps() -> None:
    memory = StepMemory(64, seed=2)
    for index in range(4):
        state = np.zeros(1, np.float32)
        memory.extend(replace(vector_fragment(index, step_count=4), in_state=state))
    every = memory.at(range(16)).handle
    memory.update_priorities(every, np.repeat([1.0, 2.0, 3.0, 4.0], 4))
    batch = memory.sample_sequences(20_000, length=4, prioritised=Prioritised(alpha=1, beta=1))
    counts = Counter(batch.obs[:, 0, 0].astype(int).tolist())
    expected = {index: 20_000 * (index + 1) / 10 for index in range(4)}
    assert sum((counts[i] - expected[i]) ** 2 / expected[i] for i in range(4)) < degrees(3)
    weight = {i: float(batch.weight[batch.obs[:, 0, 0] == i][0]) for i in range(4)}
    assert [1, 1 / 2, 1 / 3, 1 / 4] == pytest.approx([weight[i] for i in range(4)], rel=1e-5)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_whole_episodes_are_those_of_a_naive_list(seed: int) -> None:
    world = World(seed, capacity=80)
    for _ in range(6):
        world.play(6)
        whole = {}
        held = set(world.by_handle())
        for step in world.steps:
            if not step.first:
                continue
            episode = [step]
            while not (episode[-1].terminated or episode[-1].truncated):
                if episode[-1].follower is None:
                    break
                episode.append(episode[-1].follower)
            is_over = episode[-1].terminated or episode[-1].truncated
            if is_over and episode[-1].is_usable and held >= {each.handle for each in episode}:
                whole[step.handle] = episode
        if not whole:
            with pytest.raises(InvalidRequestError, match="no whole episode"):
                world.memory.sample_episodes(1)
            continue
        drawn = world.memory.sample_episodes(200)
        for steps in drawn:
            expected = whole[int(steps.handle[0])]
            assert [step.handle for step in expected] == steps.handle.tolist()
            assert [step.next_obs for step in expected] == values(steps.next_obs)
        if len(whole) < 10:
            assert whole.keys() == {int(steps.handle[0]) for steps in drawn}


def test_a_fragment_that_differs_is_refused_and_changes_nothing() -> None:
    memory = StepMemory(100, seed=0)
    memory.extend(vector_fragment(0))
    other = replace(vector_fragment(1), obs=np.zeros((4, 5), np.float32))
    with pytest.raises(TreeMismatchError, match=r"obs: wanted float32\[3\], got float32\[5\]"):
        memory.extend(other)
    memory.extend(vector_fragment(1))
    assert 8 == len(memory)
    assert (memory.sample(50).obs < 2).all()


def test_chunks_come_in_their_order() -> None:
    memory = StepMemory(100)
    memory.extend(vector_fragment(0), 5)
    memory.extend(vector_fragment(1), 5)
    assert [5 * CHUNK, 5 * CHUNK + 7] == memory.at([0, 7]).handle.tolist()
    with pytest.raises(InvalidRequestError, match="4 came before"):
        memory.extend(vector_fragment(2), 4)
    memory.extend(vector_fragment(2))
    assert 6 * CHUNK == memory.at([8]).handle[0]


def test_what_is_out_of_range_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="capacity_steps must be at least 1"):
        StepMemory(0)
    with pytest.raises(InvalidRequestError, match="capacity_steps must be a whole number"):
        StepMemory(1e6)  # type: ignore[arg-type]
    memory = StepMemory(10)
    with pytest.raises(InvalidRequestError, match="finds no step"):
        memory.sample(1)
    with pytest.raises(InvalidRequestError, match="at most capacity_steps, 10; got 11"):
        memory.wait_until(11)
    with pytest.raises(WaitElapsedError, match="1 steps to sample wanted, 0 there"):
        memory.wait_until(1, timeout_s=0)
    with pytest.raises(InvalidRequestError, match="a fragment has 12 steps"):
        memory.extend(vector_fragment(step_count=12))
    memory.extend(vector_fragment())
    for arguments, name in (
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 1, "n_step": 0}, "n_step"),
        ({"batch_size": 2.5}, "batch_size must be a whole number, got 2.5"),
        ({"batch_size": 1, "n_step": "3"}, "n_step must be a whole number, got '3'"),
        ({"batch_size": 1, "gamma": 1.5}, "gamma"),
        ({"batch_size": 1, "gamma": "most"}, "gamma must be from 0 to 1, got 'most'"),
        ({"batch_size": 1, "prioritised": "yes"}, r"True, False, or Prioritised.*, got 'yes'"),
        ({"batch_size": 1, "device": "gpu"}, "device must be None .*'cuda'.*; got 'gpu'"),
        ({"batch_size": 1, "device": "cuda:99"}, "device .* torch has .*; got 'cuda:99'"),
        ({"batch_size": 1, "device": 3}, "device .*; got '3': .* neither a text nor"),
    ):
        with pytest.raises(InvalidRequestError, match=name):
            memory.sample(**arguments)
    with pytest.raises(InvalidRequestError, match="prioritised must be True"):
        memory.sample_sequences(1, length=1, prioritised="yes")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="alpha must be from 0 to 10, got 'high'"):
        Prioritised(alpha="high")  # type: ignore[arg-type]
    of_numpy: Any = {"batch_size": np.int32(2), "gamma": np.float32(0.5), "prioritised": np.True_}
    assert 2 == len(memory.sample(**of_numpy))
    with pytest.raises(InvalidRequestError, match="must be from 0 to 3"):
        memory.at([4])
    with pytest.raises(InvalidRequestError, match="1 steps that are no longer kept"):
        memory.steps([123])
    with pytest.raises(InvalidRequestError, match="frame_stack names"):
        StepMemory(10, frame_stack={"obs.image": 0}).extend(vector_fragment())


def test_rewards_are_mapped_one_by_one_before_they_are_added() -> None:
    memory = StepMemory(100, seed=0)
    fragment = replace(vector_fragment(), reward=np.array([1, 5, 2, 9], np.float32))
    memory.extend(fragment)

    def clipped(rewards: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.minimum(rewards, 3)

    windows = memory.at(range(4), n_step=2, gamma=0.5, reward_map=clipped)
    assert [2.5, 4.0, 3.5, 3.0] == windows.reward.tolist()
    assert [1.0, 3.0, 2.0, 3.0] == memory.at(range(4), reward_map=clipped).reward.tolist()
    drawn = memory.sample(50, n_step=2, gamma=0.5, reward_map=clipped)
    assert {2.5, 4.0, 3.5, 3.0} == set(drawn.reward.tolist())


def test_samples_are_tensors_where_a_device_is_asked_for() -> None:
    import torch

    memory = StepMemory(100, seed=0)
    memory.extend(vector_fragment())
    batch = memory.sample(5, device="cpu")
    assert torch.float32 == batch.obs.dtype == batch.reward.dtype == batch.discount.dtype
    assert torch.int64 == batch.action.dtype == batch.handle.dtype
    assert torch.bool == batch.terminated.dtype
    assert (5, 3) == tuple(batch.obs.shape)
    memory.update_priorities(batch.handle, batch.reward)


def test_handles_are_listed_oldest_first_and_an_extension_says_its_own() -> None:
    memory = StepMemory(12)
    assert [] == memory.handles().tolist()
    given = [memory.extend(vector_fragment(index), 10 + index) for index in range(3)]
    count = vector_fragment(0).step_count
    assert [(10 + index) * CHUNK for index in range(3)] == given
    every = [handle + step for handle in given for step in range(count)]
    assert every[-memory.step_count :] == memory.handles().tolist()


@pytest.mark.parametrize("frame_stack", [None, {"obs": 0}])
def test_readers_beside_the_writer_never_see_half_a_step_or_change_another(
    frame_stack: dict[str, int] | None,
) -> None:
    """Steps come and go all the time; what belongs to a step says its number everywhere."""
    memory = StepMemory(256, seed=1, frame_stack=frame_stack)
    depth, step_count, fragment_count = 4, 16, 600
    is_over = threading.Event()
    failures: list[str] = []

    def steps_of(index: int) -> Fragment:
        numbers = np.arange(index * step_count, (index + 1) * step_count + 1)
        stacks = numbers[:, None] + np.arange(-depth + 1, 1)
        obs = np.broadcast_to(stacks[:, :, None], (*stacks.shape, 300)).astype(np.int32)
        return replace(
            vector_fragment(index, step_count=step_count),
            obs=obs[:-1] if frame_stack else obs[:-1, -1, :4],
            next_obs=obs[-1] if frame_stack else obs[-1, -1, :4],
            action=numbers[:-1],
        )

    def told(handles: Any) -> Any:
        return 1.0 / (1 + handles % 97)

    def read() -> None:
        while not is_over.is_set():
            batch = memory.sample(32, n_step=2, prioritised=True)
            shown = batch.obs.reshape(32, -1)[:, -1]
            later = batch.next_obs.reshape(32, -1)[:, -1]
            count = np.where(batch.discount < 0.985, 2, 1)
            number = (batch.handle >> 24) * step_count + (batch.handle & 0xFFFFFF)
            if not (
                (shown == batch.action).all()
                and (later == shown + count).all()
                and (number == shown).all()
                and (
                    np.ptp(batch.obs.reshape(32, -1, 4 if not frame_stack else 300), -1) == 0
                ).all()
            ):
                failures.append(f"{shown} {batch.action} {later} {number}")
            memory.update_priorities(batch.handle, told(batch.handle))
            kept = memory.priorities(batch.handle)
            wrong = ~np.isnan(kept) & (kept != told(batch.handle))
            if wrong.any():
                failures.append(f"{batch.handle[wrong]} {kept[wrong]}")

    memory.extend(steps_of(0), 0)
    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for index in range(1, fragment_count):
        memory.extend(steps_of(index), index)
    is_over.set()
    for reader in readers:
        reader.join()
    assert [] == failures
    assert 256 == memory.step_count
    assert memory.late_update_count > 0


@pytest.mark.parametrize("priority", [-1.0, np.nan, np.inf])
def test_a_priority_that_is_none_is_told_with_its_place(priority: float) -> None:
    memory = StepMemory(10)
    handle = memory.extend(vector_fragment())
    with pytest.raises(
        InvalidRequestError, match=rf"got {priority} at place 1, for handle {handle + 1}"
    ):
        memory.update_priorities([handle, handle + 1], [1.0, priority])


def test_the_one_step_that_can_be_drawn_is_found_among_many() -> None:
    memory = StepMemory(8000, seed=1)
    lost = np.ones(1000, np.bool_)
    for index in range(5):
        fragment = vector_fragment(index, step_count=1000)
        truncated = lost.copy()
        truncated[500] = index != 3
        memory.extend(replace(fragment, truncated=truncated, first=lost))
    assert 1 == len(memory)
    assert {3 * CHUNK + 500} == set(memory.sample(16).handle.tolist())


def test_a_sequence_is_refused_by_name_and_changes_nothing() -> None:
    memory = StepMemory(capacity_steps=8)
    with pytest.raises(InvalidRequestError, match="is a sequence; a mirror keeps steps"):
        memory.extend(sequence())  # type: ignore[arg-type]
    assert 0 == memory.step_count


@growth.marked
def test_each_step_of_a_sequence_of_many_fragments_takes_as_long_as_one_of_few() -> None:
    def sampling(count: int) -> Callable[[], object]:
        memory = StepMemory(2 * count, seed=1)
        for index in range(2 * count):
            memory.extend(vector_fragment(index, step_count=1))
        return lambda: memory.sample_sequences(16, length=count)

    growth.check(sampling, 2048)
