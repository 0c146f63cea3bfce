"""DQN on CartPole: two actor processes feed a buffer, and the learner samples from its mirror.

    python examples/dqn_mirror.py

starts a server of its own, two actors and the learner, and ends once the mean return of the last 20
episodes is at the target. `--server HOST:PORT` takes a server that runs already, and then

    python examples/dqn_mirror.py --actor --server HOST:PORT

starts further actors, on this machine or on others.
"""

import argparse
import contextlib
import itertools
import subprocess
import sys
import time
from collections.abc import Iterator

import gymnasium
import numpy as np
import torch
from torch import nn

import breadbox
from breadbox.mirror import ReplayMirror

ENVIRONMENT = "CartPole-v1"
GAMMA, N_STEP, BATCH_SIZE, LEARNING_RATE = 0.99, 3, 128, 1e-3
WARM_UP_STEPS, TARGET_UPDATES, PUBLISH_UPDATES, EXPLORING_VERSIONS = 1_000, 100, 25, 40


def make_network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2)
    )


def act(address: str, seed: int) -> None:
    """Play for as long as there is a learner, with its newest weights."""
    torch.set_num_threads(1)
    env, network, rng = gymnasium.make(ENVIRONMENT), make_network(), np.random.default_rng(seed)
    with (
        breadbox.connect(address) as client,
        breadbox.StepWriter(client, steps_per_fragment=32, session_wait_s=60) as writer,
    ):
        obs, _ = env.reset(seed=seed)
        known, epsilon = None, 1.0
        for count in itertools.count():
            if count % 100 == 0 and (newer := client.load_model(known)) is not None:
                known, weights = newer
                epsilon = max(0.05, 1.0 - (known.model_version or 0) / EXPLORING_VERSIONS)
                network.load_state_dict({name: torch.tensor(w) for name, w in weights.items()})
                writer.model_version = known.model_version or 0
            with torch.no_grad():
                greedy = int(network(torch.from_numpy(obs)).argmax())
            action = int(rng.integers(2)) if rng.random() < epsilon else greedy
            next_obs, reward, terminated, truncated, _ = env.step(action)
            ends = [terminated], [truncated]
            writer.add(obs[None], np.array([action]), [float(reward)], next_obs[None], *ends)
            obs = env.reset()[0] if terminated or truncated else next_obs


def learn(client: breadbox.Client, target: float, seed: int, seconds_max: float) -> float:
    """Learn until the mean return of the last 20 episodes is at the target; returns that mean."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    session_id = client.start_session().session_id
    online, lagging = make_network(), make_network()
    lagging.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), lr=LEARNING_RATE)
    give_up_at, version, mean = time.monotonic() + seconds_max, 0, 0.0
    with ReplayMirror(client, capacity_steps=100_000, seed=seed) as mirror:
        mirror.wait_until(WARM_UP_STEPS, timeout_s=120)
        batches = mirror.batches(
            BATCH_SIZE, n_step=N_STEP, gamma=GAMMA, device="cpu", samples_per_insert=64
        )
        for update, batch in enumerate(batches, start=1):
            with torch.no_grad():
                best = online(batch.next_obs).argmax(dim=1, keepdim=True)
                value = lagging(batch.next_obs).gather(1, best)[:, 0]
                wanted = batch.reward + batch.discount * ~batch.terminated * value
            predicted = online(batch.obs).gather(1, batch.action[:, None])[:, 0]
            optimizer.zero_grad()
            nn.functional.smooth_l1_loss(predicted, wanted).backward()
            optimizer.step()
            if update % TARGET_UPDATES == 0:
                lagging.load_state_dict(online.state_dict())
            if update % PUBLISH_UPDATES == 0:
                version += 1
                weights = {name: w.numpy() for name, w in online.state_dict().items()}
                client.publish(session_id, version, weights)
                mean = mean_return(mirror)
                if version % 10 == 0:
                    print(f"update {update}: {len(mirror)} steps, mean return {mean:.1f}")
                if mean >= target or time.monotonic() > give_up_at:
                    break
        batches.close()
    client.end_session(session_id)
    return mean


def mean_return(mirror: ReplayMirror) -> float:
    """Of the last 20 episodes that ended."""
    newest = range(max(0, mirror.step_count - 10_000), mirror.step_count)
    returns = mirror.at(newest).extras["episode_return"]  # NaN where no episode ended.
    return float(np.mean(returns[~np.isnan(returns)][-20:]))


@contextlib.contextmanager
def actors(address: str, count: int) -> Iterator[None]:
    command = [sys.executable, __file__, "--actor", "--server", address]
    running = [subprocess.Popen([*command, "--seed", str(seed)]) for seed in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.terminate()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", help="HOST:PORT; none: one of its own")
    parser.add_argument("--actor", action="store_true", help="only act")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=float, default=195.0, help="mean return to end at")
    parser.add_argument("--seconds-max", type=float, default=600.0)
    options = parser.parse_args()
    if options.actor:
        act(options.server, options.seed)
        return
    connected = (
        breadbox.connect(options.server)
        if options.server
        else breadbox.local_server(preset="off-policy")
    )
    with connected as client, actors(client.address, 2):
        mean = learn(client, options.target, options.seed, options.seconds_max)
        print(f"mean return {mean:.1f}")
        sys.exit(mean < options.target)


if __name__ == "__main__":
    main()
