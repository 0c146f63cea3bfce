"""Weights between a policy and plain arrays, checked by name and shape."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from breadbox.model.errors import ReplayBufferError

_NAMES_SHOWN_MAX = 5


class WeightsMismatchError(ReplayBufferError, ValueError):
    """Published weights do not fit the policy; names the parameters."""

    def __init__(self, missing: list[str], unexpected: list[str], misshapen: list[str]) -> None:
        parts = [
            f"{label}: {', '.join(names[:_NAMES_SHOWN_MAX])}"
            + (
                f" and {len(names) - _NAMES_SHOWN_MAX} more"
                if len(names) > _NAMES_SHOWN_MAX
                else ""
            )
            for label, names in (
                ("missing", missing),
                ("unexpected", unexpected),
                ("of another shape", misshapen),
            )
            if names
        ]
        super().__init__("weights do not fit the policy; " + "; ".join(parts))
        self.missing = missing
        self.unexpected = unexpected
        self.misshapen = misshapen


def policy_weights(policy: nn.Module) -> dict[str, NDArray[Any]]:
    """Return a copy of the policy's parameters and buffers, by name, as arrays on the CPU."""
    return {
        name: tensor.detach().cpu().numpy().copy() for name, tensor in policy.state_dict().items()
    }


def set_policy_weights(
    policy: nn.Module, weights: Mapping[str, NDArray[Any]], *, strict: bool = True
) -> None:
    """Copy *weights* into the policy, on whatever device it is.

    Nothing is copied unless everything fits, so that a policy never runs on half a version.

    Args:
        policy: Receives the weights; its dtypes stay.
        weights: By parameter name.
        strict: False: take what fits by name and shape, and ignore the rest.

    Raises:
        WeightsMismatchError: Names or shapes differ, and *strict* is true.
    """
    own = policy.state_dict()
    misshapen = [
        f"{name} (wanted {tuple(own[name].shape)}, got {np.shape(weights[name])})"
        for name in own
        if name in weights and tuple(own[name].shape) != np.shape(weights[name])
    ]
    missing = [name for name in own if name not in weights]
    unexpected = [name for name in weights if name not in own]
    if strict and (missing or unexpected or misshapen):
        raise WeightsMismatchError(missing, unexpected, misshapen)
    with torch.no_grad():
        for name, tensor in own.items():
            if name in weights and tuple(tensor.shape) == np.shape(weights[name]):
                # Copied first: arrays that were received in place may be read-only.
                tensor.copy_(torch.from_numpy(np.array(weights[name])))
