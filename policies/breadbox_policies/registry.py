"""Policies by name."""

import importlib
from typing import cast

import gymnasium

from breadbox.model.errors import InvalidRequestError
from breadbox_policies.encoders import has_picture
from breadbox_policies.protocol import PolicyModule

AUTO = "auto"
_FACTORIES = {
    "mlp": "breadbox_policies.mlp:MlpPolicy",
    "lstm": "breadbox_policies.recurrent:LstmPolicy",
    "conv_lstm": "breadbox_policies.recurrent:ConvLstmPolicy",
    "random": "breadbox_policies.uniform:UniformPolicy",
}


def policy_names() -> list[str]:
    """Return the names that `make_policy` knows, besides `module:factory`."""
    return [AUTO, *_FACTORIES]


def make_policy(
    name: str,
    observation_space: "gymnasium.Space[object]",
    action_space: "gymnasium.Space[object]",
    **options: object,
) -> PolicyModule:
    """Build a policy with fresh weights, drawn from torch's global generator, on the CPU.

    Args:
        name: "auto" ("conv_lstm" where there are images, else "mlp"), "mlp", "lstm", "conv_lstm",
            "random", or `module:factory` of your own, called alike.
        observation_space: Of one environment, without a batch axis.
        action_space: Likewise.
        **options: Keyword arguments of the policy, such as `hidden_sizes` of "mlp".

    Raises:
        InvalidRequestError: The name, an option or a space does not fit.
    """
    if name == AUTO:
        name = "conv_lstm" if has_picture(observation_space) else "mlp"
    target = _FACTORIES.get(name, name)
    module_name, _, attribute = target.partition(":")
    if not attribute:
        known = ", ".join(policy_names())
        raise InvalidRequestError("policy", f"{name!r} is not one of {known}, nor module:factory")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise InvalidRequestError("policy", f"{name!r} cannot be loaded: {error}") from error
    try:
        return cast(PolicyModule, factory(observation_space, action_space, **options))
    except TypeError as error:
        raise InvalidRequestError("policy_options", f"do not fit {name!r}: {error}") from error
