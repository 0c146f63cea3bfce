"""Read `--agents`, make each entry's policy, and read weights for it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
import safetensors
import safetensors.numpy
import torch
from numpy.typing import NDArray

from breadbox.model.errors import InvalidRequestError
from breadbox.model.paths import read_regular
from breadbox_policies import PolicyModule, make_policy, policy_names, set_policy_weights
from breadbox_rollout.processes.host import PARTS_MAX


def check_policy_name(name: str) -> None:
    """Raise InvalidRequestError, before anything starts, if a name cannot be a policy."""
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
        held = safetensors.numpy.load(read_regular(path))
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise InvalidRequestError("weights_file", f"{path} cannot be read: {error}") from error
    # A checkpoint has them under "policy.", among others.
    policy = {
        name.removeprefix("policy."): array
        for name, array in held.items()
        if name.startswith("policy.")
    }
    return policy or held


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentsEntry:
    """Settings of the agents of one pattern."""

    pattern: str
    """Shell pattern of agents' names; the first entry that matches an agent counts."""
    buffer: str
    """Buffer that provides the acting model and gets the fragments."""
    policy: str
    policy_options: Mapping[str, Any] = field(default_factory=dict)
    learn: bool = True
    """False for opponents, which act with earlier versions and send nothing."""
    weights_files: tuple[Path, ...] = ()
    """Files of opponents' weights that are always among their versions."""


_TYPES = {
    "buffer": str,
    "policy": str,
    "policy_options": dict,
    "learn": bool,
    "weights_files": list,
}


def agents_entries(
    given: Mapping[str, Any], *, buffer: str, policy: str, policy_options: Mapping[str, Any]
) -> list[AgentsEntry]:
    """Read `--agents`; an entry's missing settings are those of the whole worker."""
    if len(given) > PARTS_MAX:
        raise InvalidRequestError("agents", f"has {len(given)} entries, more than {PARTS_MAX}")
    entries = []
    for pattern, said in (given or {"*": {}}).items():
        if not isinstance(said, Mapping) or (unknown := sorted(said.keys() - _TYPES.keys())):
            what = f"names unknown keys {', '.join(unknown)}" if isinstance(said, Mapping) else (
                f"is {said!r}, not an object"
            )  # fmt: skip
            raise InvalidRequestError("agents", f"{pattern!r} {what}; keys are {', '.join(_TYPES)}")
        for key, value in said.items():
            if not isinstance(value, _TYPES[key]):
                wanted = _TYPES[key].__name__
                raise InvalidRequestError("agents", f"{pattern!r}: {key} is {value!r}, no {wanted}")
        own = said.get("policy", policy)
        check_policy_name(own)
        options = said.get("policy_options", policy_options if own == policy else {})
        files = tuple(Path(str(name)) for name in said.get("weights_files", []))
        learn = said.get("learn", True)
        if files and learn:
            raise InvalidRequestError(
                "agents", f'{pattern!r}: weights_files are for opponents, with "learn": false'
            )
        for file in files:
            if not file.is_file():
                raise InvalidRequestError("agents", f"{pattern!r}: there is no file {file}")
        entries.append(
            AgentsEntry(
                pattern=pattern,
                buffer=said.get("buffer", buffer),
                policy=own,
                policy_options=options,
                learn=learn,
                weights_files=files,
            )
        )
    if not any(entry.learn for entry in entries):
        raise InvalidRequestError("agents", "nothing is learned from any of them")
    return entries
