"""Rows per second from recorded data to episodes and batches, beside RLlib's own pre-learner.

    python bench/offline.py                                  ours alone
    python bench/offline.py --rllib-python ENV/bin/python    both, in turns

RLlib lives in an environment of its own (`pip install "ray[rllib]" torch`): the same file runs
there, and both sides make the same rows from the same seed. The two take turns, round by round; a
figure is the median of its rounds.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SEED = 20240607
EPISODE_STEPS = 100
OBS_SIZE = 4
RATIO_MIN = 3.0
BATCH_STEPS = 2000
CAPACITY_STEPS = 1_000_000


def step_rows(row_count: int) -> dict[str, Any]:
    """One row per step, episodes of 100 steps."""
    rng = np.random.default_rng(SEED)
    obs = rng.normal(size=(row_count + 1, OBS_SIZE)).astype(np.float32)
    t = np.arange(row_count) % EPISODE_STEPS
    return {
        "eps_id": np.array([str(row // EPISODE_STEPS) for row in range(row_count)]),
        "t": t,
        "obs": obs[:-1],
        "new_obs": obs[1:],
        "actions": rng.integers(0, 2, row_count),
        "rewards": np.ones(row_count, dtype=np.float32),
        "terminateds": t == EPISODE_STEPS - 1,
        "truncateds": np.zeros(row_count, dtype=bool),
    }


def episode_rows(row_count: int, *, is_dense: bool = False) -> dict[str, Any]:
    """The same steps, a row per episode, as the old stack wrote them.

    Observations of a row are an object array with one array per step, or one dense array: files
    give both, and RLlib's mapping hands on the first as it is.
    """
    steps = step_rows(row_count)
    columns = {}
    for name, values in steps.items():
        rows = np.empty(row_count // EPISODE_STEPS, dtype=object)
        for index in range(len(rows)):
            part = values[index * EPISODE_STEPS : (index + 1) * EPISODE_STEPS]
            is_split = name in ("obs", "new_obs") and not is_dense
            rows[index] = objects(part) if is_split else part
        columns[name] = rows
    return columns


def objects(values: Any) -> Any:
    """An object array with one array per step."""
    array = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        array[index] = value
    return array


Run = Callable[[dict[str, Any]], object]


def our_work() -> dict[str, Callable[[], Run]]:
    """What is measured of ours: per row, what makes a fresh callable for every round."""
    from breadbox_learner.offline.assembly import map_rows
    from breadbox_learner.offline.options import MappingOptions, RowGrouping
    from breadbox_learner.offline.prelearner import OfflinePreLearner, PreLearnerConfig
    from breadbox_learner.offline.report import ValidationReport
    from breadbox_learner.offline.sample_batches import map_sample_batches

    one_step = MappingOptions(grouping=RowGrouping.ONE_STEP)
    assembled = MappingOptions()

    def make(mapping: MappingOptions) -> Run:
        config = PreLearnerConfig(
            train_batch_size=BATCH_STEPS, capacity_steps=CAPACITY_STEPS, mapping=mapping, seed=SEED
        )
        return OfflinePreLearner(config)

    def map_batches() -> Run:
        return lambda rows: map_sample_batches(rows, assembled, ValidationReport())

    return {
        "columns: map": lambda: lambda rows: map_rows(rows, one_step, ValidationReport()),
        "columns: whole call": lambda: make(one_step),
        "sample batches: map": map_batches,
        # Ours gives arrays in all three; RLlib's can do a part of that work, or none.
        "sample batches: map, obs stacked": map_batches,
        "sample batches: map, left in lists": map_batches,
        "dense sample batches: map": map_batches,
        "sample batches: whole call": lambda: make(assembled),
        "columns: assemble": lambda: lambda rows: map_rows(rows, assembled, ValidationReport()),
    }


def rllib_work() -> dict[str, Callable[[], Run]]:
    """The same of RLlib's."""
    import gymnasium
    from ray.rllib.algorithms.bc import BCConfig
    from ray.rllib.offline.offline_prelearner import OfflinePreLearner

    spaces = gymnasium.spaces.Box(-9, 9, (OBS_SIZE,)), gymnasium.spaces.Discrete(2)

    def make(**offline: bool) -> Any:
        config = BCConfig().environment(observation_space=spaces[0], action_space=spaces[1])
        config = config.training(train_batch_size_per_learner=BATCH_STEPS).offline_data(
            prelearner_buffer_kwargs={"capacity": CAPACITY_STEPS}, **offline
        )
        spec = config.get_default_rl_module_spec()
        spec.observation_space, spec.action_space = spaces
        spec.model_config = config.model_config
        return OfflinePreLearner(config=config.rl_module(rl_module_spec=spec), spaces=spaces)

    def map_batches(finish: Callable[[Any], object]) -> Run:
        prelearner = make(input_read_sample_batches=True)

        def run(rows: dict[str, Any]) -> None:
            for episode in prelearner._map_sample_batch_to_episode(rows)["episodes"]:
                finish(episode)

        return run

    return {
        "columns: map": lambda: make()._map_to_episodes,
        "columns: whole call": make,
        # What RLlib's own call asks of its mapping: every column as arrays, as ours gives them.
        "sample batches: map": lambda: map_batches(lambda episode: episode.to_numpy()),
        "sample batches: map, obs stacked": lambda: map_batches(
            lambda episode: np.stack(episode.get_observations())
        ),
        "sample batches: map, left in lists": lambda: map_batches(lambda episode: episode),
        "dense sample batches: map": lambda: map_batches(lambda episode: episode.to_numpy()),
        "sample batches: whole call": lambda: make(input_read_sample_batches=True),
    }


