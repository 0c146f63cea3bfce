"""Runs MineStudio's own rollout manager, workers and PPO trainer on a Breadbox server.

Usage: python driver.py REPORT. MineStudio and the stand-ins are on the path, `BREADBOX_SERVER`
names the server. What the environments, which are scripted, made and what the trainer was given is
written to REPORT as JSON.
"""

import hashlib
import itertools
import json
import os
import random
import sys
import tempfile
import threading
import time
import traceback
import types
from pathlib import Path

import numpy as np
import torch
import torch.distributed


def stub(name, **content):
    """Put a module in the place of one of MineStudio's."""
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(content)


stub("minestudio.models", MinePolicy=object)
stub("minestudio.simulator", MinecraftSim=object)

import omegaconf  # noqa: E402
import ray  # noqa: E402
import wandb  # noqa: E402
from minestudio.online.rollout import rollout_manager, start_manager  # noqa: E402
from minestudio.online.rollout.replay_buffer import ReplayBufferInterface  # noqa: E402
from minestudio.online.trainer import basetrainer, ppotrainer, start_trainer  # noqa: E402

import breadbox_adapters.minestudio  # noqa: E402

STEP_COUNT = 8
ENVIRONMENTS = 3
WORKERS = 2
STEPS_PER_VERSION = 4 * STEP_COUNT + 1
"""Of each environment; then it waits for weights, so that fragments are used more than once."""
ITERATIONS = 6
FRAGMENTS_PER_ITERATION = 12
CONFIG = {
    "trainer_name": "PPOTrainer",
    "detach_rollout_manager": True,
    "logger_config": {},
    "rollout_config": {
        "num_rollout_workers": WORKERS,
        "num_gpus_per_worker": 0,
        "num_cpus_per_worker": 1,
        "fragment_length": STEP_COUNT,
        "to_send_queue_size": 2,
        "worker_config": {"num_envs": ENVIRONMENTS},
        "replay_buffer_config": {
            "max_chunks": 48,
            "max_reuse": 2,
            "max_staleness": 1,
            "fragments_per_report": 10,
            "fragments_per_chunk": 2,
            "database_config": {"path": "output/replay_buffer_cache", "num_shards": 8},
        },
        "episode_statistics_config": {},
    },
    "train_config": {
        "num_workers": 1,
        "num_gpus_per_worker": 0,
        "num_iterations": ITERATIONS,
        "vf_warmup": 0,
        "learning_rate": 1e-4,
        "anneal_lr_linearly": False,
        "weight_decay": 0.0,
        "adam_eps": 1e-8,
        "batch_size_per_gpu": 1,
        "batches_per_iteration": FRAGMENTS_PER_ITERATION,
        "gradient_accumulation": 3,
        "epochs_per_iteration": 2,
        "context_length": 4,
        "discount": 0.99,
        "gae_lambda": 0.95,
        "ppo_clip": 0.2,
        "clip_vloss": False,
        "max_grad_norm": 5,
        "zero_initial_vf": True,
        "ppo_policy_coef": 1.0,
        "ppo_vf_coef": 0.5,
        "kl_divergence_coef_rho": 0.1,
        "entropy_bonus_coef": 0.0,
        "coef_rho_decay": 0.99,
        "log_ratio_range": 50,
        "normalize_advantage_full_batch": True,
        "use_normalized_vf": True,
        "num_readers": 3,
        "num_cpus_per_reader": 0.1,
        "prefetch_batches": 2,
        "save_interval": 1000,
        "keep_interval": 1000,
        "record_video_interval": 1000,
        "enable_ref_update": False,
        "resume": None,
        "resume_optimizer": False,
        "save_path": None,
    },
}


def digest(value):
    """The same text for the same types, dtypes, shapes and bytes, at every depth."""
    whole = hashlib.sha256()

    def add(node):
        whole.update(type(node).__name__.encode())
        match node:
            case np.ndarray():
                whole.update(f"{node.dtype.str}{node.shape}".encode())
                whole.update(np.ascontiguousarray(node).tobytes())
            case dict():
                for key in node:
                    add(key)
                    add(node[key])
            case list() | tuple():
                for child in node:
                    add(child)
            case _:
                whole.update(repr(node).encode())

    add(value)
    return whole.hexdigest()


