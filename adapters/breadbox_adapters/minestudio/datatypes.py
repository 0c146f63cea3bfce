"""MineStudio's data types and tree functions; they import torch and Ray only when needed."""

import logging
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from breadbox.payload.dtypes import is_tensor


def auto_stack(elems: Sequence[Any]) -> Any:
    """Stack values like the first one: arrays, tensors, numbers, lists of them, dicts by its keys.

    Returns texts, numpy's booleans and everything else unchanged.
    """
    first = elems[0]
    if isinstance(first, np.ndarray):
        return np.stack(elems)
    if is_tensor(first):
        return _torch().stack(list(elems))
    if isinstance(first, str):
        return elems
    if is_dict(first):
        return {key: auto_stack([each[key] for each in elems]) for key in first}
    if isinstance(first, list):
        return [auto_stack([each[place] for each in elems]) for place in range(len(first))]
    if isinstance(first, int | float | np.number):
        return np.array(elems)
    return elems


def auto_to_numpy(data: Any) -> Any:
    """Turn tensors in dicts and lists into arrays on the host; return the rest unchanged."""
    return _mapped(lambda leaf: leaf.cpu().numpy() if is_tensor(leaf) else leaf, data, dict | list)


def auto_to_torch(data: Any, device: Any) -> Any:
    """Copy arrays and tensors in dicts, lists and tuples to a device; return the rest unchanged."""

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            leaf = _torch().tensor(leaf)
        return leaf.to(device) if is_tensor(leaf) else leaf

    return _mapped(copied, data, dict | list | tuple)


def auto_getitem(data: Any, index: Any) -> Any:
    """Return item `index` of a tensor, or of each value of a dict."""
    if isinstance(data, dict):
        return {key: child[index] for key, child in data.items()}
    if is_tensor(data):
        return data[index]
    raise NotImplementedError(f"neither a dict nor a tensor: {type(data).__name__}")


def auto_slice(data: Any, start: int, end: int, dim: int, type_list: int = 0) -> Any:
    """Return [start, end) along an axis of tensors in dicts and lists; None for None.

    A list counts as the first axis, or with `type_list` 1 as axis `dim`.
    """
    if data is None:
        return None
    if is_tensor(data):
        return data.narrow(dim, start, end - start)
    if is_dict(data):
        return {key: auto_slice(data[key], start, end, dim, type_list) for key in data}
    if isinstance(data, list):
        if dim == 0 or type_list == 1:
            return data[start:end]
        return [auto_slice(child, start, end, dim - 1, type_list) for child in data]
    raise ValueError(f"cannot slice {type(data).__name__}")


def auto_cat(elems: Sequence[Any], dim: int = 0) -> Any:
    """Concatenate arrays, tensors, lists, or dicts of them; return None if the first is None."""
    first = elems[0]
    if first is None:
        return None
    if isinstance(first, np.ndarray):
        return np.concatenate(elems, axis=dim)
    if is_tensor(first):
        return _torch().cat(list(elems), dim=dim)
    if isinstance(first, list):
        if dim == 0:
            return reduce(operator.add, elems, [])
        return [auto_cat([each[place] for each in elems], dim - 1) for place in range(len(first))]
    if isinstance(first, dict):
        return {key: auto_cat([each[key] for each in elems], dim) for key in first}
    raise ValueError(f"cannot join {type(first).__name__}")


def auto_pad(arr: Any, padding_length: int) -> Any:
    """Pad the first axis: arrays with zeros, lists with their first item, dicts value by value."""
    if isinstance(arr, np.ndarray):
        widths = [(0, padding_length), *[(0, 0)] * (arr.ndim - 1)]
        return np.pad(arr, widths)
    if isinstance(arr, list):
        return arr + [arr[0] for _ in range(padding_length)]
    if isinstance(arr, dict):
        return {key: auto_pad(child, padding_length) for key, child in arr.items()}
    raise NotImplementedError(f"cannot pad {type(arr).__name__}")