def measure(work: dict[str, Callable[[], Run]], row_count: int) -> dict[str, float]:
    """Rows per second of each, once over."""
    kinds = {
        "columns": step_rows(row_count),
        "sample batches": episode_rows(row_count),
        "dense sample batches": episode_rows(row_count, is_dense=True),
    }
    speeds = {}
    for name, make in work.items():
        rows = kinds[name.partition(":")[0]]
        run = make()
        gc.collect()
        started_at = time.perf_counter()
        run(rows)
        speeds[name] = row_count / (time.perf_counter() - started_at)
    return speeds


def serve_rounds(row_count: int) -> None:
    """Measure RLlib once for every line on stdin; one line of JSON each on stdout."""
    work = rllib_work()
    measure(work, EPISODE_STEPS)
    for _ in sys.stdin:
        print("SPEEDS " + json.dumps(measure(work, row_count)), flush=True)


class RLlibProcess:
    """RLlib in its own environment, measuring when told to."""

    def __init__(self, python: str, row_count: int) -> None:
        self._process = subprocess.Popen(
            [python, __file__, "--serve-rounds", "--rows", str(row_count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def measure(self) -> dict[str, float]:
        """One round."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("SPEEDS "):
                speeds: dict[str, float] = json.loads(line.removeprefix("SPEEDS "))
                return speeds
        raise SystemExit("RLlib's process ended; does its environment have ray[rllib] and torch?")

    def close(self) -> None:
        """End it."""
        self._process.communicate()


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Median by row."""
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def main() -> None:
    """Measure, print, and write bench/out/offline.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rllib-python", help="Interpreter of an environment with ray[rllib].")
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--serve-rounds", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve_rounds:
        serve_rounds(arguments.rows)
        return
    work = our_work()
    measure(work, EPISODE_STEPS)
    peer = RLlibProcess(arguments.rllib_python, arguments.rows) if arguments.rllib_python else None
    ours, theirs = [], []
    for _ in range(arguments.rounds):
        ours.append(measure(work, arguments.rows))
        if peer is not None:
            theirs.append(peer.measure())
    if peer is not None:
        peer.close()
    report(medians(ours), medians(theirs) if theirs else {})


def report(ours: dict[str, float], theirs: dict[str, float]) -> None:
    """Print the figures, and write them beside the others."""
    rows = []
    for name, speed in ours.items():
        row = {"name": name, "rows_per_s": speed}
        line = f"{name:34} {speed:12,.0f} rows/s"
        if name in theirs:
            row |= {"rllib_rows_per_s": theirs[name], "ratio": speed / theirs[name]}
            line += f"   RLlib {theirs[name]:12,.0f}   {speed / theirs[name]:6.1f} x"
        rows.append(row)
        print(line)
    out = Path(__file__).parent / "out"
    out.mkdir(exist_ok=True)
    (out / "offline.json").write_text(json.dumps({"ratio_min": RATIO_MIN, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
