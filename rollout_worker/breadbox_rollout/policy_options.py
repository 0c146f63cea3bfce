"""What `rollout` and `generate` are told of environments and policy."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import gymnasium
import safetensors
import safetensors.numpy
import torch
from numpy.typing import NDArray

from breadbox.cli.logs import log_options
from breadbox.cli.settings import JsonObject, SizeBytes
from breadbox.errors import InvalidRequestError
from breadbox_policies import PolicyModule, make_policy, policy_names, set_policy_weights
from breadbox_rollout.command import option
from breadbox_rollout.settings import random_seed


def environment_options(command: Callable[..., None]) -> Callable[..., None]:
    """Declare what is said of environments and policy, for both commands."""
    for decorate in reversed(
        (
            option("--env", required=True, help="Gymnasium id, module:id, or module:factory."),
            option("--env-options", type=JsonObject(), default="{}", help="Its arguments."),
            option("--policy", default="auto",
                   help=f"{', '.join(policy_names())}, or module:factory. auto: conv_lstm for "
                        "images, else mlp."),
            option("--policy-options", type=JsonObject(), default="{}", help="Its arguments."),
            option("--device", default="cpu", help="Where the policy runs: cpu, cuda, cuda:1."),
            option("--bfloat16/--no-bfloat16", default=False, help="Compute in bfloat16."),
            option("--seed", type=int, default=random_seed,
                   help="Of environments, actions, fresh weights. A worker mixes its name in. "
                        "Default: a random one, which is logged."),
            option("--build-s", type=click.FloatRange(min=0.1), default=300.0,
                   help="Time limit of starting an environment."),
            option("--reset-s", type=click.FloatRange(min=0.1), default=120.0,
                   help="Time limit of one reset."),
            option("--step-s", type=click.FloatRange(min=0.1), default=30.0,
                   help="Time limit of one step."),
            option("--memory-limit", type=SizeBytes(), default="0",
                   help="Resident size at which an environment process is replaced; 0: none."),
            option("--torch-threads", type=click.IntRange(min=1), default=1,
                   help="Threads of the policy on the CPU."),
            log_options,
        )
    ):  # fmt: skip
        command = decorate(command)
    return command


def check_policy_name(name: str) -> None:
    """Find out whether the name can be a policy, before anything is started.

    Raises:
        InvalidRequestError: It is none of the known ones, and not of the form module:factory.
    """
    if name not in policy_names() and ":" not in name:
        known = ", ".join(policy_names())
        raise InvalidRequestError("policy", f"{name!r} is not one of {known}, nor module:factory")


def policy_factory(
    name: str, options: dict[str, Any], seed: int, weights: Mapping[str, NDArray[Any]] | None = None
) -> Callable[[Any, Any], PolicyModule]:
    """Return a function from observation and action space to the policy.

    Args:
        name: See `breadbox_policies.make_policy`.
        options: Likewise.
        seed: Of fresh weights.
        weights: Are put in; None: fresh ones stay.
    """

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
    """Read the weights of a policy from a safetensors file, or from a learner's checkpoint.

    Raises:
        InvalidRequestError: It cannot be read.
    """
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