def digests(fragment):
    return {name: digest(value) for name, value in sorted(vars(fragment).items())}


class ScriptedWorker:
    """In the place of MineStudio's RolloutWorker: environments that end now and then."""

    serial = itertools.count()

    def __init__(self, progress_handler, num_envs, **options):
        self._report = progress_handler
        self._rng = np.random.default_rng(next(self.serial))
        self._environments = [
            {"name": f"{self._rng.integers(2**60):x}", "episode": 0, "ended": True, "steps": 0}
            for _ in range(num_envs)
        ]
        self.versions = []
        self._steps_left = STEPS_PER_VERSION

    def update_model_version(self, version):
        self.versions.append(version)

    def load_weights(self, weights):
        assert weights
        self._steps_left = STEPS_PER_VERSION

    def loop(self):
        if self._steps_left == 0:
            time.sleep(0.005)  # MineStudio's thread asks again and again.
            return
        self._steps_left -= 1
        for environment in self._environments:
            ended, environment["ended"] = environment["ended"], self._rng.random() < 0.1
            environment["episode"] += ended
            environment["steps"] += 1
            self._report(
                worker_uuid=environment["name"],
                obs={
                    "image": self._rng.integers(0, 256, (16, 16, 3), np.uint8),
                    "task": f"shoot {environment['episode'] % 3}\0",
                    "depths": [np.float32(self._rng.random()), 2],
                    # What varies from fragment to fragment: kinds, widths, and keys.
                    "chat": None if self._rng.random() < 0.5 else f"go {environment['steps']}",
                    "inventory": {
                        f"item {kind}": environment["steps"]
                        for kind in range(1 + environment["steps"] // (2 * STEP_COUNT))
                    },
                },
                state=[
                    torch.from_numpy(self._rng.random((1, 4), np.float32)),
                    torch.from_numpy(self._rng.random((2, 1, 3), np.float32)),
                ],
                action={
                    "buttons": self._rng.integers(0, 5, (1,)),
                    "camera": self._rng.integers(0, 3, (1,)),
                },
                last_reward=float(self._rng.random()),
                last_terminated=bool(ended),
                last_truncated=False,
                episode_uuid=f"{environment['name']}/{environment['episode']}",
            )


class PolicyHead:
    def logprob(self, action, logits):
        parts = [
            torch.distributions.Categorical(logits=logits[name]).log_prob(action[name].squeeze(-1))
            for name in logits
        ]
        return sum(parts)

    def entropy(self, logits):
        return sum(
            torch.distributions.Categorical(logits=part).entropy() for part in logits.values()
        )

    def kl_divergence(self, first, second):
        return sum(
            torch.distributions.kl_divergence(
                torch.distributions.Categorical(logits=first[name]),
                torch.distributions.Categorical(logits=second[name]),
            )
            for name in first
        )


class ValueHead(torch.nn.Linear):
    def denormalize(self, value):
        return value

    def loss(self, value, target, reduction):
        return torch.nn.functional.mse_loss(value, target, reduction=reduction)


class Policy(torch.nn.Module):
    device = torch.device("cpu")

    def __init__(self):
        super().__init__()
        self.heads = torch.nn.ModuleDict(
            {"buttons": torch.nn.Linear(3, 5), "camera": torch.nn.Linear(3, 3)}
        )
        self.value_head = ValueHead(3, 1)
        self.pi_head = PolicyHead()

    def merge_state(self, states):
        return [torch.cat([state[0] for state in states]), torch.cat([s[1] for s in states], dim=1)]

    def initial_state(self, batch_size):
        return [torch.zeros(batch_size, 4), torch.zeros(2, batch_size, 3)]

    def forward(self, input, state_in, context):
        seen = input["image"].float().mean(dim=(-3, -2)) / 255
        assert context["first"].shape == seen.shape[:2]
        logits = {name: head(seen) for name, head in self.heads.items()}
        return {"pi_logits": logits, "vpred": self.value_head(seen).squeeze(-1)}, state_in


def without_cuda(make):
    """The trainer asks for tensors on CUDA by name."""

    def made(*args, device=None, **options):
        return make(*args, device=None if device == "cuda" else device, **options)

    return made


class Observed:
    """Notes what goes into the interface and what comes out of the loaders."""

    def __init__(self):
        self.sent = {}
        self.fetches = []
        self.loaded = []
        self._lock = threading.Lock()

    def watch(self):
        add, fetch = ReplayBufferInterface.add_fragment, ReplayBufferInterface.fetch_fragments

        def add_fragment(interface, fragment, metadata):
            made = digests(fragment)
            with self._lock:
                self.sent[f"{fragment.worker_uuid}/{fragment.fid_in_worker}"] = made
            add(interface, fragment, metadata)

        def fetch_fragments(interface, num_fragments):
            records = fetch(interface, num_fragments)
            assert records == interface.prepared_fragments()
            version = interface.client.get_buffer(interface.buffer).model_version
            granted = [json.loads(fragment_id) for _, fragment_id in records]
            self.fetches.append(
                [
                    {
                        "name": f"{index.worker_uuid}/{index.fid_in_worker}",
                        "staleness": each["staleness_when_granted"],
                        "version": each["metadata"]["model_version_min"],
                        "current": version,
                        "use_count": each["use_count"],
                        "chunk_id": each["chunk_id"],
                    }
                    for (index, _), each in zip(records, granted, strict=True)
                ]
            )
            return records

        ReplayBufferInterface.add_fragment = add_fragment
        ReplayBufferInterface.fetch_fragments = fetch_fragments
        for module in (basetrainer, ppotrainer):
            module.prepare_batch = self._watched(module.prepare_batch)

    def _watched(self, prepare):
        def prepare_batch(model, fragments):
            for fragment in fragments:
                name = f"{fragment.worker_uuid}/{fragment.fid_in_worker}"
                self.loaded.append([len(self.fetches), name, digests(fragment)])
            return prepare(model, fragments)

        return prepare_batch


def main(report: Path) -> None:
    torch.manual_seed(0)
    random.seed(0)
    torch.tensor = without_cuda(torch.tensor)
    rollout_manager.RolloutWorker = ScriptedWorker
    observed = Observed()
    observed.watch()
    config = omegaconf.OmegaConf.create(CONFIG)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # MineStudio writes a log where it runs.
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/group", rank=0, world_size=1
        )
        start_manager.start_rolloutmanager(Policy, object, config)
        start_trainer.start_trainer(Policy, object, config, "")
        manager = ray.get_actor("rollout_manager")._instance
        # One more count of fragments than is reported at a time is in already.
        limit = time.monotonic() + 30
        while time.monotonic() < limit and not any(
            "replay_buffer/fragments_per_second" in record for record in wandb.logged
        ):
            time.sleep(0.05)
        report.write_text(
            json.dumps(
                {
                    "is_switched": ReplayBufferInterface
                    is breadbox_adapters.minestudio.ReplayBufferInterface,
                    "loaders_of": basetrainer.create_loader_pool.__module__,
                    "failures": [repr(error) for error in ray.failures],
                    "sent": observed.sent,
                    "fetches": observed.fetches,
                    "loaded": observed.loaded,
                    "logged": wandb.logged,
                    "dropped": [
                        handle._instance.replay_buffer.dropped_count
                        for handle in manager.rollout_workers
                    ],
                    "versions": [
                        handle._instance.rollout_worker.versions
                        for handle in manager.rollout_workers
                    ],
                },
                default=float,
            )
        )


if __name__ == "__main__":
    status = 1
    try:
        main(Path(sys.argv[1]))
        status = 0
    except Exception:  # noqa: BLE001
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(status)  # MineStudio's threads never end.
