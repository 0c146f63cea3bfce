"""Completions of a language model beside TransferQueue's memory: processor time, in turns.

Needs an environment that has this project and TransferQueue, which brings Ray: `pip install
TransferQueue==0.1.11`, then `python -m bench.completions`. Appends completions of 1,000 tokens by
groups of 8 and 512 at once, and takes 512 at once as flat columns. The time is that of this process
and of the processes that hold the data: our server, TransferQueue's controller and storage units.
Ray's own processes do not count, and TransferQueue's clearing stands apart.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import click
import numpy as np
import psutil
import ray
import torch
import transfer_queue
from tensordict import TensorDict

import breadbox
from bench.processes import breadbox_server, cpu_s, memory_directory

TOGETHER: Final = 512
GROUP: Final = 8
TOKENS: Final = 1000
_TASK: Final = "learn"

Arrays = dict[str, np.ndarray[Any, Any]]


def completions(is_ragged: bool, seed: int) -> list[Arrays]:
    """Return the columns of completions of a mean length, three tenths of it their deviation."""
    rng = np.random.default_rng(seed)
    lengths = rng.normal(TOKENS, TOKENS * 0.3 if is_ragged else 0, TOGETHER)
    return [
        {
            "ids": rng.integers(0, 50_000, length),
            "log_prob": rng.random(length, np.float32),
            "mask": np.ones(length, np.bool_),
        }
        for length in lengths.clip(8, 2 * TOKENS).astype(int).tolist()
    ]


class _Ours:
    """Breadbox on its default store, in groups of 8."""

    def __init__(self, address: str) -> None:
        self._client = breadbox.connect(address)
        self._client.start_session("s")
        self._group_count = 0

    def make(self, arrays: Sequence[Arrays]) -> list[breadbox.Sequence]:
        first, self._group_count = self._group_count, self._group_count + len(arrays) // GROUP
        return [
            breadbox.Sequence(
                group=f"g{first + number // GROUP}",
                member=number % GROUP,
                tokens=each,
                context={},
                numbers={"reward": float(number)},
                model_version_min=0,
                model_version_max=0,
            )
            for number, each in enumerate(arrays)
        ]

    def append(self, made: Sequence[breadbox.Sequence]) -> None:
        self._client.append_many(made)

    def take(self) -> int:
        with self._client.fetch(TOGETHER, 60) as lease:
            (batch,) = lease.packed()
        return len(batch.tokens["ids"])

    def clear(self) -> None:
        """Do nothing: the lease was released."""


class _Theirs:
    """TransferQueue in its default configuration."""

    def __init__(self) -> None:
        transfer_queue.init()
        self._client = transfer_queue.get_client()
        self._taken: Any = None

    def make(self, arrays: Sequence[Arrays]) -> TensorDict:
        named = {
            name: torch.nested.as_nested_tensor(
                [torch.from_numpy(each[name]) for each in arrays], layout=torch.jagged
            )
            for name in arrays[0]
        }
        named["reward"] = torch.arange(len(arrays)).float()
        return TensorDict(named, batch_size=len(arrays))

    def append(self, made: TensorDict) -> None:
        self._client.put(made, partition_id=_TASK)

    def take(self) -> int:
        self._taken = self._client.get_meta(
            data_fields=["ids", "log_prob", "mask", "reward"],
            batch_size=TOGETHER,
            partition_id=_TASK,
            mode="fetch",
            task_name=_TASK,
        )
        data = self._client.get_data(self._taken)
        flat = {
            name: column.values() if column.is_nested else column.flatten()
            for name, column in data.items()
        }
        return len(flat["ids"])

    def clear(self) -> None:
        self._client.clear_samples(self._taken)


@contextmanager
def _running() -> Iterator[dict[str, tuple[Any, Callable[[], float]]]]:
    """Start both; yield each one's face, and the seconds of the processes that hold its data."""
    with ExitStack() as stack:
        directory = stack.enter_context(memory_directory())
        server = stack.enter_context(
            breadbox_server(
                f"file://{directory}",
                *("--preset", "groups", "--fragments-per-chunk", str(GROUP)),
            )
        )
        ours = _Ours(server.address), lambda: server.cpu_s
        temporary = stack.enter_context(TemporaryDirectory(prefix="bench-", dir="/tmp"))
        ray.init(
            num_cpus=8,  # Its three actors take one each.
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=100 * 2**20,
            _temp_dir=str(Path(temporary) / "ray"),
        )
        stack.callback(ray.shutdown)
        theirs = _Theirs()
        stack.callback(transfer_queue.close)
        actors = [
            child.pid
            for child in psutil.Process().children(recursive=True)
            if child.name().startswith("ray::")
        ]
        yield {"ours": ours, "theirs": (theirs, lambda: sum(map(cpu_s, actors)))}


def _round(side: Any, held_s: Callable[[], float], is_ragged: bool, seed: int) -> dict[str, float]:
    """Return microseconds of processor time for a completion, by row."""
    arrays = completions(is_ragged, seed)
    spent: dict[str, float] = {}

    def measured(row: str, act: Callable[[], object]) -> object:
        before = time.process_time() + held_s()
        result = act()
        after = time.process_time() + held_s()
        spent[row] = spent.get(row, 0.0) + (after - before) / TOGETHER * 1e6
        return result

    for row, size in (("append groups of 8", GROUP), ("append 512 at once", TOGETHER)):
        made = [side.make(arrays[at : at + size]) for at in range(0, TOGETHER, size)]
        for each in made:
            measured(row, partial(side.append, each))
        taken = measured("take 512, flat", side.take)
        assert sum(len(each["ids"]) for each in arrays) == taken
        measured("clear", side.clear)
    return {row: us / (1 + (row[0] != "a")) for row, us in spent.items()}


@click.command()
@click.option("--rounds", default=9, show_default=True)
def main(rounds: int) -> None:
    """Print microseconds of both, and the median and range of their ratio over the rounds."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    with _running() as sides:
        for is_ragged in (False, True):
            found: list[dict[str, dict[str, float]]] = []
            for seed in range(-2, rounds):
                names = sorted(sides, reverse=bool(seed % 2))
                each = {name: _round(*sides[name], is_ragged, seed + 2) for name in names}
                if seed >= 0:  # The first are for both to become warm.
                    found.append(each)
            for row in found[0]["ours"]:
                _print("ragged" if is_ragged else "equal", row, found)


def _print(kind: str, row: str, found: Sequence[dict[str, dict[str, float]]]) -> None:
    ours, theirs = ([each[side][row] for each in found] for side in ("ours", "theirs"))
    ratios = sorted(mine / max(other, 1e-9) for mine, other in zip(ours, theirs, strict=True))
    print(
        f"{kind:7} {row:20} ours {statistics.median(ours):7.1f} us  theirs "
        f"{statistics.median(theirs):7.1f} us  ratio {statistics.median(ratios):.2f} "
        f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
    )


if __name__ == "__main__":
    main()
