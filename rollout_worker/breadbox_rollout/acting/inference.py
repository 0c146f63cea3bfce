"""Run a policy on batches of numpy observations, on any device."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from breadbox.model.errors import InvalidRequestError, ReplayBufferError
from breadbox.model.fragment import Tree
from breadbox.model.trees import map_tree
from breadbox.model.trees import rows as tree_rows
from breadbox_policies import PolicyModule, State, check_greedy, takes
from breadbox_rollout.environments.arrays import GroupArrays


@dataclass(frozen=True, slots=True)
class Decision:
    """The policy's output for a batch of B observations, as arrays on the CPU."""

    action: Tree
    """Leaves [B, ...]."""
    log_prob: NDArray[np.float32]
    value: NDArray[np.float32]
    states: list[State]
    """Recurrent states after the step, one per environment, on the policy's device."""


class PolicyOutputError(ReplayBufferError):
    """The policy's output is not finite, because its weights have diverged."""


def check_device(name: str) -> torch.device:
    """Return a device by name, or raise InvalidRequestError if it is not available."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidRequestError("device", f"{name!r} is not a device of torch") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidRequestError(
            "device", f"{name!r} is not available: torch finds no CUDA device"
        )
    return device


class Inference:
    """A policy on its device, and its random generator; outputs with `bfloat16` are float32.

    Raises InvalidRequestError if the policy cannot act greedily, or has a state without tensors.
    """

    def __init__(
        self,
        policy: PolicyModule,
        device: torch.device,
        *,
        bfloat16: bool = False,
        seed: int = 0,
        greedy: bool = False,
    ) -> None:
        if greedy:
            check_greedy(policy, "greedy")
        self.policy = policy.to(device).eval()
        self._device = device
        self._bfloat16 = bfloat16
        self._generator = torch.Generator(device).manual_seed(seed)
        # Custom policies that never act greedily need not have the argument.
        self._choice: dict[str, Any] = {"greedy": True} if greedy else {}
        self._takes_acts = takes(policy, "acts")
        self._initial_state = self._split_initial_state()

    def _split_initial_state(self) -> State:
        initial = self.policy.initial_state(1)
        if initial is None:
            return None
        parts = self.policy.split_state(initial)
        if not parts:
            raise InvalidRequestError(
                "policy",
                f"has {initial!r} as its initial state, which contains no tensor: "
                "return None for a policy without memory",
            )
        return parts[0]

    @property
    def is_recurrent(self) -> bool:
        """True if the policy has a recurrent state."""
        return self._initial_state is not None

    @property
    def initial_state(self) -> State:
        """Recurrent state before the first step, or None for a policy without memory."""
        return self._initial_state

    def act(
        self,
        obs: Tree,
        states: list[State],
        first: NDArray[np.bool_],
        acts: NDArray[np.bool_] | None = None,
    ) -> Decision:
        """Choose actions, leaves [B, ...]; raise PolicyOutputError on NaN or infinity.

        Only actions in the rows *acts* count, all if it is None.
        """
        choice = self._choice
        if self._takes_acts and acts is not None and not acts.all():
            choice = {**choice, "acts": self._tensor(acts)}
        with torch.inference_mode(), self._precision():
            state = self.policy.merge_state(states) if self.is_recurrent else None
            result = self.policy.act(
                map_tree(self._tensor, obs),
                state,
                self._tensor(first),
                generator=self._generator,
                **choice,
            )
        batch_size = len(first)
        log_prob, value = _arrays(result.log_prob.float()), _arrays(result.value.float())
        if not (np.isfinite(log_prob).all() and np.isfinite(value).all()):
            raise PolicyOutputError(
                f"the policy's log-probs {log_prob[:4]} or values {value[:4]} are not finite: "
                "its weights have diverged"
            )
        return Decision(
            action=_arrays(result.action),
            log_prob=log_prob,
            value=value,
            states=self.policy.split_state(result.state)
            if self.is_recurrent
            else [None] * batch_size,
        )

    def _precision(self) -> AbstractContextManager[object]:
        if not self._bfloat16:
            return nullcontext()
        return torch.autocast(self._device.type, torch.bfloat16)

    def _tensor(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def state_arrays(state: State) -> Tree:
    """Return a recurrent state as arrays, for a fragment."""
    return _arrays(state)


def _arrays(tree: Any) -> Tree:
    return map_tree(lambda leaf: leaf.cpu().numpy(), tree)


@dataclass(frozen=True, slots=True)
class Round:
    """Observations and decisions of one run of the policy; rows in the order of the arrays."""

    obs: Tree
    """Leaves [B, ...], copied."""
    first: NDArray[np.bool_]
    acts: NDArray[np.bool_]
    """bool[B]; True where the action counts."""
    decision: Decision


def play_round(
    arrays: list[GroupArrays], inference: Inference, states: list[State], model_version: int
) -> Round:
    """Run the policy once for all rows, and write its actions for the environments to read."""
    # Copied, because environments overwrite their arrays once they step.
    obs = joined([entry.obs for entry in arrays])
    first = np.concatenate([entry.first for entry in arrays])
    acts = np.concatenate([entry.acts for entry in arrays])
    decision = inference.act(obs, states, first, acts)
    decision = replace(decision, action=_in_types(decision.action, arrays[0].action))
    write_actions(arrays, decision.action, decision.value, model_version)
    return Round(obs, first, acts, decision)


def _in_types(action: Tree, executed: Tree) -> Tree:
    """Return an action in the space's dtypes; float64 spaces keep narrower numbers as they are."""
    if isinstance(action, dict):
        return {
            key: _in_types(part, executed[key]) if key in executed else part
            for key, part in action.items()
        }
    if isinstance(action, tuple | list):
        return tuple(_in_types(*pair) for pair in zip(action, executed, strict=True))
    dtype = executed.dtype
    if dtype.kind == "f" and np.can_cast(action.dtype, dtype):
        return action
    if dtype.kind in "iu" and action.dtype.kind in "iuf" and action.dtype != dtype:
        return _saturated(action, dtype)
    return action.astype(dtype, copy=False)


