"""MineStudio's way of loading a batch's fragments (online.utils.train.data)."""

import random
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from copy import deepcopy
from itertools import islice
from typing import Any

from breadbox.model.errors import InvalidRequestError
from breadbox.transport.run_ahead import run_ahead
from breadbox_adapters.minestudio.datatypes import FragmentIndex, SampleFragment
from breadbox_adapters.minestudio.interface import ReplayBufferInterface
from breadbox_adapters.minestudio.ray_actors import RayActorClass
from breadbox_adapters.minestudio.trees import auto_stack, auto_to_torch

Records = Sequence[tuple[FragmentIndex, str]]


class FragmentLoader(RayActorClass):
    """Loads fragments. `FragmentLoader.remote()` makes a Ray actor of it, as in MineStudio."""

    def __init__(self, replay_buffer: ReplayBufferInterface | None = None) -> None:
        """Load from an interface; None: a new one, without configuration."""
        self.replay_buffer = replay_buffer or ReplayBufferInterface()

    def load(self, record: tuple[FragmentIndex, str]) -> dict[str, Any]:
        """Load one record.

        Returns:
            `{"index": FragmentIndex, "fragment": SampleFragment}`.
        """
        index, fragment_id = record
        return {"index": index, "fragment": self.replay_buffer.load_fragment(fragment_id)}


class LoaderPool:
    """Loads fragments in threads: receiving releases the interpreter lock."""

    def __init__(self, num_readers: int, interface: ReplayBufferInterface) -> None:
        """Use `create_loader_pool` instead."""
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
    """Make a pool for `data_iter`.

    Args:
        num_readers: Loads at a time.
        num_cpus_per_reader: Ignored; threads are not scheduled on resources.
        interface: Where to load from; None: a new one, without configuration.
    """
    del num_cpus_per_reader
    return LoaderPool(num_readers, interface or ReplayBufferInterface())


def data_iter(
    loader_pool: Any,
    records: Records,
    batch_size: int,
    prefetch_batches: int,
) -> Generator[dict[str, list[Any]], None, None]:
    """Load records in a random order, and yield them in groups as they arrive.

    Every record comes exactly once; the last group may be shorter. Leaving the iteration early, or
    an error in it, leaves nothing behind that the next one could receive.

    Args:
        loader_pool: Of `create_loader_pool`; or a pool of Ray actors, `ray.util.ActorPool`, whose
            actors are `FragmentLoader`s.
        records: What `fetch_fragments` or `prepared_fragments` returned.
        batch_size: Records of a group, at least 1.
        prefetch_batches: Groups loaded ahead of the one being worked on.

    Yields:
        `{"index": [FragmentIndex, ...], "fragment": [SampleFragment, ...]}`.
    """
    if not isinstance(loader_pool, LoaderPool):
        return _from_actors(loader_pool, records, batch_size, prefetch_batches)
    return _from_threads(loader_pool, records, batch_size, prefetch_batches)


def _from_threads(
    pool: LoaderPool, records: Records, batch_size: int, prefetch_batches: int
) -> Generator[dict[str, list[Any]], None, None]:
    if batch_size < 1:
        raise InvalidRequestError("batch_size", f"must be at least 1, got {batch_size}")
    shuffled = list(records)
    random.shuffle(shuffled)
    loaded = run_ahead(
        shuffled,
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
    shuffled = list(records)
    random.shuffle(shuffled)
    waiting = iter(shuffled)
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
            # A copy, for what Ray hands out keeps the whole fragment in its object store.
            group.append(deepcopy(pool.get_next_unordered()))
            under_way += submit(1)
            if len(group) == batch_size:
                yield auto_stack(group)
                group = []
        if group:
            yield auto_stack(group)
    finally:
        for _ in range(under_way):  # Nobody else shall receive them.
            pool.get_next_unordered()


def prepare_batch(model: Any, batch_fragments: Sequence[SampleFragment]) -> dict[str, Any]:
    """What a model's forward pass takes, on its device: obs, state, action, first.

    Args:
        model: Has `device` and `merge_state(states)`.
        batch_fragments: B fragments of equal length.

    Returns:
        Trees of tensors [B, T, ...]; `state` is whatever `merge_state` makes of the B states.
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
    """One observation as tensors with leading axes of batch and time, both 1."""
    return auto_to_torch(auto_stack([auto_stack([next_obs])]), device)
