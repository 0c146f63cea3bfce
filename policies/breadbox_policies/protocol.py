"""The interface of policies, to act step by step and to train on fragments; and their weights.

Axes: B environments (or fragments), T steps. Observations and actions are trees (nested dicts,
lists, tuples) of tensors with leading axes B, or B and T. A recurrent state is a tree of tensors
with leading axis B, or None for a policy without memory.
"""

import inspect
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from breadbox.model.errors import InvalidRequestError, ReplayBufferError
from breadbox.model.trees import leaves, map_tree, row_view

Tree = Any
State = Any


@dataclass(frozen=True, slots=True)
class ActResult:
    """A policy's output for one observation of each of B environments.

    Attributes:
        action: Leaves [B, ...]; in the environment's form, but not clipped.
        log_prob: float32[B]; log-probability of `action`, summed over its parts.
        value: float32[B]; in reward units.
        state: The recurrent state after this step, or None for a policy without memory.
    """

    action: Tree
    log_prob: Tensor
    value: Tensor
    state: State


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A policy's judgement of recorded actions, with gradients.

    Attributes:
        log_prob: float32[B, T].
        entropy: float32[B, T]; in nats, summed over the parts of an action.
        value: float32[B, T]; in reward units.
        state: The recurrent state after step T - 1, or None for a policy without memory.
    """

    log_prob: Tensor
    entropy: Tensor
    value: Tensor
    state: State


class Policy(Protocol):
    """The interface between policies and the code that runs or trains them.

    Where `first[b]` is true, the policy starts environment b from its initial state and ignores the
    given one, so that no memory crosses the border of an episode.
    """

    @abstractmethod
    def initial_state(self, batch_size: int) -> State:
        """Return the state of *batch_size* environments at the start of an episode, or None."""

    @abstractmethod
    def act(
        self,
        obs: Tree,
        state: State,
        first: Tensor,
        *,
        generator: torch.Generator | None = None,
        greedy: bool = False,
    ) -> ActResult:
        """Choose an action for each environment: a sample of the policy's distribution.

        Args:
            obs: Leaves [B, ...].
            state: Recurrent states of the same B environments, in the same order.
            first: bool[B]; this observation starts an episode.
            generator: Source of randomness, on the policy's device, or None for torch's global one.
            greedy: Return the mode of the distribution (the likeliest choice, the mean of a normal
                distribution), without randomness. Callers that only sample omit it, so that custom
                policies need not have it.
        """

    @abstractmethod
    def evaluate(self, obs: Tree, action: Tree, state: State, first: Tensor) -> Evaluation:
        """Judge recorded actions.

        Args:
            obs: Leaves [B, T, ...].
            action: Leaves [B, T, ...].
            state: Recurrent states before step 0, leaves [B, ...].
            first: bool[B, T].
        """

    def train(self, mode: bool = True) -> Any:
        """Prepare for gradient steps; the learner calls it before them."""

    def eval(self) -> Any:
        """Prepare for acting, and for values and log-probabilities without a gradient."""

    def update_statistics(self, batch: Any) -> None:
        """Count a batch in statistics that are buffers, such as means of observations.

        The learner calls it once for each batch, after training on it and before publishing, so
        that acting and training see the same statistics. Buffers are published with the weights,
        and are in checkpoints. Of several ranks the first counts its share for all.

        Args:
            batch: Fields `obs`, `action`, `reward`, `first` and so on, leaves [B, T, ...].
        """

    def merge_state(self, states: Sequence[State]) -> State:
        """Join states of single environments (leaves without a batch axis) into one batch."""

    def split_state(self, state: State) -> list[State]:
        """Undo `merge_state`: one state per environment, leaves without a batch axis."""


class PolicyModule(nn.Module, Policy):
    """A `Policy` that is a torch module; states may be any tree of tensors."""

    def merge_state(self, states: Sequence[State]) -> State:
        """See `Policy.merge_state`."""
        return map_tree(lambda *parts: torch.stack(parts), *states)

    def split_state(self, state: State) -> list[State]:
        """See `Policy.split_state`. The parts are views: copy those that are kept for long."""
        batch_sizes = {len(leaf) for _, leaf in leaves(state) if leaf is not None}
        return [row_view(state, index) for index in range(max(batch_sizes, default=0))]


def check_greedy(policy: Policy, setting: str) -> None:
    """Raise InvalidRequestError if *setting* needs a greedy policy, and `act` takes no `greedy`."""
    parameters = inspect.signature(policy.act).parameters.values()
    if not any(p.name == "greedy" or p.kind is p.VAR_KEYWORD for p in parameters):
        raise InvalidRequestError(
            setting,
            f"needs a policy that can act greedily; {type(policy).__name__}.act takes no argument "
            "'greedy'",
        )


_NAMES_SHOWN_MAX = 5


class WeightsMismatchError(ReplayBufferError, ValueError):
    """Published weights do not fit the policy; names the parameters."""

    def __init__(self, missing: list[str], unexpected: list[str], misshapen: list[str]) -> None:
        kinds = {"missing": missing, "unexpected": unexpected, "of another shape": misshapen}
        parts = []
        for kind, names in kinds.items():
            more = len(names) - _NAMES_SHOWN_MAX
            if names:
                rest = f" and {more} more" if more > 0 else ""
                parts.append(f"{kind}: {', '.join(names[:_NAMES_SHOWN_MAX])}{rest}")
        super().__init__("weights do not fit the policy; " + "; ".join(parts))
        self.missing = missing
        self.unexpected = unexpected
        self.misshapen = misshapen


def policy_weights(policy: nn.Module) -> dict[str, NDArray[Any]]:
    """Return a copy of the policy's parameters and buffers, by name, as arrays on the CPU."""
    return {
        name: tensor.detach().cpu().numpy().copy() for name, tensor in policy.state_dict().items()
    }


def set_policy_weights(
    policy: nn.Module, weights: Mapping[str, NDArray[Any]], *, strict: bool = True
) -> None:
    """Copy weights by name: all (else `WeightsMismatchError`), or, not *strict*, those that fit."""
    own = policy.state_dict()
    misshapen = [
        f"{name} (wanted {tuple(own[name].shape)}, got {np.shape(weights[name])})"
        for name in own
        if name in weights and tuple(own[name].shape) != np.shape(weights[name])
    ]
    missing = [name for name in own if name not in weights]
    unexpected = [name for name in weights if name not in own]
    if strict and (missing or unexpected or misshapen):
        raise WeightsMismatchError(missing, unexpected, misshapen)
    with torch.no_grad():
        for name, tensor in own.items():
            if name in weights and tuple(tensor.shape) == np.shape(weights[name]):
                # Copied first: arrays that were received in place may be read-only.
                tensor.copy_(torch.from_numpy(np.array(weights[name])))