def _saturated(action: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return numbers in an integer dtype, those beyond it as its ends: a cast would wrap them."""
    bounds = np.iinfo(dtype)
    low: Any = bounds.min
    high: Any = bounds.max
    if action.dtype.kind == "f":
        low, high = float(low), float(high)
        if int(high) > bounds.max:
            high = np.nextafter(action.dtype.type(high), 0)
    else:
        own = np.iinfo(action.dtype)
        low, high = max(low, own.min), min(high, own.max)
    return np.asarray(np.clip(action, low, high)).astype(dtype)


def write_actions(
    arrays: list[GroupArrays], action: Tree, value: NDArray[np.float32], model_version: int
) -> None:
    """Write the actions of the B rows of all *arrays*, for the environments to read."""
    start = 0
    for entry in arrays:
        end = start + len(entry.first)
        write_rows(entry.action, slice(None), tree_rows(action, start, end))
        entry.value[:] = value[start:end]
        entry.model_version[0] = model_version
        start = end


def write_rows(into: Tree, where: int | slice, value: Tree) -> None:
    """Write one or several rows into every leaf."""
    if isinstance(into, dict):
        for key, array in into.items():
            write_rows(array, where, value[key])
    elif isinstance(into, tuple):
        for array, part in zip(into, value, strict=True):
            write_rows(array, where, part)
    else:
        into[where] = value


def joined(trees: list[Tree]) -> Tree:
    """Concatenate trees of arrays along their first axis; always a copy."""
    if type(trees[0]) is np.ndarray:  # First, because most are.
        return np.concatenate(trees)
    return map_tree(lambda *parts: np.concatenate(parts), *trees)
