"""An environment that does what a script says, and whose observations tell where they are from.

The observation at time t of an episode is {"clock": [episode, t], "level": [t / 2]}; the reward of
the step at t is t + action / 10. So a fragment can be checked without knowing how it came about.

A script has one letter per step, is read once per process whatever is rebuilt, and begins anew
when it is over:

    .  go on                 !  raise                    x  end the process with SIGKILL
    t  terminate             n  reward is NaN            h  hang
    c  truncate (cut off)    o  observation is NaN       m  take 64 MiB of memory, go on
    k  another key           w  observation too wide     r  terminate; the next reset raises
    R  terminate; the next reset hangs                   b  raise; the next build raises
"""

import os
import signal
import subprocess
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

from breadbox.model.fragment import Fragment

OBSERVATION_SPACE = spaces.Dict(
    {
        "clock": spaces.Box(0, 2**62, (2,), np.int64),
        "level": spaces.Box(-np.inf, np.inf, (1,), np.float32),
    }
)
ACTION_SPACE = spaces.Discrete(4)


class Process:
    """What outlives the environments of one process."""

    position = 0
    episode = 0
    script: ClassVar[str | None] = None
    reset_raises = False
    reset_hangs = False
    build_raises = False
    hoard: ClassVar[list[np.ndarray[Any, Any]]] = []


def hang() -> None:
    threading.Event().wait()


class ScriptedEnv(gymnasium.Env[Any, Any]):
    """See the module."""

    observation_space = OBSERVATION_SPACE
    action_space = ACTION_SPACE
    render_mode = "rgb_array"

    def __init__(self, script: str, task: str | None = None) -> None:
        if Process.build_raises:
            Process.build_raises = False
            raise RuntimeError("no build today")
        self._script = script
        self._task = task
        self._time = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if Process.reset_raises:
            Process.reset_raises = False
            raise RuntimeError("no reset today")
        if Process.reset_hangs:
            hang()
        self._time = 0
        # Unique over all processes, so that a mixed-up fragment shows.
        Process.episode += 1
        self._episode = os.getpid() * 1_000_000 + Process.episode
        return self._observe(), {} if self._task is None else {"task": self._task}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        letter = self._script[Process.position % len(self._script)]
        Process.position += 1
        reward = self._time + float(action) / 10
        self._time += 1
        obs = self._observe()
        match letter:
            case "!":
                raise RuntimeError("no step today")
            case "x":
                os.kill(os.getpid(), signal.SIGKILL)
            case "h":
                hang()
            case "n":
                reward = float("nan")
            case "o":
                obs["level"][0] = np.nan
            case "k":
                obs["surprise"] = np.zeros(1)
            case "w":
                obs["level"] = np.zeros(2, np.float32)
            case "m":
                Process.hoard.append(np.ones(2**26, np.uint8))
            case "r":
                Process.reset_raises = True
            case "R":
                Process.reset_hangs = True
            case "b":
                Process.build_raises = True
                raise RuntimeError("rebuild me")
        return obs, reward, letter in "trR", letter == "c", {"time": self._time}

    def render(self) -> np.ndarray[Any, Any]:
        """A frame that tells the time: 16 x 32 pixels, every pixel a function of it."""
        rows, columns = np.mgrid[0:16, 0:32]
        frame = np.stack([rows * 8 + self._time, columns * 5, rows + columns + 3 * self._time], -1)
        return (frame % 256).astype(np.uint8)

    def _observe(self) -> dict[str, Any]:
        return {
            "clock": np.array([self._episode, self._time], np.int64),
            "level": np.array([self._time / 2], np.float32),
        }


def make(script: str = ".........t", task: str | None = None) -> ScriptedEnv:
    """The factory that tests name."""
    return ScriptedEnv(script, task)


def make_with_helper(script: str, id_file: str) -> ScriptedEnv:
    """A factory whose environment starts a process of its own, as those with a JVM do."""
    helper = subprocess.Popen(["sleep", "600"])
    Path(id_file).write_text(str(helper.pid))
    return ScriptedEnv(script)


def make_broken() -> ScriptedEnv:
    """A factory that never succeeds."""
    raise RuntimeError("no such device")


def check_fragment(fragment: Fragment) -> None:
    """Assert everything that must hold of a fragment of this environment."""
    episodes, times = fragment.obs["clock"].T.tolist()
    assert [time / 2 for time in times] == fragment.obs["level"][:, 0].tolist()
    expected = np.array(times, np.float32) + fragment.action.astype(np.float32) / 10
    np.testing.assert_allclose(expected, fragment.reward, rtol=1e-6)
    assert [time == 0 for time in times] == fragment.first.tolist()
    finals = (
        {}
        if fragment.final_obs_step is None
        else {
            int(step): fragment.final_obs["clock"][i].tolist()
            for i, step in enumerate(fragment.final_obs_step)
        }
    )
    following = [*zip(episodes[1:], times[1:], strict=True), tuple(fragment.next_obs["clock"])]
    for step, (episode, time) in enumerate(following):
        if fragment.ended[step]:
            assert [episodes[step], times[step] + 1] == finals[step]
            assert time == 0
            assert episode != episodes[step]
        else:
            assert (episodes[step], times[step] + 1) == (episode, time)
            assert step not in finals
    same_episode = np.diff(fragment.episode_id) == 0
    assert (~fragment.ended[:-1]).tolist() == same_episode.tolist()


def check_sequence(fragments: list[Fragment]) -> None:
    """Assert what must hold between the fragments of one worker, in order."""
    assert list(range(len(fragments))) == [fragment.fragment_index for fragment in fragments]
    for before, after in pairwise(fragments):
        if not after.discontinuity:
            assert before.next_obs["clock"].tolist() == after.obs["clock"][0].tolist()
            assert bool(before.ended[-1]) == bool(after.first[0])


HOSTILE_LETTERS = "!xnohkwmrRb"


class HostileEnv(ScriptedEnv):
    """Follows a script of every failure there is, drawn from the first seed of its process."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        if Process.script is None:
            rng = np.random.default_rng(seed)
            letters = list("." * 40 + "tc" + HOSTILE_LETTERS)
            # What ends the process comes seldom, so that the rest has time to happen.
            seldom = {"x": 0.001, "h": 0.001, "R": 0.001, "b": 0.001, "m": 0.03}
            weights = [0.9 / 40] * 40 + [0.03] * 2
            weights += [seldom.get(letter, 0.005) for letter in HOSTILE_LETTERS]
            chosen = rng.choice(letters, 5000, p=np.array(weights) / sum(weights))
            Process.script = "".join(chosen)
        self._script = Process.script
        return super().reset(seed=seed, options=options)


def make_hostile() -> HostileEnv:
    """A factory without a script: the seed decides."""
    return HostileEnv(".")
