"""Fragments from Gymnasium environments stepped in this process, with nothing in between."""

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch

from breadbox.model.fragment import Fragment
from breadbox_policies import PolicyModule


class LocalWorker:
    """One environment; collects the steps of the fragment being filled."""

    def __init__(self, worker_id: str, env: gymnasium.Env[Any, Any], seed: int) -> None:
        self.worker_id = worker_id
        self.env = env
        self.obs, _ = env.reset(seed=seed)
        self.first = True
        self.episode_id = 0
        self.episode_return = 0.0
        self.fragment_index = 0
        self.rows: list[dict[str, Any]] = []
        self.final: list[tuple[int, Any]] = []
        self.in_state: Any = None

    def step(self, action: Any, log_prob: float, value: float) -> None:
        obs, reward, terminated, truncated, _ = self.env.step(action)
        self.episode_return += float(reward)
        ended = terminated or truncated
        self.rows.append(
            {
                "obs": self.obs,
                "action": np.asarray(action),
                "reward": np.float32(reward),
                "terminated": terminated,
                "truncated": truncated,
                "first": self.first,
                "episode_id": self.episode_id,
                "log_prob": np.float32(log_prob),
                "value": np.float32(value),
                "episode_return": np.float32(self.episode_return if ended else np.nan),
            }
        )
        self.first = ended
        if ended:
            self.final.append((len(self.rows) - 1, obs))
            obs, _ = self.env.reset()
            self.episode_id += 1
            self.episode_return = 0.0
        self.obs = obs

    def cut(self, session_id: str, model_version: int) -> Fragment:
        columns = {
            name: np.stack([np.asarray(row[name]) for row in self.rows]) for name in self.rows[0]
        }
        fragment = Fragment(
            worker_id=self.worker_id,
            fragment_index=self.fragment_index,
            session_id=session_id,
            model_version_min=model_version,
            model_version_max=model_version,
            obs=columns["obs"],
            action=columns["action"],
            reward=columns["reward"],
            terminated=columns["terminated"],
            truncated=columns["truncated"],
            first=columns["first"],
            episode_id=columns["episode_id"],
            next_obs=np.asarray(self.obs),
            in_state=self.in_state,
            final_obs_step=np.array([step for step, _ in self.final], dtype=np.int32),
            final_obs=np.stack([obs for _, obs in self.final]) if self.final else None,
            log_prob=columns["log_prob"],
            value=columns["value"],
            extras={"episode_return": columns["episode_return"]},
        )
        self.fragment_index += 1
        self.rows, self.final = [], []
        return fragment


class LocalRollout:
    """Steps several environments with one policy and cuts their steps into fragments."""

    def __init__(
        self,
        make_env: Callable[[], gymnasium.Env[Any, Any]],
        *,
        env_count: int,
        steps_per_fragment: int,
        seed: int,
    ) -> None:
        self.workers = [
            LocalWorker(f"worker-{number}", make_env(), seed + number)
            for number in range(env_count)
        ]
        self.steps_per_fragment = steps_per_fragment
        self.generator = torch.Generator().manual_seed(seed)
        self.state: Any = None

    @torch.no_grad()
    def collect(
        self, policy: PolicyModule, rounds: int, *, session_id: str = "run", model_version: int = 0
    ) -> list[Fragment]:
        """Collect *rounds* fragments of each environment."""
        if self.state is None:
            self.state = policy.initial_state(len(self.workers))
        fragments = []
        for _ in range(rounds):
            if self.state is not None:
                states = policy.split_state(self.state)
                for worker, state in zip(self.workers, states, strict=True):
                    worker.in_state = tuple(leaf.numpy().copy() for leaf in state)
            for _ in range(self.steps_per_fragment):
                self._step(policy)
            fragments += [worker.cut(session_id, model_version) for worker in self.workers]
        return fragments

    def _step(self, policy: PolicyModule) -> None:
        obs = torch.from_numpy(np.stack([worker.obs for worker in self.workers]))
        first = torch.tensor([worker.first for worker in self.workers])
        acted = policy.act(obs, self.state, first, generator=self.generator)
        self.state = acted.state
        for worker, action, log_prob, value in zip(
            self.workers,
            acted.action.numpy(),
            acted.log_prob.tolist(),
            acted.value.tolist(),
            strict=True,
        ):
            worker.step(action, log_prob, value)

    def close(self) -> None:
        for worker in self.workers:
            worker.env.close()
