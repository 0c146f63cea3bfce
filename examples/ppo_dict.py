"""PPO in plain torch, for an environment whose observations are dicts.

    python examples/ppo_dict.py                      # a server, two producers and the learner

With a `breadbox serve` somewhere, the same on any machines:

    python examples/ppo_dict.py learn HOST:50051
    python examples/ppo_dict.py act HOST:50051       # as often as you like
"""

import itertools
import multiprocessing
import sys
from collections import deque

import torch
from reach import Reach
from torch import nn
from torch.distributions import Categorical

import breadbox


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.actor, self.critic = nn.Linear(64, 4), nn.Linear(64, 1)

    def forward(self, obs):  # a dict of tensors [..., 2]
        hidden = self.body(torch.cat([obs["place"], obs["goal"]], dim=-1))
        return Categorical(logits=self.actor(hidden)), self.critic(hidden)[..., 0]


def act(address: str, seed: int | None = None) -> None:
    torch.set_num_threads(1)
    env, policy, known = Reach(), Policy(), None
    with (
        breadbox.connect(address) as client,
        breadbox.StepWriter(client, session_wait_s=600) as writer,  # waits for the learner
    ):
        obs, _ = env.reset(seed=seed)
        for step in itertools.count():
            if step % 64 == 0 and (newer := client.load_model(known)) is not None:
                known, weights = newer
                policy.load_state_dict({name: torch.tensor(w) for name, w in weights.items()})
                writer.model_version = known.model_version
            row = {key: part[None] for key, part in obs.items()}  # the axis of environments: one
            with torch.no_grad():
                choice, _ = policy({key: torch.from_numpy(part) for key, part in row.items()})
                action = choice.sample()
            next_obs, reward, terminated, truncated, _ = env.step(int(action))
            after = {key: part[None] for key, part in next_obs.items()}
            ends, log_prob = ([terminated], [truncated]), choice.log_prob(action).numpy()
            writer.add(row, action.numpy(), [reward], after, *ends, log_prob=log_prob)
            obs = env.reset()[0] if terminated or truncated else next_obs


def advantages_of(policy, batch, discount=0.9, gae_lambda=0.95):
    """Advantages and targets of the value [B, T]; episodes end with their true last observation."""
    value = policy(batch.obs)[1]
    after = torch.cat([value[:, 1:], policy(batch.next_obs)[1][:, None]], dim=1)
    if batch.final_obs is not None:
        after[batch.final_obs_row, batch.final_obs_step] = policy(batch.final_obs)[1]
    error = batch.reward + discount * ~batch.terminated * after - value
    advantage, following = torch.zeros_like(error), torch.zeros(len(batch))
    for step in reversed(range(error.shape[1])):
        following = error[:, step] + discount * gae_lambda * ~batch.ended[:, step] * following
        advantage[:, step] = following
    return advantage, advantage + value


def learn(address: str, policy: nn.Module | None = None, target: float = -5.0) -> float:
    torch.set_num_threads(1)
    policy, returns = policy or Policy(), deque(maxlen=100)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    with breadbox.connect(address) as client:
        session = client.start_session().session_id
        for version in range(1, 301):
            client.publish(session, version, policy.state_dict())
            with client.fetch(fragment_count=16, max_wait_s=60) as lease:
                (batch,) = lease.batches(batch_size=16, device="cpu")
                with torch.no_grad():
                    advantage, wanted = advantages_of(policy, batch)
                    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                for _ in range(8):
                    choice, value = policy(batch.obs)
                    ratio = (choice.log_prob(batch.action) - batch.log_prob).exp()
                    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                    loss = 0.5 * (wanted - value).square().mean() - gain.mean()
                    optimizer.zero_grad()
                    (loss - 0.01 * choice.entropy().mean()).backward()
                    optimizer.step()
            ended = batch.extras["episode_return"]  # NaN where no episode ended
            returns.extend(ended[~ended.isnan()].tolist())
            mean = sum(returns) / max(1, len(returns))
            is_reached = len(returns) == 100 and mean > target
            if version % 10 == 0 or is_reached:
                print(f"version {version}: mean return {mean:.1f}", flush=True)
            if is_reached:
                break
        client.end_session(session)
    return mean


def main(act, learn) -> None:
    if len(sys.argv) == 3:
        {"act": act, "learn": learn}[sys.argv[1]](sys.argv[2])
        return
    with breadbox.local_server() as client, multiprocessing.get_context("spawn").Pool(2) as pool:
        pool.starmap_async(act, [(client.address, 0), (client.address, 1)], error_callback=print)
        learn(client.address)


if __name__ == "__main__":
    main(act, learn)
