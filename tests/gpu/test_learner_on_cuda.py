"""Loading and training on a CUDA device."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch

from breadbox.batches import load_batch
from breadbox.fragment import Fragment
from breadbox.loader import FragmentLoader
from breadbox.payload import write_fragments
from breadbox.policies import PolicyModule, make_policy
from breadbox.stores import open_store
from breadbox.types import FragmentMetadata, FragmentReference
from breadbox_learner.batching import collate
from breadbox_learner.ppo import PpoUpdater
from breadbox_learner.ppo_config import PpoConfig
from support.local_rollout import LocalRollout

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device, and torch finds none"
)


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
            staleness=0,
            use_count=1,
        )
        for fragment, payload in zip(fragments, payloads, strict=True)
    ] * 8
    loader = FragmentLoader(lambda some: load_batch(store, some, device="cuda"), device="cuda")
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
