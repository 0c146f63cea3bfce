"""Loading and training on a CUDA device."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

import breadbox
from breadbox.loader import FragmentLoader
from breadbox.model.fragment import Fragment
from breadbox.model.types import FragmentMetadata, FragmentReference
from breadbox.payload import write_fragments
from breadbox.reading.batches import Batch, load_batch
from breadbox.reading.devices import side_stream_for
from breadbox.stores import open_store
from breadbox.testing import start_server
from breadbox_learner.settings import PpoConfig
from breadbox_learner.training.ppo import PpoUpdater
from breadbox_learner.training.source import LeaseSource
from breadbox_policies import PolicyModule, make_policy
from support.collating import collate
from support.local_rollout import LocalRollout

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device, and torch finds none"
)

FRAGMENT_COUNT = 40
STEPS = 32


def make_cartpole() -> gymnasium.Env[Any, Any]:
    return gymnasium.make("CartPole-v1")


def policy_on(device: str, name: str = "mlp") -> PolicyModule:
    torch.manual_seed(0)
    env = make_cartpole()
    policy = make_policy(name, env.observation_space, env.action_space)
    env.close()
    return policy.to(device)


@pytest.fixture(scope="module")
def fragments() -> Iterator[list[Fragment]]:
    rollout = LocalRollout(make_cartpole, env_count=8, steps_per_fragment=32, seed=0)
    yield rollout.collect(policy_on("cpu"), 4)
    rollout.close()


def test_batches_copied_beside_a_computation_hold_the_right_numbers(
    fragments: list[Fragment], tmp_path: Path
) -> None:
    """Several batches ahead, while the main stream is busy and memory is given back and taken."""
    store = open_store(f"file://{tmp_path}")
    payloads = write_fragments(store, fragments)
    references = [
        FragmentReference(
            FragmentMetadata(
                worker_id=fragment.worker_id,
                fragment_index=fragment.fragment_index,
                session_id=fragment.session_id,
                model_version_min=0,
                model_version_max=0,
                payload=payload,
                step_count=fragment.step_count,
            ),
            chunk_id=0,
            staleness_when_granted=0,
            use_count=1,
        )
        for fragment, payload in zip(fragments, payloads, strict=True)
    ] * 8
    side_stream = side_stream_for("cuda")
    assert side_stream is not None

    def load(some: Sequence[FragmentReference]) -> Batch:
        with side_stream:
            return load_batch(store, some, device="cuda")

    loader = FragmentLoader(load, side_stream=side_stream)
    busy = torch.rand(2048, 2048, device="cuda")
    sums = []
    for batch in loader.batches(references, 8):
        busy = (busy @ busy).clamp(0, 1)
        sums.append((batch.obs.double().sum(), batch.reward.double().sum()))
    for number, (obs, reward) in enumerate(sums):
        part = fragments[8 * number % len(fragments) :][:8]
        assert sum(float(each.obs.astype("f8").sum()) for each in part) == pytest.approx(float(obs))
        assert sum(float(each.reward.sum()) for each in part) == float(reward)
    store.close()


def numbered(index: int, session_id: str = "cuda") -> Fragment:
    """Observes its own number and nothing else; so large that a copy takes a while."""
    flags = np.zeros(STEPS, np.bool_)
    return Fragment(
        worker_id="w",
        fragment_index=index,
        session_id=session_id,
        model_version_min=0,
        model_version_max=0,
        obs=np.full((STEPS, 64, 64), index, np.float32),
        action=np.zeros(STEPS, np.int64),
        reward=np.full(STEPS, index, np.float32),
        terminated=flags,
        truncated=flags,
        first=flags,
        episode_id=np.zeros(STEPS, np.int64),
        next_obs=np.zeros((64, 64), np.float32),
    )


@pytest.fixture
def filled() -> Iterator[breadbox.Client]:
    """A client of a server that holds fragments 0 to 39."""
    with start_server() as server, breadbox.connect(server.address) as client:
        client.start_session("cuda")
        client.append_many([numbered(index) for index in range(FRAGMENT_COUNT)])
        yield client


class BusyStream:
    """Keeps the caller's stream busy, and sums batches up behind what it is busy with."""

    def __init__(self) -> None:
        self._busy = torch.rand(2048, 2048, device="cuda")
        self._sums: list[tuple[float, torch.Tensor]] = []

    def sum_later(self, obs: torch.Tensor, indexes: list[int]) -> None:
        for _ in range(20):
            self._busy = (self._busy @ self._busy).clamp(0, 1)
        self._sums.append((sum(indexes) * float(STEPS * 64 * 64), obs.double().sum()))

    def check(self, count: int) -> None:
        assert count == len(self._sums)
        assert [wanted for wanted, _ in self._sums] == [float(got) for _, got in self._sums]


