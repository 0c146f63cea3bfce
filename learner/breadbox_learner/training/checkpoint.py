"""Read and write a run's checkpoint: a safetensors file with a JSON text; nothing is executed."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from breadbox.model.errors import ReplayBufferError
from breadbox.model.paths import read_regular
from breadbox_learner.training.batching import EnvironmentSteps, EpisodeReturns
from breadbox_learner.training.ppo import PpoUpdater
from breadbox_learner.training.trainer import TrainerState
from breadbox_policies import WeightsMismatchError, set_policy_weights

FORMAT_VERSION = 1
_POLICY, _OPTIMIZER, _RANDOM = "policy.", "optimizer.", "random."
_TEXT = "breadbox"
"""Name, in the file's metadata, of the JSON text that makes it a checkpoint."""


class CheckpointError(ReplayBufferError):
    """A checkpoint cannot be read, or is of another run; names it and the reason."""

    def __init__(self, source: str, problem: str) -> None:
        super().__init__(f"{source}: {problem}")


@dataclass(slots=True)
class SessionState:
    """The session of the run."""

    session_id: str = ""
    model_version: int = 0


def encode(
    *,
    updater: PpoUpdater,
    state: TrainerState,
    returns: EpisodeReturns,
    session: SessionState,
    identity: Mapping[str, Any],
    environment: EnvironmentSteps | None = None,
) -> bytes:
    """Encode the state of a run; `identity` has the settings that must not change on resuming."""
    optimizer = updater.optimizer.state_dict()
    tensors = {_POLICY + name: tensor for name, tensor in updater.policy.state_dict().items()}
    plain_state: dict[str, dict[str, Any]] = {}
    for index, entries in optimizer["state"].items():
        for name, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{_OPTIMIZER}{index}.{name}"] = value
            else:
                plain_state.setdefault(str(index), {})[name] = value
    tensors[_RANDOM + "cpu"] = torch.get_rng_state()
    if updater.device.type == "cuda":
        tensors[_RANDOM + "cuda"] = torch.cuda.get_rng_state(updater.device)
    text = {
        "format_version": FORMAT_VERSION,
        "identity": dict(identity),
        "state": asdict(state),
        "returns": {"recent": returns.recent, "episode_count": returns.episode_count},
        "environment": (environment or EnvironmentSteps()).written(),
        "rewards": updater.rewards.written(),
        "session": asdict(session),
        "optimizer": {"groups": optimizer["param_groups"], "state": plain_state},
        "scaler": updater.scaler.state_dict(),
    }
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return bytes(save(whole, metadata={_TEXT: json.dumps(text)}))


def restore(
    data: bytes,
    *,
    updater: PpoUpdater,
    returns: EpisodeReturns,
    identity: Mapping[str, Any],
    source: str,
    environment: EnvironmentSteps | None = None,
) -> tuple[TrainerState, SessionState]:
    """Restore a checkpoint into a new `returns` and `environment`; return counters and session.

    After a CheckpointError (damage, another version or identity) nothing has changed but weights.
    """
    text = _text(data, source)
    for name, wanted in identity.items():
        held = text["identity"].get(name)
        if held != wanted:
            raise CheckpointError(source, f"is of a run with {name} {held!r}, not {wanted!r}")
    tensors = load(data)
    try:
        set_policy_weights(updater.policy, _policy_weights(tensors))
    except WeightsMismatchError as error:
        raise CheckpointError(source, str(error)) from error
    updater.optimizer.load_state_dict(_optimizer_state(text["optimizer"], tensors))
    updater.scaler.load_state_dict(text["scaler"])
    torch.set_rng_state(tensors[_RANDOM + "cpu"])
    if _RANDOM + "cuda" in tensors and updater.device.type == "cuda":
        torch.cuda.set_rng_state(tensors[_RANDOM + "cuda"], updater.device)
    returns.restore(text["returns"]["recent"], text["returns"]["episode_count"])
    if "rewards" in text:
        updater.rewards.restore(text["rewards"])
    if environment is not None and "environment" in text:
        environment.restore(text["environment"])
    return TrainerState(**text["state"]), SessionState(**text["session"])


def read_policy_weights(path: Path) -> dict[str, NDArray[Any]]:
    """Return the policy's weights from a checkpoint, or from a safetensors file of weights."""
    try:
        data = read_regular(path)
    except OSError as error:
        raise CheckpointError(str(path), f"cannot be read: {error.strerror}") from error
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise CheckpointError(str(path), f"is no safetensors file: {error}") from error
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    if _TEXT not in header.get("__metadata__", {}):
        return {name: _array(tensor) for name, tensor in tensors.items()}
    _text(data, str(path))
    return _policy_weights(tensors)


def _policy_weights(tensors: Mapping[str, Tensor]) -> dict[str, NDArray[Any]]:
    return {
        name.removeprefix(_POLICY): _array(tensor)
        for name, tensor in tensors.items()
        if name.startswith(_POLICY)
    }


def _array(tensor: Tensor) -> NDArray[Any]:
    """Return the tensor as an array, bfloat16 as float32."""
    array: NDArray[Any] = (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()
    return array


def _text(data: bytes, source: str) -> dict[str, Any]:
    try:
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        text: dict[str, Any] = json.loads(header["__metadata__"][_TEXT])
        load(data)
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(source, f"is damaged, or no checkpoint: {error}") from error
    if text.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            source, f"has format version {text.get('format_version')}, wanted {FORMAT_VERSION}"
        )
    return text


def _optimizer_state(text: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    state: dict[int, dict[str, Any]] = {
        int(index): dict(entries) for index, entries in text["state"].items()
    }
    for name, tensor in tensors.items():
        if name.startswith(_OPTIMIZER):
            index, _, entry = name.removeprefix(_OPTIMIZER).partition(".")
            state.setdefault(int(index), {})[entry] = tensor
    return {"state": state, "param_groups": text["groups"]}
