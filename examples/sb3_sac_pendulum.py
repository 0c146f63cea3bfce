"""Stable-Baselines3's SAC swings a pendulum up, on steps that live in a Breadbox server.

    python examples/sb3_sac_pendulum.py                      # with a server of its own
    python examples/sb3_sac_pendulum.py --server HOST:50051 --run pendulum-1

Kill the second one, and start it again: it finds the steps of the run, and learns from them at
once. Needs `pip install "breadbox[sb3,server]"`.
"""

import argparse
import sys
from contextlib import ExitStack

import torch
from stable_baselines3 import SAC
from stable_baselines3.common.callbacks import EvalCallback, StopTrainingOnRewardThreshold
from stable_baselines3.common.env_util import make_vec_env

import breadbox
from breadbox_adapters.sb3 import BreadboxReplayBuffer


def train(server: str, run: str | None, *, steps: int, target: float, seed: int) -> float:
    """Train until ten episodes return `target` on average, or so many steps; that average."""
    env = make_vec_env("Pendulum-v1", seed=seed)
    judge = make_vec_env("Pendulum-v1", seed=seed + 1000)
    model = SAC(
        "MlpPolicy",
        env,
        learning_rate=1e-3,
        batch_size=128,
        learning_starts=500,
        policy_kwargs={"net_arch": [64, 64]},
        replay_buffer_class=BreadboxReplayBuffer,
        replay_buffer_kwargs={"server": server, "run": run},
        seed=seed,
        device="cpu",
    )
    buffer = model.replay_buffer
    assert isinstance(buffer, BreadboxReplayBuffer)
    if found := buffer.size():
        print(f"run {buffer.run!r} goes on with {found} steps")
        model.learning_starts = 0
    stop = StopTrainingOnRewardThreshold(reward_threshold=target, verbose=1)
    evaluate = EvalCallback(
        judge,
        callback_on_new_best=stop,
        eval_freq=min(1_000, steps),
        n_eval_episodes=10,
        verbose=1,
    )
    model.learn(steps, callback=evaluate)
    print(f"{buffer.size()} steps of run {buffer.run!r} are in buffer {buffer.replay.buffer!r}")
    buffer.close()
    return float(evaluate.best_mean_reward)


def main() -> int:
    """Train; 0 if the target was reached."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", help="HOST:PORT; without it one is started, and ended")
    parser.add_argument("--run", help="name of the training, for which its steps are found again")
    parser.add_argument("--steps", type=int, default=15_000, help="at most")
    parser.add_argument("--target", type=float, default=-300.0, help="mean return, at most 0")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with ExitStack() as stack:
        server = chosen.server or stack.enter_context(breadbox.local_server()).address
        mean = train(server, chosen.run, steps=chosen.steps, target=chosen.target, seed=chosen.seed)
    print(f"mean return {mean:.0f}, wanted {chosen.target:.0f}")
    return 0 if mean >= chosen.target else 1


if __name__ == "__main__":
    sys.exit(main())
