"""A batch's fragments and advantages, as MineStudio's trainers take them (online.utils.train)."""

import random
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from copy import deepcopy
from itertools import islice
from typing import Any

import numpy as np

from breadbox.model.errors import InvalidRequestError
from breadbox.transport.prefetch import prefetched
from breadbox_adapters.minestudio.datatypes import (
    FragmentDataDict,
    FragmentIndex,
    RayActorClass,
    SampleFragment,
    auto_stack,
    auto_to_torch,
)
from breadbox_adapters.minestudio.interface import ReplayBufferInterface
from breadbox_adapters.minestudio.records import log_to_minestudio

Records = Sequence[tuple[FragmentIndex, str]]


class FragmentLoader(RayActorClass):
    """Loads fragments. `FragmentLoader.remote()` makes a Ray actor of it, as in MineStudio."""

    def __init__(self, replay_buffer: ReplayBufferInterface | None = None) -> None:
        """Load from an interface, or from a new one without configuration."""
        self.replay_buffer = replay_buffer or ReplayBufferInterface()

    def load(self, record: tuple[FragmentIndex, str]) -> dict[str, Any]:
        """Load a record; return `{"index": FragmentIndex, "fragment": SampleFragment}`."""
        index, fragment_id = record
        return {"index": index, "fragment": self.replay_buffer.load_fragment(fragment_id)}


class LoaderPool:
    """Load fragments in threads: receiving releases the interpreter lock."""

    def __init__(self, num_readers: int, interface: ReplayBufferInterface) -> None:
        self.num_readers = num_readers
        self._loader = FragmentLoader(interface)

    def load(self, record: tuple[FragmentIndex, str]) -> tuple[FragmentIndex, SampleFragment]:
        """Load one record."""
        loaded = self._loader.load(record)
        return loaded["index"], loaded["fragment"]


def create_loader_pool(
    num_readers: int,
    num_cpus_per_reader: float = 1,
    *,
    interface: ReplayBufferInterface | None = None,
) -> LoaderPool:
    """Make a pool for `data_iter` that does *num_readers* loads at a time."""
    del num_cpus_per_reader
    return LoaderPool(num_readers, interface or ReplayBufferInterface())


def data_iter(
    loader_pool: Any, records: Records, batch_size: int, prefetch_batches: int
) -> Generator[dict[str, list[Any]], None, None]:
    """Load records in a random order, and yield them in groups as they arrive.

    Every record comes exactly once; the last group may be shorter. Leaving the iteration early, or
    an error in it, leaves nothing for the next one to receive. The pool is that of
    `create_loader_pool`, or a `ray.util.ActorPool` of `FragmentLoader`s. `prefetch_batches` groups
    are loaded ahead of the yielded one.

    Yields:
        `{"index": [FragmentIndex, ...], "fragment": [SampleFragment, ...]}`.
    """
    load = _from_threads if isinstance(loader_pool, LoaderPool) else _from_actors
    return load(loader_pool, random.sample(records, len(records)), batch_size, prefetch_batches)


def _from_threads(
    pool: LoaderPool, records: Records, batch_size: int, prefetch_batches: int
) -> Generator[dict[str, list[Any]], None, None]:
    if batch_size < 1:
        raise InvalidRequestError("batch_size", f"must be at least 1, got {batch_size}")
    loaded = prefetched(
        records,
        pool.load,
        at_once=pool.num_readers,
        depth=(prefetch_batches + 1) * batch_size,
        in_order=False,
    )
    with closing(loaded):
        while group := list(islice(loaded, batch_size)):
            yield {
                "index": [index for index, _ in group],
                "fragment": [fragment for _, fragment in group],
            }


def _from_actors(
    pool: Any, records: Records, batch_size: int, prefetch_batches: int
) -> Generator[dict[str, list[Any]], None, None]:
    waiting = iter(records)
    load: Callable[[Any, Any], Any] = lambda actor, record: actor.load.remote(record)  # noqa: E731
    under_way = 0
    group: list[dict[str, Any]] = []

    def submit(count: int) -> int:
        submitted = list(islice(waiting, count))
        for record in submitted:
            pool.submit(load, record)
        return len(submitted)

    try:
        under_way = submit((prefetch_batches + 1) * batch_size)
        while under_way:
            under_way -= 1
            # A copy, because Ray's value keeps the whole fragment in its object store.
            group.append(deepcopy(pool.get_next_unordered()))
            under_way += submit(1)
            if len(group) == batch_size:
                yield auto_stack(group)
                group = []
        if group:
            yield auto_stack(group)
    finally:
        for _ in range(under_way):  # The next iteration must not receive them.
            pool.get_next_unordered()


