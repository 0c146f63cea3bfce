"""SAC in plain torch: the producers send steps, the learner samples them from its mirror.

    python examples/sac_mirror.py                    # a server, two producers and the learner

With a `breadbox serve --preset off-policy` somewhere, the same on any machines:

    python examples/sac_mirror.py learn HOST:50051
    python examples/sac_mirror.py act HOST:50051     # as often as you like
"""

import copy
import itertools
import multiprocessing
import sys

import numpy as np
import torch
from reach import Reach
from torch import nn
from torch.distributions import Normal

import breadbox
from breadbox.mirror import ReplayMirror


def layers(inputs: int, outputs: int) -> nn.Module:
    hidden = nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()
    return nn.Sequential(*hidden, nn.Linear(64, outputs))


class Actor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = layers(4, 4)

    def forward(self, obs):  # a dict of tensors [..., 2]
        both = self.body(torch.cat([obs["place"], obs["goal"]], dim=-1))
        mean, log_std = both.chunk(2, dim=-1)
        normal = Normal(mean, log_std.clamp(-5, 2).exp())
        drawn = normal.rsample()
        action = drawn.tanh()
        log_prob = normal.log_prob(drawn) - torch.log(1 - action.square() + 1e-6)
        return action, log_prob.sum(dim=-1)


class Critics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layers(6, 1), layers(6, 1)

    def forward(self, obs, action):  # [B, 2]: both values of each step
        row = torch.cat([obs["place"], obs["goal"], action], dim=-1)
        return torch.cat([self.first(row), self.second(row)], dim=-1)


def act(address: str, seed: int | None = None) -> None:
    torch.set_num_threads(1)
    env, actor, known = Reach(continuous=True), Actor(), None
    with (
        breadbox.connect(address) as client,
        breadbox.StepWriter(client, session_wait_s=600) as writer,  # waits for the learner
    ):
        obs, _ = env.reset(seed=seed)
        for step in itertools.count():
            if step % 100 == 0 and (newer := client.load_model(known)) is not None:
                known, weights = newer
                actor.load_state_dict({name: torch.tensor(w) for name, w in weights.items()})
                writer.model_version = known.model_version
            row = {key: part[None] for key, part in obs.items()}  # the axis of environments: one
            with torch.no_grad():
                action, _ = actor({key: torch.from_numpy(part) for key, part in row.items()})
            next_obs, reward, terminated, truncated, _ = env.step(action[0].numpy())
            after = {key: part[None] for key, part in next_obs.items()}
            writer.add(row, action.numpy(), [reward], after, [terminated], [truncated])
            obs = env.reset()[0] if terminated or truncated else next_obs


def learn(address: str, updates: int = 1_000) -> float:
    torch.set_num_threads(1)
    actor, critics, log_alpha = Actor(), Critics(), torch.tensor(-2.0, requires_grad=True)
    lagging = copy.deepcopy(critics)
    actor_optimizer = torch.optim.Adam([*actor.parameters(), log_alpha], lr=1e-3)
    critics_optimizer = torch.optim.Adam(critics.parameters(), lr=1e-3)
    with (
        breadbox.connect(address) as client,
        ReplayMirror(client, capacity_steps=100_000) as mirror,
    ):
        session = client.start_session().session_id
        mirror.wait_until(steps=1_000, timeout_s=120)
        batches = mirror.batches(128, gamma=0.95, device="cpu", samples_per_insert=64)
        for update, batch in zip(range(1, updates + 1), batches, strict=False):
            alpha = log_alpha.detach().exp()
            with torch.no_grad():
                action, log_prob = actor(batch.next_obs)
                value = lagging(batch.next_obs, action).amin(dim=-1) - alpha * log_prob
                wanted = batch.reward + batch.discount * ~batch.terminated * value
            error = critics(batch.obs, batch.action) - wanted[:, None]
            minimise(critics_optimizer, error.square().mean())
            action, log_prob = actor(batch.obs)
            value = critics(batch.obs, action).amin(dim=-1)
            entropy_loss = -log_alpha * (log_prob.detach() - 2).mean()  # -2: the entropy to keep
            minimise(actor_optimizer, (alpha * log_prob - value).mean() + entropy_loss)
            with torch.no_grad():
                for old, new in zip(lagging.parameters(), critics.parameters(), strict=True):
                    old.lerp_(new, 0.01)
            if update % 50 == 0:
                client.publish(session, update, actor.state_dict())
            if update % 250 == 0:
                print(
                    f"update {update}: {len(mirror)} steps, mean return {mean_return(mirror):.1f}"
                )
        mean = mean_return(mirror)
        client.end_session(session)
    return mean


def minimise(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def mean_return(mirror: ReplayMirror) -> float:
    """Returns of the last 100 episodes that ended."""
    newest = range(max(0, mirror.step_count - 5_000), mirror.step_count)
    returns = mirror.at(newest).extras["episode_return"]  # NaN where no episode ended
    return float(np.mean(returns[~np.isnan(returns)][-100:]))


def main() -> None:
    if len(sys.argv) == 3:
        {"act": act, "learn": learn}[sys.argv[1]](sys.argv[2])
        return
    pool = multiprocessing.get_context("spawn").Pool(2)
    with breadbox.local_server(preset="off-policy") as client, pool:
        pool.starmap_async(act, [(client.address, 0), (client.address, 1)], error_callback=print)
        learn(client.address)


if __name__ == "__main__":
    main()
