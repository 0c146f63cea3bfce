"""R2D2-style Q-learning on CartPole without velocities: recurrent, with stored state and burn-in.

`python examples/recurrent_q.py` starts a server and two actors, and trains to a return of 120.
"""

import argparse
import multiprocessing
import time

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

import breadbox
from breadbox.mirror import ReplayMirror, SequenceBatch

ENV, OBS_SIZE, ACTIONS, HIDDEN, TARGET_RETURN = "CartPole-v1", 3, 2, 64, 120.0
BATCH_SIZE, LENGTH, BURN_IN, N_STEP, GAMMA = 32, 12, 4, 5, 0.98
ACTORS, STEPS_PER_S, UPDATES_MAX, PUBLISH_EVERY, TARGET_EVERY = 2, 250, 6_000, 25, 100
torch.set_num_threads(1)


def shown(obs: np.ndarray, pushed: int = 0) -> np.ndarray:
    """Where cart and pole are, and the last action (-1, 1; 0: none yet), but not how fast."""
    return np.array([obs[0], 10 * obs[2], pushed], np.float32)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Sequential(nn.Linear(OBS_SIZE, HIDDEN), nn.ReLU())
        self.memory = nn.GRU(HIDDEN, HIDDEN, batch_first=True)
        self.value = nn.Linear(HIDDEN, ACTIONS)

    def forward(self, obs: Tensor, state: Tensor, burn_in: int = 0) -> tuple[Tensor, Tensor]:
        """Values [B, L, A], states after steps [B, L, H]; no gradient goes through burn-in."""
        seen, states = self.seen(obs), state[:, None]
        for part in seen.tensor_split([burn_in], 1) if burn_in else [seen]:  # Each from its state.
            after, _ = self.memory(part, states[None, :, -1].detach())
            states = torch.cat([states.detach(), after], 1)
        return self.value(states[:, 1:]), states[:, 1:]

    def following(self, next_obs: Tensor, states: Tensor) -> Tensor:
        values, _ = self(next_obs.flatten(0, 1)[:, None], states.flatten(0, 1))
        return values.view(*states.shape[:2], ACTIONS)

    @torch.no_grad()
    def act(self, obs: np.ndarray, state: Tensor) -> tuple[np.ndarray, Tensor]:
        values, states = self(torch.as_tensor(obs)[:, None], state)
        return values[:, 0].argmax(-1).numpy(), states[:, 0]


def actor(address: str, seed: int, explores: float) -> None:
    env, network, rng = gymnasium.make(ENV), Network(), np.random.default_rng(seed)
    with breadbox.connect(address) as client, breadbox.StepWriter(client) as writer:
        obs, state, known = shown(env.reset(seed=seed)[0]), torch.zeros(1, HIDDEN), None
        while True:
            begun_at = time.monotonic()
            for _ in range(STEPS_PER_S // 10):
                # The leading axis is that of environments: this actor has one.
                action, after = network.act(obs[None], state)
                if known is None or rng.random() < explores:
                    action = rng.integers(ACTIONS, size=1)
                led_to, reward, terminated, truncated, _ = env.step(int(action[0]))
                next_obs = shown(led_to, 2 * int(action[0]) - 1)
                came = [reward], next_obs[None], [terminated], [truncated]
                writer.add(obs[None], action, *came, extras={"state": state.numpy()})
                obs, state = next_obs, after
                if terminated or truncated:
                    obs, state = shown(env.reset()[0]), torch.zeros(1, HIDDEN)
            if (newer := client.load_model(known)) is not None:
                known, weights = newer
                writer.model_version = known.model_version or 0
                network.load_state_dict({k: torch.as_tensor(v) for k, v in weights.items()})
            # Paced, so that what is learned does not depend on how fast this machine simulates.
            time.sleep(max(0.0, begun_at + 0.1 - time.monotonic()))


def evaluate(network: Network, episodes: int = 20) -> float:
    envs, total = [gymnasium.make(ENV) for _ in range(episodes)], 0.0
    obs = np.stack([shown(env.reset(seed=10_000 + n)[0]) for n, env in enumerate(envs)])
    state, playing = torch.zeros(episodes, HIDDEN), np.ones(episodes, np.bool_)
    while playing.any():
        actions, state = network.act(obs, state)
        for n in np.flatnonzero(playing):
            led_to, reward, terminated, truncated, _ = envs[n].step(int(actions[n]))
            obs[n], total = shown(led_to, 2 * int(actions[n]) - 1), total + float(reward)
            playing[n] = not (terminated or truncated)
    return total / episodes


def loss_of(online: Network, target: Network, batch: SequenceBatch) -> Tensor:
    values, states = online(batch.obs, batch.extras["state"][:, 0], BURN_IN)
    with torch.no_grad():
        best = online.following(batch.next_obs, states).argmax(-1, keepdim=True)
        _, states = target(batch.obs, batch.extras["state"][:, 0], BURN_IN)
        following = target.following(batch.next_obs, states).gather(-1, best).squeeze(-1)
        one_step = batch.reward + GAMMA * ~batch.terminated * following
        goal, goes_on = one_step.clone(), batch.mask[:, 1:] & ~batch.ended[:, :-1]
        for _ in range(N_STEP - 1):  # Each time of one step more, made of the next step's goal.
            longer = batch.reward[:, :-1] + GAMMA * goal[:, 1:]
            goal[:, :-1] = torch.where(goes_on, longer, one_step[:, :-1])
    taken = values.gather(-1, batch.action[..., None]).squeeze(-1)
    # The state is that of the episode in which the sequence begins: later ones are left out.
    counts = batch.mask & ~batch.is_burn_in & (batch.first.cumsum(1) <= batch.first[:, :1])
    return nn.functional.smooth_l1_loss(taken[counts], goal[counts])


def learn(client: breadbox.Client, mirror: ReplayMirror, session_id: str) -> float:
    online, target = Network(), Network()
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-3)
    mirror.wait_until(steps=1_000, timeout_s=300)
    for update in range(1, UPDATES_MAX + 1):
        batch = mirror.sample_sequences(BATCH_SIZE, length=LENGTH, burn_in=BURN_IN, device="cpu")
        optimizer.zero_grad()
        loss_of(online, target, batch).backward()
        nn.utils.clip_grad_norm_(online.parameters(), 10.0)
        optimizer.step()
        if update % PUBLISH_EVERY == 0:
            client.publish(session_id, update, online.state_dict())
        if update % TARGET_EVERY == 0:
            target.load_state_dict(online.state_dict())
            mean_return, steps = evaluate(online), mirror.inserted_step_count
            print(f"update {update:5}  steps {steps:6}  return {mean_return:.1f}", flush=True)
            if mean_return >= TARGET_RETURN:
                return mean_return
    return 0.0


def main(seed: int) -> float:
    torch.manual_seed(seed)
    pool = multiprocessing.get_context("spawn").Pool(ACTORS)
    with (
        breadbox.local_server(uses_max=2**40, staleness_max=2**40, schema="ragged") as client,
        pool,  # Its exit ends the actors, while there is still a server.
        ReplayMirror(client, capacity_steps=50_000, seed=seed) as mirror,
    ):
        session_id = client.start_session().session_id
        told = [(client.address, 1000 * seed + n, 0.05 + 0.25 * n) for n in range(ACTORS)]
        pool.starmap_async(actor, told, error_callback=print)
        return learn(client, mirror, session_id)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    raise SystemExit(main(parser.parse_args().seed) < TARGET_RETURN)
