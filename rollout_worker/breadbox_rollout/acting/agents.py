"""Which policy acts for which agents, as `--agents` says."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from breadbox.model.errors import InvalidRequestError
from breadbox_rollout.acting.policy_options import check_policy_name
from breadbox_rollout.processes.host import PARTS_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentsEntry:
    """What is said of the agents of one pattern."""

    pattern: str
    """As a shell matches names; the first entry that matches an agent has it."""
    buffer: str
    """Whose model acts, and where fragments go."""
    policy: str
    policy_options: Mapping[str, Any] = field(default_factory=dict)
    learn: bool = True
    """False: these are opponents, which act with earlier versions and send nothing."""
    weights_files: tuple[Path, ...] = ()
    """Pinned versions of opponents."""


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
    """Read `--agents`; what an entry does not say is as it is for the whole worker."""
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
