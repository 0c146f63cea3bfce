"""Rainbow-style Q-learning on CartPole: prioritised, n-step, double and dueling, actors elsewhere.

`python examples/prioritised_dqn.py` starts a server and two actors on this machine, trains until
the greedy policy holds the pole for 195 steps on average, and prints how it gets on. Actors know
only the server's address: on other machines they are the same function.
"""

import argparse
import multiprocessing
import time

import gymnasium
import numpy as np
import torch
from torch import nn

import breadbox
from breadbox.mirror import Prioritised, ReplayMirror

ENV, OBS_SIZE, ACTIONS = "CartPole-v1", 4, 2
ACTORS, STEPS_PER_S = 2, 250
BATCH_SIZE, N_STEP, GAMMA, ALPHA = 64, 8, 0.99, 0.6
UPDATES_MAX, EVALUATE_EVERY, PUBLISH_EVERY, TARGET_EVERY = 8_000, 100, 50, 100
TARGET_RETURN = 195.0


class Network(nn.Module):
    """A dueling head: the value of a state, and how much better each action is than the mean."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Linear(OBS_SIZE, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()
        self.body = nn.Sequential(*layers)
        self.value, self.advantage = nn.Linear(128, 1), nn.Linear(128, ACTIONS)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        hidden = self.body(obs)
        advantage = self.advantage(hidden)
        return self.value(hidden) + advantage - advantage.mean(-1, keepdim=True)

    @torch.no_grad()
    def act(self, obs: np.ndarray) -> int:
        return int(self(torch.as_tensor(obs)[None]).argmax())


def actor(address: str, seed: int, explores: float) -> None:
    torch.set_num_threads(1)
    env, network, rng = gymnasium.make(ENV), Network(), np.random.default_rng(seed)
    known = None
    with breadbox.connect(address) as client, breadbox.StepWriter(client) as writer:
        obs, _ = env.reset(seed=seed)
        while True:
            begun_at = time.monotonic()
            for _ in range(STEPS_PER_S // 10):
                is_random = known is None or rng.random() < explores
                action = int(rng.integers(ACTIONS)) if is_random else network.act(obs)
                next_obs, reward, terminated, truncated, _ = env.step(action)
                # The leading axis is that of environments: this actor has one.
                writer.add(
                    obs[None],
                    np.array([action]),
                    [reward],
                    next_obs[None],
                    [terminated],
                    [truncated],
                )
                obs = env.reset()[0] if terminated or truncated else next_obs
            if (newer := client.load_model(known)) is not None:
                known, weights = newer
                network.load_state_dict({k: torch.as_tensor(v) for k, v in weights.items()})
                writer.model_version = known.model_version or 0
            # Paced, so that what is learned does not depend on how fast this machine simulates.
            time.sleep(max(0.0, begun_at + 0.1 - time.monotonic()))


def evaluate(network: Network, seed: int, episodes: int = 10) -> float:
    env, total = gymnasium.make(ENV), 0.0
    for episode in range(episodes):
        obs, _ = env.reset(seed=10_000 + 100 * seed + episode)
        is_over = False
        while not is_over:
            obs, reward, terminated, truncated, _ = env.step(network.act(obs))
            total, is_over = total + float(reward), terminated or truncated
    return total / episodes


def learn(client: breadbox.Client, mirror: ReplayMirror, session_id: str, seed: int) -> float:
    online, target = Network(), Network()
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-3)
    mirror.wait_until(steps=1_000, timeout_s=300)
    for update in range(1, UPDATES_MAX + 1):
        beta = min(1.0, 0.4 + 0.6 * update / 5_000)
        batch = mirror.sample(
            BATCH_SIZE,
            n_step=N_STEP,
            gamma=GAMMA,
            prioritised=Prioritised(ALPHA, beta),
            device="cpu",
        )
        with torch.no_grad():
            best = online(batch.next_obs).argmax(-1, keepdim=True)
            following = target(batch.next_obs).gather(-1, best).squeeze(-1)
            goal = batch.reward + batch.discount * ~batch.terminated * following
        error = online(batch.obs).gather(-1, batch.action[:, None]).squeeze(-1) - goal
        loss = (
            batch.weight * nn.functional.smooth_l1_loss(error, 0 * error, reduction="none")
        ).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(online.parameters(), 10.0)
        optimizer.step()
        mirror.update_priorities(batch.handle, error.detach().abs() + 1e-3)
        if update % TARGET_EVERY == 0:
            target.load_state_dict(online.state_dict())
        if update % PUBLISH_EVERY == 0:
            client.publish(session_id, update, online.state_dict())
        if update % EVALUATE_EVERY == 0:
            mean_return = evaluate(online, seed)
            steps = mirror.inserted_step_count
            print(f"update {update:5}  steps {steps:6}  return {mean_return:.1f}", flush=True)
            if mean_return >= TARGET_RETURN:
                return mean_return
    return 0.0


def main(seed: int) -> float:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    pool = multiprocessing.get_context("spawn").Pool(ACTORS)
    with (
        breadbox.local_server(preset="off-policy") as client,
        pool,  # Its exit ends the actors, while there is still a server.
        ReplayMirror(client, capacity_steps=50_000, seed=seed) as mirror,
    ):
        session_id = client.start_session().session_id
        told = [(client.address, 1000 * seed + n, 0.02 + 0.18 * n) for n in range(ACTORS)]
        pool.starmap_async(actor, told, error_callback=print)
        return learn(client, mirror, session_id, seed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    raise SystemExit(main(parser.parse_args().seed) < TARGET_RETURN)
