"""The policy that a command's options name, and weights for it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gymnasium
import safetensors
import safetensors.numpy
import torch
from numpy.typing import NDArray

from breadbox.model.errors import InvalidRequestError
from breadbox_policies import PolicyModule, make_policy, policy_names, set_policy_weights


def check_policy_name(name: str) -> None:
    """Find out whether the name can be a policy, before anything is started."""
    if name not in policy_names() and ":" not in name:
        known = ", ".join(policy_names())
        raise InvalidRequestError("policy", f"{name!r} is not one of {known}, nor module:factory")


def policy_factory(
    name: str, options: dict[str, Any], seed: int, weights: Mapping[str, NDArray[Any]] | None = None
) -> Callable[[Any, Any], PolicyModule]:
    """Return a function from observation and action space to the policy."""

    def make(
        observation_space: "gymnasium.Space[Any]", action_space: "gymnasium.Space[Any]"
    ) -> PolicyModule:
        torch.manual_seed(seed)
        policy = make_policy(name, observation_space, action_space, **options)
        if weights is not None:
            set_policy_weights(policy, weights)
        return policy

    return make


def read_weights(path: Path) -> Mapping[str, NDArray[Any]]:
    """Read the weights of a policy from a safetensors file, or from a learner's checkpoint."""
    try:
        held = safetensors.numpy.load_file(path)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise InvalidRequestError("weights_file", f"{path} cannot be read: {error}") from error
    # A checkpoint has them under "policy.", among others.
    policy = {
        name.removeprefix("policy."): array
        for name, array in held.items()
        if name.startswith("policy.")
    }
    return policy or held
