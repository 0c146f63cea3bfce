"""Rows per second from recorded data to episodes and batches, beside RLlib's own pre-learner.

    python -m bench --only offline                                  ours alone
    python -m bench --only offline --rllib-python ENV/bin/python    both, in turns

RLlib lives in an environment of its own: `python3.11 -m venv ENV`, then
`ENV/bin/pip install "ray[rllib]" torch`. This file runs there as it is, and both sides make the
same rows from the same seed. They take turns, round by round, in one thread; a figure is the median
of its rounds, once by the clock and once by the CPU time that the process used.
"""

import argparse
import base64
import contextlib
import gc
import json
import os
import pickle
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any

import lz4.frame
import numpy as np

if TYPE_CHECKING:
    from bench.measure import Figure

SEED = 20240607
EPISODE_STEPS = 100
OBS_SIZE = 4
RATIO_MIN = 3.0
BATCH_STEPS = 2000
MAP_REPEATS = 10
CAPACITY_STEPS = 1_000_000
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
HOW_TO_COMPARE = (
    "RLlib is not measured: it needs an environment of its own (python3.11 -m venv ENV; "
    "ENV/bin/pip install 'ray[rllib]' torch), then --rllib-python ENV/bin/python"
)


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


def packed_step_rows(row_count: int) -> dict[str, Any]:
    """One row per step, observations packed one by one."""
    columns = step_rows(row_count)
    return columns | {name: objects(map(pack, columns[name])) for name in ("obs", "new_obs")}


def packed_episode_rows(row_count: int) -> dict[str, Any]:
    """A row per episode, its observations packed as one; RLlib cannot read packed `new_obs`."""
    columns = episode_rows(row_count, is_dense=True)
    del columns["new_obs"]
    return columns | {"obs": objects(map(pack, columns["obs"]))}


def pack(array: Any) -> str:
    """What RLlib's `pack` makes of an array."""
    return base64.b64encode(lz4.frame.compress(pickle.dumps(array, 5))).decode()


def objects(values: Any) -> Any:
    """An object array of some values."""
    values = list(values)
    array = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        array[index] = value
    return array


Run = Callable[[dict[str, Any]], object]


