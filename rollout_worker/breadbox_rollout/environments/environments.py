"""Make environments by name: any Gymnasium id, or `module:factory` of your own."""

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import gymnasium
from gymnasium.envs.registration import load_env_creator

from breadbox.model.errors import InvalidRequestError
from breadbox.shared.extras import how_to_install

Environment = gymnasium.Env[Any, Any]

_CHEAP_MODULES = ("gymnasium.envs.classic_control", "gymnasium.envs.toy_text")
"""Modules of environments with steps that take less time than waking another process."""
_ENVS_PER_CHEAP_PROCESS_MAX = 16
_DRAWN_BY_PYGAME = (*_CHEAP_MODULES, "gymnasium.envs.box2d")
"""Modules of environments that need pygame, but only to draw frames."""
_OPTIONS_OF_MAKE = frozenset({"max_episode_steps", "disable_env_checker", "render_mode"})
"""Options that `gymnasium.make` takes itself, or checks with the environment before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSpec:
    """How to make one environment; every part is plain JSON."""

    name: str
    """Gymnasium id, `module:id` of a module that registers it, or `module:factory`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory, or of `gymnasium.make`."""
    vectorize: str | None = None
    """Mode of `gymnasium.make_vec` ("sync", "async", "vector_entry_point"), or None."""


def _factory(name: str) -> Callable[..., Environment] | None:
    """Return the callable of `module:factory`, or None for a Gymnasium id or `module:id`."""
    module_name, _, attribute = name.partition(":")
    if not attribute:
        return None
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise InvalidRequestError("env", f"{name!r} cannot be loaded: {error}") from error
    factory = getattr(module, attribute, None)
    return factory if callable(factory) else None


def _unknown(name: str, error: Exception) -> str:
    module, _, attribute = name.partition(":")
    if attribute:
        return (
            f"{name!r}: module {module!r} has no {attribute!r}, and registers no such environment"
        )
    return f"{name!r} is not an environment: {error}"


def check_environment(spec: EnvSpec) -> None:
    """Check, without making it, that the environment exists and takes the options."""
    factory = _factory(spec.name)
    if factory is not None:
        if spec.vectorize is not None:
            raise InvalidRequestError(
                "vectorize",
                "is for Gymnasium ids; a factory makes vector environments of its own where it has "
                "an argument num_envs",
            )
        # `make_environment` adds these arguments itself.
        given = {"num_envs", "seed"} & _parameters(spec) if is_vectorized(spec) else set()
        _check_options(spec, factory, {**dict.fromkeys(given), **spec.options})
        return
    _register_atari(spec.name)
    try:
        registered = gymnasium.spec(spec.name)
    except (gymnasium.error.Error, ImportError) as error:
        raise InvalidRequestError("env", _unknown(spec.name, error)) from error
    if not spec.options or spec.vectorize is not None:
        return
    own = {key: value for key, value in spec.options.items() if key not in _OPTIONS_OF_MAKE}
    entry_point = registered.entry_point
    try:
        creator = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
    except (ImportError, AttributeError) as error:
        raise InvalidRequestError("env", f"{spec.name!r} cannot be loaded: {error}") from error
    if creator is not None:
        _check_options(spec, creator, {**registered.kwargs, **own})


def _check_options(
    spec: EnvSpec, creator: Callable[..., object], options: Mapping[str, Any]
) -> None:
    try:
        signature = inspect.signature(creator)
    except (TypeError, ValueError):
        return  # Written in C, without a signature.
    try:
        signature.bind(**options)
    except TypeError as error:
        raise InvalidRequestError("env_options", f"do not fit {spec.name!r}: {error}") from error


def is_installed(package: str) -> bool:
    """Return True if a package can be imported."""
    return importlib.util.find_spec(package) is not None


def check_frames(spec: EnvSpec) -> None:
    """Check, without making it, that the package that draws the environment's frames exists."""
    if with_frames(spec).options.get("render_mode") != "rgb_array" or _factory(spec.name):
        return
    if _is_in(spec.name, _DRAWN_BY_PYGAME) and not is_installed("pygame"):
        raise InvalidRequestError(
            "env",
            f"{spec.name!r} draws its frames with pygame, which is not installed: "
            f"{how_to_install('classic-control')}, or record without frames",
        )


def with_frames(spec: EnvSpec) -> EnvSpec:
    """Return the spec with rendered frames, unless its options say otherwise."""
    if _factory(spec.name) is not None:
        return spec
    return replace(spec, options={"render_mode": "rgb_array", **spec.options})


def is_vectorized(spec: EnvSpec) -> bool:
    """Return True for a vector environment: by `vectorize`, or a factory with `num_envs`."""
    return spec.vectorize is not None or "num_envs" in _parameters(spec)


def takes_seed(spec: EnvSpec) -> bool:
    """Return True if a factory of vector environments takes the seed."""
    return spec.vectorize is None and {"num_envs", "seed"} <= _parameters(spec)


def _parameters(spec: EnvSpec) -> set[str]:
    factory = _factory(spec.name)
    if factory is None:
        return set()
    try:
        return set(inspect.signature(factory).parameters)
    except (TypeError, ValueError):
        return set()


def make_environment(spec: EnvSpec, env_count: int = 1, seed: int = 0) -> Any:
    """Make the environment; blocks while it is made, and raises its errors."""
    factory = _factory(spec.name)
    if factory is not None:
        given: dict[str, Any] = {}
        if is_vectorized(spec):
            given["num_envs"] = env_count
        if takes_seed(spec):
            given["seed"] = seed % 2**31
        return factory(**{**given, **spec.options})
    _register_atari(spec.name)
    if spec.vectorize is not None:
        return gymnasium.make_vec(
            spec.name, num_envs=env_count, vectorization_mode=spec.vectorize, **spec.options
        )
    # The worker counts and reports what the checker would warn of.
    return gymnasium.make(spec.name, disable_env_checker=True, **spec.options)


def envs_per_process(spec: EnvSpec, env_count: int) -> int:
    """Return how many environments share a process: all of a vector one, some cheap ones, or 1."""
    if is_vectorized(spec):
        return env_count
    if _factory(spec.name) is not None:
        return 1
    return _ENVS_PER_CHEAP_PROCESS_MAX if _is_in(spec.name, _CHEAP_MODULES) else 1


def _is_in(name: str, modules: tuple[str, ...]) -> bool:
    _register_atari(name)
    entry_point = gymnasium.spec(name).entry_point
    return isinstance(entry_point, str) and entry_point.startswith(modules)


def _register_atari(name: str) -> None:
    if not name.startswith("ALE/"):
        return
    try:
        gymnasium.register_envs(importlib.import_module("ale_py"))
    except ModuleNotFoundError as error:
        raise InvalidRequestError("env", f"{name!r} needs {how_to_install('atari')}") from error
