"""Play episodes greedily, in a process: `python -m breadbox_learner.playing`.

Messages:

    learner to process   8 bytes of length, little-endian, then so many bytes: first the JSON of an
                         `EvaluationTask`, then weights in safetensors format, once per evaluation
    process to learner   one line of JSON per evaluation: {"returns": [...], "lengths": [...],
                         "cut_off": number}, or {"error": "..."}, after which the process ends

The process ends when its standard input does, even within an episode.
"""

import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any

import gymnasium
import numpy as np
import safetensors.torch
import torch
from gymnasium import spaces

from breadbox.model.fragment import Tree
from breadbox.model.trees import in_order
from breadbox.writing.clipping import clipped
from breadbox_learner.spaces import make_environment
from breadbox_policies import PolicyModule, make_policy

_LENGTH_BYTES = 8
_SEEDS_OF = 0x6272656164626F78
"""Makes evaluation seeds differ from training seeds, whatever `--seed` is."""


@dataclass(frozen=True, slots=True)
class EvaluationTask:
    """The episodes to play; every part is plain JSON."""

    env: str
    env_options: Mapping[str, Any]
    policy: str
    policy_options: Mapping[str, Any]
    episodes: int
    steps_max: int


@dataclass(frozen=True, slots=True)
class Played:
    """One episode."""

    episode_return: float
    steps: int
    is_cut_off: bool = False
    """True if it was cut off, so that the return is partial."""


def episode_seed(number: int) -> int:
    """Return the seed of episode *number* of every evaluation, from 0 to 2**31 - 1."""
    return int(np.random.SeedSequence((_SEEDS_OF, number)).generate_state(1)[0] >> 1)


@torch.inference_mode()
def play(
    env: "gymnasium.Env[Any, Any]", policy: PolicyModule, *, seed: int, steps_max: int
) -> Played:
    """Play one episode with the policy's likeliest actions, at most `steps_max` steps."""
    obs, _ = env.reset(seed=seed)
    state = policy.initial_state(1)
    total, steps, is_over = 0.0, 0, False
    while not is_over and steps < steps_max:
        first = torch.tensor([steps == 0])
        seen = _map_space(_as_batch, env.observation_space, obs)
        acted = policy.act(seen, state, first, greedy=True)
        state = acted.state
        taken = _map_space(_from_batch, env.action_space, acted.action)
        action = clipped(env.action_space, taken)
        obs, reward, terminated, truncated, _ = env.step(action)
        total += float(reward)
        steps += 1
        is_over = bool(terminated or truncated)
    return Played(total, steps, not is_over)


def _map_space(function: Callable[[Any, Any], Any], space: Any, tree: Tree) -> Tree:
    if isinstance(space, spaces.Dict):
        return {key: _map_space(function, part, tree[key]) for key, part in in_order(space.spaces)}
    if isinstance(space, spaces.Tuple):
        pairs = zip(space.spaces, tree, strict=True)
        return tuple(_map_space(function, part, child) for part, child in pairs)
    return function(space, tree)


def _as_batch(space: Any, leaf: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(leaf, space.dtype)[None])


def _from_batch(space: Any, leaf: torch.Tensor) -> Any:
    return leaf.cpu().numpy().astype(space.dtype)[0]


def write_message(file: IO[bytes], data: bytes) -> None:
    """Send one message to the process."""
    file.write(len(data).to_bytes(_LENGTH_BYTES, "little"))
    file.write(data)
    file.flush()


def _read_message(file: IO[bytes]) -> bytes | None:
    head = file.read(_LENGTH_BYTES)
    data = file.read(int.from_bytes(head, "little"))
    whole = len(head) == _LENGTH_BYTES and len(data) == int.from_bytes(head, "little")
    return data if whole else None


def _receive(messages: "queue.SimpleQueue[bytes]") -> None:
    while (data := _read_message(sys.stdin.buffer)) is not None:
        messages.put(data)
    os._exit(0)  # The learner is gone or has finished; an episode may last for hours.


def _answer(task: EvaluationTask, data: bytes) -> dict[str, Any]:
    env = make_environment(task.env, task.env_options)
    try:
        policy = make_policy(
            task.policy, env.observation_space, env.action_space, **task.policy_options
        )
        policy.load_state_dict(safetensors.torch.load(data))
        policy.eval()
        played = [
            play(env, policy, seed=episode_seed(number), steps_max=task.steps_max)
            for number in range(task.episodes)
        ]
    finally:
        env.close()
    return {
        "returns": [each.episode_return for each in played],
        "lengths": [each.steps for each in played],
        "cut_off": sum(each.is_cut_off for each in played),
    }


def main() -> int:
    """Answer until the input ends; return the exit status."""
    # The learner decides when to end; Ctrl-C in its terminal must not end this process first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Environments print to the log, not between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(1)
    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(messages,), name="receiver", daemon=True).start()
    task = EvaluationTask(**json.loads(messages.get()))
    while True:
        try:
            answer = _answer(task, messages.get())
        except Exception as error:  # noqa: BLE001  Environments may raise anything.
            answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
        answers.write(json.dumps(answer) + "\n")
        if "error" in answer:
            return 1


if __name__ == "__main__":
    sys.exit(main())