def prepare_batch(model: Any, batch_fragments: Sequence[SampleFragment]) -> dict[str, Any]:
    """Return what a model's forward pass takes, on its device: obs, state, action, first.

    For B fragments of equal length these are trees of tensors [B, T, ...]; `state` is what the
    model's `merge_state` makes of the B states.
    """
    device = model.device

    def stacked(name: str) -> Any:
        leaves = [getattr(fragment, name) for fragment in batch_fragments]
        return auto_to_torch(auto_stack(leaves), device)

    states = [auto_to_torch(fragment.in_state, device) for fragment in batch_fragments]
    return {
        "obs": stacked("obs"),
        "state": model.merge_state(states),
        "action": stacked("action"),
        "first": stacked("first"),
    }


def batchify_next_obs(next_obs: Mapping[str, Any], device: Any) -> Any:
    """Return one observation as tensors, with leading axes of batch and time, both 1."""
    return auto_to_torch(auto_stack([auto_stack([next_obs])]), device)


def get_last_fragment_indexes(fragment_indexs: Sequence[FragmentIndex]) -> list[FragmentIndex]:
    """Return the indexes of fragments without their worker's next one in the list; latest first."""
    following: dict[str, int] = {}
    last = []
    for index in _latest_first(fragment_indexs):
        if following.get(index.worker_uuid) != index.fid_in_worker + 1:
            last.append(index)
        following[index.worker_uuid] = index.fid_in_worker
    return last


def _latest_first(indexes: Sequence[FragmentIndex]) -> list[FragmentIndex]:
    return sorted(indexes, key=lambda index: index.fid_in_worker)[::-1]


class GAEWorker(RayActorClass):
    """Advantages and value targets of all ranks' fragments. Not thread-safe."""

    def __init__(self, discount: float, gae_lambda: float) -> None:
        """Set the discount per step, and GAE's lambda: 0 looks one step ahead, 1 to the end."""
        self.discount = discount
        self.gae_lambda = gae_lambda
        self.td_targets = FragmentDataDict()
        self.advantages = FragmentDataDict()
        self.reset()

    def reset(self) -> None:
        """Forget what the ranks passed."""
        self.gae_infos: dict[FragmentIndex, dict[str, Any]] = {}

    def update_gae_infos(self, gae_infos: Mapping[FragmentIndex, Mapping[str, Any]]) -> None:
        """Add a rank's fragments: `reward` and `vpred`, float[T], and `next_done` of each.

        Those that `get_last_fragment_indexes` returns also need `next_vpred`, the value after them.
        """
        self.gae_infos.update({index: dict(info) for index, info in gae_infos.items()})

    def calculate_target(self) -> None:
        """Compute `advantages` and `td_targets`, float[T] by fragment, of all ranks' fragments.

        Consecutive fragments of a worker are one run, which ends with a `next_vpred`. Their mean
        length goes to MineStudio's log as `GAEWorker/average_gae_length`.

        Raises:
            KeyError: The last fragment of a run has no `next_vpred`.
            FloatingPointError: A value or reward is not a number; names the fragment.
        """
        self.td_targets, self.advantages = FragmentDataDict(), FragmentDataDict()
        following: dict[str, int] = {}
        carried: dict[str, tuple[float, float]] = {}
        run_lengths: dict[str, list[int]] = {}
        for index in _latest_first(list(self.gae_infos)):
            worker, info = index.worker_uuid, self.gae_infos[index]
            if following.get(worker) != index.fid_in_worker + 1:
                carried[worker] = (0.0, info["next_vpred"])
                run_lengths.setdefault(worker, []).append(0)
            following[worker] = index.fid_in_worker
            carried[worker] = self._reckon(index, info, *carried[worker])
            run_lengths[worker][-1] += len(info["next_done"])
        lengths = [length for of_worker in run_lengths.values() for length in of_worker]
        if lengths:
            log_to_minestudio({"GAEWorker/average_gae_length": np.mean(lengths)})

    def _reckon(
        self, index: FragmentIndex, info: Mapping[str, Any], advantage: float, next_value: float
    ) -> tuple[float, float]:
        """Compute one fragment, given what follows it; return what the one before needs."""
        values, rewards, dones = info["vpred"], info["reward"], info["next_done"]
        advantages, targets = np.zeros_like(values), np.zeros_like(values)
        for t in reversed(range(len(dones))):
            goes_on = 1.0 - dones[t]
            error = rewards[t] + self.discount * next_value * goes_on - values[t]
            advantage = error + self.discount * self.gae_lambda * goes_on * advantage
            advantages[t], targets[t] = advantage, advantage + values[t]
            next_value = values[t]
        if np.isnan(targets).any():
            raise FloatingPointError(f"a value or reward of {index}, or after it, is not a number")
        self.advantages[index], self.td_targets[index] = advantages, targets
        return advantage, next_value

    def get_target(
        self, indexs: Sequence[FragmentIndex]
    ) -> tuple[FragmentDataDict, FragmentDataDict]:
        """Return value targets and advantages of some fragments."""
        return (
            FragmentDataDict({index: self.td_targets[index] for index in indexs}),
            FragmentDataDict({index: self.advantages[index] for index in indexs}),
        )
