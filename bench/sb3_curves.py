"""Learning curves of Stable-Baselines3's DQN: its own replay buffer beside ours.

`python bench/sb3_curves.py FOLDER` trains each seed with both, one after the other in turn, so that
whatever else the machine does meets both alike; writes `sb3-curves.json` after each training, and
`sb3-curves.png` at the end. `--plot` draws what is there already.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import breadbox

SEEDS = 5
STEPS = 3_000
BIN = 200
"""Steps whose episodes are averaged."""
ENV = "CartPole-v1"


def settings(kind: str, server: str, seed: int) -> dict[str, Any]:
    """What is given to DQN: all the same, but for the buffer."""
    common: dict[str, Any] = {
        "learning_rate": 3e-3,
        "buffer_size": 50_000,
        "learning_starts": 200,
        "batch_size": 64,
        "train_freq": 8,
        "gradient_steps": 4,
        "target_update_interval": 100,
        "exploration_fraction": 0.4,
        "exploration_final_eps": 0.05,
        "policy_kwargs": {"net_arch": [64, 64]},
    }
    if kind == "own":
        return common
    from breadbox_adapters.sb3 import BreadboxReplayBuffer

    where = {"server": server, "run": f"curve-{seed}"}
    return {
        **common,
        "replay_buffer_class": BreadboxReplayBuffer,
        "replay_buffer_kwargs": where,
    }


def train(kind: str, server: str, seed: int) -> dict[str, Any]:
    """Train once; returns of the training's episodes by step, and seconds."""
    from stable_baselines3 import DQN
    from stable_baselines3.common.env_util import make_vec_env

    env = make_vec_env(ENV, seed=seed)
    model = DQN("MlpPolicy", env, seed=seed, device="cpu", **settings(kind, server, seed))
    begun_at = time.perf_counter()
    model.learn(STEPS)
    training_s = time.perf_counter() - begun_at
    (lengths,), (returns,) = (
        env.env_method(name) for name in ("get_episode_lengths", "get_episode_rewards")
    )
    if kind != "own":
        model.replay_buffer.close()
    ends = np.cumsum(lengths).tolist()
    curve = [[end, total] for end, total in zip(ends, returns, strict=True)]
    return {"kind": kind, "seed": seed, "training_s": round(training_s, 1), "episodes": curve}


def binned(run: dict[str, Any]) -> list[float]:
    """Mean return of the episodes that ended in each part of a training, or the one before."""
    means: list[float] = []
    for stop in range(BIN, STEPS + 1, BIN):
        found = [total for end, total in run["episodes"] if stop - BIN < end <= stop]
        means.append(float(np.mean(found)) if found else means[-1])
    return means


def plot(runs: list[dict[str, Any]], file: Path) -> None:
    """Each seed thin, means thick, one colour for each buffer."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    steps = range(BIN, STEPS + 1, BIN)
    for kind, colour, label in (
        ("own", "tab:blue", "Stable-Baselines3's ReplayBuffer"),
        ("ours", "tab:orange", "BreadboxReplayBuffer"),
    ):
        returns = np.array([binned(run) for run in runs if run["kind"] == kind])
        for each in returns:
            axes.plot(steps, each, color=colour, alpha=0.3, linewidth=1)
        axes.plot(steps, returns.mean(axis=0), color=colour, linewidth=2.5, label=label)
    axes.set(
        xlabel="steps", ylabel=f"return of episodes, mean of {BIN} steps", title=f"DQN on {ENV}"
    )
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    """Train, and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--plot", action="store_true", help="draw what is there already")
    arguments = parser.parse_args()
    file: Path = arguments.folder / "sb3-curves.json"
    if not arguments.plot:
        torch.set_num_threads(1)
        runs: list[dict[str, Any]] = []
        with breadbox.local_server() as client:
            for seed in range(SEEDS):
                for kind in ("own", "ours"):
                    runs.append(train(kind, client.address, seed))
                    print(
                        kind, seed, runs[-1]["training_s"], binned(runs[-1])[-5:], file=sys.stderr
                    )
                    file.write_text(json.dumps(runs) + "\n")
    plot(json.loads(file.read_text()), arguments.folder / "sb3-curves.png")


if __name__ == "__main__":
    main()
