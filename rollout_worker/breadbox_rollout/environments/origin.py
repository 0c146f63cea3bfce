"""Describe what steps depend on beside their arrays, alike in every process that makes it alike.

The server compares the descriptions of a session's workers: see `Client.declare_origin`.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from enum import Enum
from functools import partial
from inspect import signature
from typing import Any, Final

import numpy as np
from gymnasium import spaces

from breadbox.model.errors import InvalidRequestError
from breadbox_rollout.environments.space_codec import Space, encode_space
from breadbox_rollout.environments.vector import is_vector

_TEXT_LENGTH_MAX: Final = 400
"""Longer descriptions are cut, and have a digest of the whole instead."""
_DEPTH_MAX: Final = 64
_HARMLESS: Final = frozenset({
    "DictInfoToList", "HumanRendering", "OrderEnforcing", "PassiveEnvChecker", "RecordEpisodeStatistics",
    "RecordVideo", "RenderCollection",
})  # fmt: skip
"""Wrappers that change neither observations nor rewards nor ends of episodes."""
_OF_ONE_WORKER: Final = frozenset({"device", "render_mode", "seed"})
"""Arguments in which workers may differ."""


def wrappers_of(env: Any) -> dict[str, str]:
    """Return the wrappers of an environment, outermost first, with the arguments they record.

    Those around a vector environment are apart from those within, which not all show.
    """
    inner, outside = _unwrapped(env)
    if not is_vector(inner):
        return {"environment wrappers": outside, "vector wrappers": "none"}
    held = getattr(inner, "envs", None)
    within = {"environment wrappers": _unwrapped(held[0])[1]} if held else {}
    return {**within, "vector wrappers": outside}


def _unwrapped(env: Any) -> tuple[Any, str]:
    """Return the environment within all wrappers, and their description."""
    found: list[str] = []
    for _ in range(_DEPTH_MAX):
        within = vars(env).get("env") if hasattr(env, "__dict__") else None
        if not hasattr(within, "step"):
            break
        if type(env).__name__ not in _HARMLESS:
            found.append(_called(type(env), vars(env).get("_saved_kwargs", {}), {}))
        env = within
    return env, _bounded(", ".join(found) or "none")


def spaces_text(observation: Space, action: Space) -> dict[str, str]:
    """Return the description of both spaces, with their bounds."""
    pair = {"observation space": observation, "action space": action}
    return {name: _bounded(_text(space)) for name, space in pair.items()}


def policy_text(policy: object, options: Mapping[str, Any]) -> dict[str, str]:
    """Return the description of a policy that was made with some options."""
    parameters = signature(type(policy)).parameters
    defaults = {name: each.default for name, each in parameters.items()}
    return {"policy": _bounded(_called(type(policy), options, defaults))}


def _called(kind: type, arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """Return "Kind(name=value)", without arguments that are the defaults."""
    texts = {name: _text(value) for name, value in arguments.items() if name not in _OF_ONE_WORKER}
    said = [
        f"{name}={text}"
        for name, text in sorted(texts.items())
        if name not in defaults or text != _text(defaults[name])
    ]
    return f"{_name(kind)}({', '.join(said)})"


def _name(kind: Any) -> str:
    # Gymnasium has moved its classes from module to module.
    package = str(kind.__module__).partition(".")[0]
    return kind.__qualname__ if package == "gymnasium" else f"{kind.__module__}.{kind.__qualname__}"


def _text(value: Any) -> str:
    try:
        return json.dumps(_plain(value), sort_keys=True)
    except Exception:  # noqa: BLE001 - an object's own code may raise anything
        return _name(type(value))


def _plain(value: Any) -> Any:
    """Return a value as plain data that says nothing of this process: no address, no order."""
    match value:
        case Enum():
            return str(value)
        case None | bool() | int() | float() | str():
            return value
        case spaces.Dict():
            return {"kind": "dict", "parts": {key: _plain(part) for key, part in value.items()}}
        case spaces.Tuple():
            return {"kind": "tuple", "parts": [_plain(part) for part in value.spaces]}
        case spaces.Space():
            try:
                return encode_space(value)
            except InvalidRequestError:
                return repr(value)
        case Mapping():
            return {str(key): _plain(each) for key, each in value.items()}
        case list() | tuple():
            return [_plain(each) for each in value]
        case set() | frozenset():
            return sorted(_text(each) for each in value)
        case np.ndarray():
            return [str(value.dtype), value.shape, hashlib.blake2b(value.tobytes()).hexdigest()]
        case np.generic():
            return value.item()
        case partial():
            return [_plain(each) for each in (value.func, value.args, value.keywords)]
    if hasattr(value, "__qualname__"):
        return _name(value)
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def _bounded(text: str) -> str:
    if len(text) <= _TEXT_LENGTH_MAX:
        return text
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return f"{text[:_TEXT_LENGTH_MAX]}... (digest {digest})"