def our_work() -> dict[str, Callable[[], Run]]:
    """What is measured of ours: per row, what makes a fresh callable for every round."""
    from breadbox_offline.report import ValidationReport
    from breadbox_offline.rows.assembly import map_rows
    from breadbox_offline.rows.options import MappingOptions, RowGrouping
    from breadbox_offline.rows.sample_batches import map_sample_batches
    from breadbox_offline.training.prelearner import OfflinePreLearner, PreLearnerConfig

    one_step = MappingOptions(grouping=RowGrouping.ONE_STEP)
    assembled = MappingOptions()

    def make(mapping: MappingOptions) -> Run:
        config = PreLearnerConfig(
            train_batch_size=BATCH_STEPS, capacity_steps=CAPACITY_STEPS, mapping=mapping, seed=SEED
        )
        return OfflinePreLearner(config)

    def map_batches() -> Run:
        return lambda rows: map_sample_batches(rows, assembled, ValidationReport())

    def map_steps(mapping: MappingOptions) -> Run:
        return lambda rows: map_rows(rows, mapping, ValidationReport())

    return {
        "columns: map": lambda: map_steps(one_step),
        "packed columns: map": lambda: map_steps(one_step),
        "columns: whole call": lambda: make(one_step),
        "sample batches: map": map_batches,
        "dense sample batches: map": map_batches,
        "packed sample batches: map": map_batches,
        # Ours gives arrays here, too.
        "sample batches: map, RLlib's left in lists": map_batches,
        "sample batches: whole call": lambda: make(assembled),
        "columns: assemble": lambda: map_steps(assembled),
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

    def map_batches(*, to_numpy: bool = True) -> Run:
        prelearner = make(input_read_sample_batches=True)
        return lambda rows: prelearner._map_sample_batch_to_episode(rows, to_numpy=to_numpy)  # noqa: SLF001 - RLlib has no public one

    return {
        "columns: map": lambda: make()._map_to_episodes,  # noqa: SLF001 - likewise
        "packed columns: map": lambda: make()._map_to_episodes,  # noqa: SLF001 - likewise
        "columns: whole call": make,
        # To arrays, as RLlib's own call asks of its mapping, and as ours gives them.
        "sample batches: map": map_batches,
        "dense sample batches: map": map_batches,
        "packed sample batches: map": map_batches,
        "sample batches: map, RLlib's left in lists": lambda: map_batches(to_numpy=False),
        "sample batches: whole call": lambda: make(input_read_sample_batches=True),
    }


Speeds = dict[str, tuple[float, float]]
"""Rows per second of the clock, and of CPU time."""


@cache
def rows_of(kind: str, row_count: int) -> dict[str, Any]:
    """The rows of one kind of input; the same ones in every round."""
    if kind == "columns":
        return step_rows(row_count)
    if kind == "packed columns":
        return packed_step_rows(row_count)
    if kind == "packed sample batches":
        return packed_episode_rows(row_count)
    return episode_rows(row_count, is_dense=kind.startswith("dense"))


def measure(work: dict[str, Callable[[], Run]], row_count: int) -> Speeds:
    """Each, once over."""
    speeds = {}
    for name, make in work.items():
        rows = rows_of(name.partition(":")[0], row_count)
        run = make()
        gc.collect()
        started_at, cpu_started_at = time.perf_counter(), time.process_time()
        # A few milliseconds would measure what else happens on the machine.
        repeat_count = MAP_REPEATS if "sample batches: map" in name else 1
        for _ in range(repeat_count):
            run(rows)
        elapsed_s = time.perf_counter() - started_at
        cpu_s = time.process_time() - cpu_started_at
        speeds[name] = row_count * repeat_count / elapsed_s, row_count * repeat_count / cpu_s
    return speeds


def serve_rounds(side: str, row_count: int) -> None:
    """Measure one side once for every line on stdin; one line of JSON each on stdout."""
    work = our_work() if side == "ours" else rllib_work()
    print(
        "READY " + json.dumps(metadata.version("breadbox" if side == "ours" else "ray")), flush=True
    )
    measure(work, EPISODE_STEPS)
    for _ in sys.stdin:
        print("SPEEDS " + json.dumps(measure(work, row_count)), flush=True)


class Side:
    """A process that measures one side when told to, in one thread; a context manager."""

    def __init__(self, side: str, python: str, row_count: int) -> None:
        self._side, self._python = side, python
        self._process = subprocess.Popen(
            [python, __file__, "--serve-rounds", side, "--rows", str(row_count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **ONE_THREAD},
            text=True,
        )

    def __enter__(self) -> "Side":
        self.version: str = self._answer("READY ")
        return self

    def __exit__(self, *_exc: object) -> None:
        self._process.communicate()

    def measure(self) -> Speeds:
        """One round."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return {name: (wall, cpu) for name, (wall, cpu) in self._answer("SPEEDS ").items()}

    def _answer(self, kind: str) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(kind):
                return json.loads(line.removeprefix(kind))
        needs = "breadbox[learner,offline]" if self._side == "ours" else "ray[rllib] and torch"
        raise SystemExit(f"{self._python} ended; does its environment have {needs}?")


def offline_rows(*, rounds: int, row_count: int, rllib_python: str | None) -> Iterator["Figure"]:
    """Rows per second of mapping and of whole calls; with `rllib_python`, beside RLlib's."""
    ours: list[Speeds] = []
    theirs: list[Speeds] = []
    version = ""
    with contextlib.ExitStack() as stack:
        us = stack.enter_context(Side("ours", sys.executable, row_count))
        peer = None
        if rllib_python is not None:
            peer = stack.enter_context(Side("rllib", rllib_python, row_count))
            version = f"RLlib {peer.version}"
        for _ in range(rounds):
            ours.append(us.measure())
            if peer is not None:
                theirs.append(peer.measure())
    for name in ours[0]:
        for clock, unit in enumerate(("rows/s", "rows per CPU second")):
            yield _figure(
                name,
                unit,
                [each[name][clock] for each in ours],
                [each[name][clock] for each in theirs if name in each],
                version,
            )


def _figure(name: str, unit: str, ours: list[float], theirs: list[float], version: str) -> "Figure":
    from bench.measure import Figure

    return Figure(
        name=name,
        workload="offline",
        value=statistics.median(ours),
        unit=unit,
        limit=statistics.median(theirs) if theirs else None,
        limit_is=version if theirs else "",
        # Where RLlib stops short of arrays, the ratio is for information.
        reach=RATIO_MIN if theirs and "left in lists" not in name else None,
    )


def main() -> None:
    """Be one side; everything else is in `python -m bench --only offline`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve-rounds", choices=("ours", "rllib"), required=True)
    parser.add_argument("--rows", type=int, required=True)
    arguments = parser.parse_args()
    serve_rounds(arguments.serve_rounds, arguments.rows)


if __name__ == "__main__":
    main()
