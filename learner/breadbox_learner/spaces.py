"""Read the spaces of an environment; a learner needs nothing else of it."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium

from breadbox.model.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Spaces:
    """Spaces of a policy's inputs and outputs."""

    observation: "gymnasium.Space[Any]"
    action: "gymnasium.Space[Any]"


def make_environment(env: str, options: Mapping[str, Any]) -> Any:
    """Make an environment by a Gymnasium id, or `module:factory`, and keyword arguments."""
    try:
        return _factory(env)(**options)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InvalidRequestError("env", f"{env!r} cannot be made: {reason}") from error


def spaces_of(env: str, options: Mapping[str, Any]) -> Spaces:
    """Make the environment, read its spaces and close it; see `make_environment`."""
    made = make_environment(env, options)
    try:
        return Spaces(made.observation_space, made.action_space)
    finally:
        made.close()


def _factory(env: str) -> Any:
    module, separator, attribute = env.partition(":")
    if separator:
        made_by = getattr(importlib.import_module(module), attribute, None)
        if callable(made_by):
            return made_by
    if env.startswith("ALE/"):
        gymnasium.register_envs(importlib.import_module("ale_py"))
    return lambda **options: gymnasium.make(env, disable_env_checker=True, **options)