def recursive_detach(data: Any) -> Any:
    """Detach tensors in lists and tuples; return the rest unchanged."""
    return _mapped(lambda leaf: leaf.detach() if is_tensor(leaf) else leaf, data, list | tuple)


def _mapped(change: Callable[[Any], Any], data: Any, containers: Any) -> Any:
    """Return data with changed leaves: all that is no container of these types."""
    if not isinstance(data, containers):
        return change(data)
    if isinstance(data, dict):
        return {key: _mapped(change, child, containers) for key, child in data.items()}
    children = [_mapped(change, child, containers) for child in data]
    return children if isinstance(data, list) else tuple(children)


def is_dict(data: Any) -> bool:
    """Return True for a dict, and for one of OmegaConf's configurations."""
    if isinstance(data, dict):
        return True
    kind = getattr(sys.modules.get("omegaconf"), "DictConfig", None)
    return kind is not None and isinstance(data, kind)


def _torch() -> Any:
    import torch

    return torch


class RayActorClass:
    """Give a class the two class methods with which Ray's users make actors of it."""

    @classmethod
    def remote(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a Ray actor, with Ray's default options; return its handle."""
        return cls.options().remote(*args, **kwargs)

    @classmethod
    def options(cls, **options: Any) -> Any:
        """Return the class as a Ray actor class with options; its `remote` makes the actor."""
        import ray

        actor_class = ray.remote(cls)
        return actor_class.options(**options) if options else actor_class


_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class FragmentIndex:
    """Worker and number of a fragment; equal to MineStudio's own index, and hashed alike."""

    worker_uuid: str
    fid_in_worker: int
    """From 0, contiguous."""

    def __eq__(self, other: object) -> bool:
        if isinstance(other, FragmentIndex) or type(other).__name__ == FragmentIndex.__name__:
            theirs = (getattr(other, "worker_uuid", None), getattr(other, "fid_in_worker", None))
            return (self.worker_uuid, self.fid_in_worker) == theirs
        return NotImplemented

    def __hash__(self) -> int:
        return hash((self.worker_uuid, self.fid_in_worker))


@dataclass(frozen=True)
class FragmentMetadata:
    """A fragment's worker, number, session and version."""

    model_version: int
    """The oldest step's."""
    session_id: str
    worker_uuid: str
    fid_in_worker: int


@dataclass
class SampleFragment:
    """T consecutive steps of one worker."""

    obs: Any
    """A dict with leaves [T, ...], or a tensor."""
    action: Any
    """A dict with leaves [T, ...], or a tensor."""
    next_done: NDArray[np.bool_]
    """bool[T]; the episode ended with the step."""
    reward: NDArray[np.float32]
    """float32[T]."""
    first: NDArray[np.bool_]
    """bool[T]; the step starts an episode."""
    in_state: Any
    """Recurrent state before step 0: arrays with a batch axis, or None."""
    worker_uuid: str
    fid_in_worker: int
    next_obs: Any
    """The observation after the last step."""
    episode_uuids: list[str]
    """One per step."""

    @property
    def index(self) -> FragmentIndex:
        """The fragment's index."""
        return FragmentIndex(self.worker_uuid, self.fid_in_worker)

    def print(self) -> None:
        """Write every field to the log, level INFO."""
        for each in fields(self):
            _log.info("%s, %s: %s", self.index, each.name, getattr(self, each.name))


class FragmentDataDict(dict[Any, Any]):
    """Values, advantages or log-probabilities, by fragment index."""

    def format_batch(self, fragments: Sequence[SampleFragment], device: Any) -> Any:
        """Stack the values of these fragments, in their order, as tensors on a device."""
        return auto_to_torch(auto_stack([self[each.index] for each in fragments]), device)


@dataclass
class StepRecord:
    """One step as a rollout worker reports it; reward and flags are those of the step before."""

    worker_uuid: str
    obs: dict[str, Any]
    state: Any
    action: dict[str, Any]
    last_reward: float
    last_terminated: bool
    last_truncated: bool
    model_version: int
    episode_uuid: str
    session_id: str