def indexes(references: Sequence[FragmentReference]) -> list[int]:
    return [reference.metadata.fragment_index for reference in references]


def test_a_batch_for_cuda_comes_by_way_of_page_locked_memory_that_is_used_again(
    filled: breadbox.Client,
) -> None:
    with filled.fetch(FRAGMENT_COUNT) as lease:
        references = lease.references
        first = filled.load_batch(references[:8], device="cuda")
        assert first.stacked is not None
        assert first.stacked.slab.is_pinned()
        assert first.stacked.copied is not None
        again = filled.load_batch(references[8:16], device="cuda", into=first.stacked)
        assert again.stacked is not None
        assert first.stacked.slab.data_ptr() == again.stacked.slab.data_ptr()
        # The page-locked memory was written over; what was copied from it stays.
        for batch, part in ((first, references[:8]), (again, references[8:16])):
            assert "cuda" == batch.obs.device.type == batch.reward.device.type
            assert batch.obs.dtype is torch.float32
            assert indexes(part) == batch.obs[:, 0, 0, 0].tolist()
            assert indexes(part) == batch.reward[:, -1].tolist()
        larger = filled.load_batch(references, device="cuda", into=again.stacked)
        assert larger.stacked is not None
        assert larger.stacked.slab.data_ptr() != again.stacked.slab.data_ptr()


def test_batches_of_a_lease_are_copied_beside_a_computation(filled: breadbox.Client) -> None:
    busy = BusyStream()
    with filled.fetch(FRAGMENT_COUNT) as lease:
        for batch in lease.batches(4, device="cuda", prefetch_batches=3):
            busy.sum_later(batch.obs, indexes(batch.references))
            del batch  # Its memory may be given to the next copy, but not before it was read.
    busy.check(FRAGMENT_COUNT // 4)


async def test_batches_of_an_awaited_lease_are_copied_beside_a_computation(
    filled: breadbox.Client,
) -> None:
    busy = BusyStream()
    async with (
        await breadbox.aio.connect(filled.address) as client,
        await client.fetch(FRAGMENT_COUNT) as lease,
    ):
        async for batch in lease.batches(4, device="cuda", prefetch_batches=3):
            busy.sum_later(batch.obs, indexes(batch.references))
            del batch
    busy.check(FRAGMENT_COUNT // 4)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_learners_source_copies_ahead_and_uses_page_locked_memory_again(
    filled: breadbox.Client, prefetch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    slabs = set()
    load = filled.load_batch

    def noted(*arguments: Any, **named: Any) -> Batch:
        batch = load(*arguments, **named)
        assert batch.stacked is not None
        assert batch.stacked.slab.is_pinned()
        slabs.add(batch.stacked.slab.data_ptr())
        return batch

    monkeypatch.setattr(filled, "load_batch", noted)
    busy = BusyStream()
    source = LeaseSource(filled, fragment_count=4, prefetch_batches=prefetch, device="cuda")
    for _ in range(FRAGMENT_COUNT // 4):
        fetched = source.next(lambda: False)
        assert fetched is not None
        assert "cuda" == fetched.batch.obs.device.type
        busy.sum_later(fetched.batch.obs, fetched.batch.fragment_indices)
        fetched.release(True)
        del fetched
    source.close()
    busy.check(FRAGMENT_COUNT // 4)
    assert len(slabs) <= prefetch + 1


@pytest.mark.parametrize("name", ["mlp", "lstm"])
def test_an_update_on_cuda_is_the_update_on_the_cpu(fragments: list[Fragment], name: str) -> None:
    batch = collate(fragments)
    trained = []
    for device in ("cpu", "cuda"):
        policy = policy_on(device, name)
        statistics = PpoUpdater(policy, PpoConfig(epochs=1), device=device).update(batch)
        trained.append(statistics)
    for field in ("policy_loss", "value_loss", "entropy", "kl"):
        ours, theirs = (getattr(statistics, field) for statistics in trained)
        assert ours == pytest.approx(theirs, rel=1e-2, abs=1e-4), field


@pytest.mark.parametrize("amp", ["bfloat16", "float16"])
def test_mixed_precision_trains(fragments: list[Fragment], amp: Any) -> None:
    statistics = PpoUpdater(policy_on("cuda"), PpoConfig(amp=amp), device="cuda").update(
        collate(fragments)
    )
    assert statistics.gradient_steps > 0
