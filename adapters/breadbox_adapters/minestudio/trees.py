"""MineStudio's functions on trees of arrays and tensors (online.utils).

Each decides by the kind of what it is given, in the order in which MineStudio does. torch is
imported only where there is something to make a tensor of.
"""

import operator
import sys
from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np

from breadbox.payload.dtypes import is_tensor


def auto_stack(elems: Sequence[Any]) -> Any:
    """Stack alike values by the kind of the first: arrays, tensors, numbers, trees.

    Lists are stacked position by position, as many as the first has; dicts key by key, those of
    the first. Texts, numpy's booleans, and anything else come back as they were given.

    Raises:
        IndexError: There are no values, or a list is shorter than the first.
        KeyError: A dict lacks a key of the first.
        ValueError: Arrays differ in shape.
    """
    first = elems[0]
    if isinstance(first, np.ndarray):
        return np.stack(elems)
    if is_tensor(first):
        return _torch().stack(list(elems))
    if isinstance(first, str):
        return elems
    if _is_dict(first):
        return {key: auto_stack([each[key] for each in elems]) for key in first}
    if isinstance(first, list):
        return [auto_stack([each[place] for each in elems]) for place in range(len(first))]
    if isinstance(first, int | float | np.number):
        return np.array(elems)
    return elems


def auto_to_numpy(data: Any) -> Any:
    """Tensors of dicts and lists as arrays, on the host; everything else stays as it is."""
    if is_tensor(data):
        return data.cpu().numpy()
    if isinstance(data, dict):
        return {key: auto_to_numpy(child) for key, child in data.items()}
    if isinstance(data, list):
        return [auto_to_numpy(child) for child in data]
    return data


def auto_to_torch(data: Any, device: Any) -> Any:
    """Arrays and tensors of dicts, lists and tuples as tensors on a device; the rest stays.

    An array is copied: what is done to the tensor does not show in it.

    Raises:
        TypeError: torch has no such dtype, as of text.
    """
    if isinstance(data, np.ndarray):
        return _torch().tensor(data).to(device)
    if is_tensor(data):
        return data.to(device)
    if isinstance(data, dict):
        return {key: auto_to_torch(child, device) for key, child in data.items()}
    if isinstance(data, list):
        return [auto_to_torch(child, device) for child in data]
    if isinstance(data, tuple):
        return tuple(auto_to_torch(child, device) for child in data)
    return data


def auto_getitem(data: Any, index: Any) -> Any:
    """Item `index` of a tensor, or of each value of a dict.

    Raises:
        NotImplementedError: It is neither.
    """
    if isinstance(data, dict):
        return {key: child[index] for key, child in data.items()}
    if is_tensor(data):
        return data[index]
    raise NotImplementedError(f"neither a dict nor a tensor: {type(data).__name__}")


def auto_slice(data: Any, start: int, end: int, dim: int, type_list: int = 0) -> Any:
    """The part [start, end) along an axis of tensors in dicts and lists; None of None.

    A list is an axis itself: the first one, or with `type_list` 1 the one that is meant.

    Raises:
        ValueError: Something in it is of another kind.
    """
    if data is None:
        return None
    if is_tensor(data):
        return data.narrow(dim, start, end - start)
    if _is_dict(data):
        return {key: auto_slice(data[key], start, end, dim, type_list) for key in data}
    if isinstance(data, list):
        if dim == 0 or type_list == 1:
            return data[start:end]
        return [auto_slice(child, start, end, dim - 1, type_list) for child in data]
    raise ValueError(f"cannot slice {type(data).__name__}")


def auto_cat(elems: Sequence[Any], dim: int = 0) -> Any:
    """Join arrays, tensors, lists, and dicts of them, along an axis; None if the first is None.

    A list is the first axis itself.

    Raises:
        ValueError: The first is of another kind.
    """
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
    """Lengthen the first axis: arrays by zeros, lists by their first item, dicts value by value.

    Raises:
        NotImplementedError: It is of another kind.
    """
    if isinstance(arr, np.ndarray):
        widths = [(0, padding_length), *[(0, 0)] * (arr.ndim - 1)]
        return np.pad(arr, widths)
    if isinstance(arr, list):
        return arr + [arr[0] for _ in range(padding_length)]
    if isinstance(arr, dict):
        return {key: auto_pad(child, padding_length) for key, child in arr.items()}
    raise NotImplementedError(f"cannot pad {type(arr).__name__}")


def recursive_detach(data: Any) -> Any:
    """Tensors of lists and tuples without their history of gradients; the rest stays."""
    if is_tensor(data):
        return data.detach()
    if isinstance(data, list):
        return [recursive_detach(child) for child in data]
    if isinstance(data, tuple):
        return tuple(recursive_detach(child) for child in data)
    return data


def _is_dict(data: Any) -> bool:
    """Whether it is a dict, or one of OmegaConf's configurations."""
    if isinstance(data, dict):
        return True
    kind = getattr(sys.modules.get("omegaconf"), "DictConfig", None)
    return kind is not None and isinstance(data, kind)


def _torch() -> Any:
    import torch

    return torch
