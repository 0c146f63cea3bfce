"""Action distributions in plain tensor operations, because `torch.distributions` is slow."""

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from breadbox.model.errors import InvalidRequestError
from breadbox.model.trees import child_path, in_order
from breadbox_policies.protocol import Tree

_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True, slots=True)
class LogProbEntropy:
    """Log-probability and entropy of actions, both float32 with the leading axes of the input."""

    log_prob: Tensor
    entropy: Tensor


class ActionHead(nn.Module):
    """Turn `input_count` numbers of a network, in the last axis, into actions."""

    input_count: int

    @abstractmethod
    def sample(self, inputs: Tensor, generator: torch.Generator | None) -> tuple[Tree, Tensor]:
        """Return actions (leaves [B, ...]) and their log-probs (float32[B]) for inputs [B, n]."""

    @abstractmethod
    def mode(self, inputs: Tensor) -> tuple[Tree, Tensor]:
        """Return the likeliest actions and their log-probs, in the form of `sample`."""

    def choose(
        self, inputs: Tensor, generator: torch.Generator | None, *, greedy: bool
    ) -> tuple[Tree, Tensor]:
        """Return the mode if *greedy*, else a sample."""
        return self.mode(inputs) if greedy else self.sample(inputs, generator)

    @abstractmethod
    def judge(self, inputs: Tensor, action: Tree) -> LogProbEntropy:
        """Return log-prob and entropy, [...], for inputs [..., n] and actions [..., *action]."""


class _Categorical(ActionHead):
    """One of *choice_count* choices; the action is `start` plus the index, int64."""

    def __init__(self, choice_count: int, start: int = 0) -> None:
        super().__init__()
        self.input_count = choice_count
        self._start = start

    def sample(self, inputs: Tensor, generator: torch.Generator | None) -> tuple[Tree, Tensor]:
        log_probs = torch.log_softmax(inputs.float(), dim=-1)
        # An exponential race: each choice's clock runs at its probability, and the first wins. This
        # equals torch.multinomial without its checks, which wait for a CUDA device each time.
        clocks = torch.empty_like(log_probs).exponential_(generator=generator)
        index = (log_probs.exp() / clocks).argmax(-1, keepdim=True)
        return index.squeeze(-1) + self._start, log_probs.gather(-1, index).squeeze(-1)

    def mode(self, inputs: Tensor) -> tuple[Tree, Tensor]:
        log_prob, index = torch.log_softmax(inputs.float(), dim=-1).max(-1)
        return index + self._start, log_prob

    def judge(self, inputs: Tensor, action: Tree) -> LogProbEntropy:
        log_probs = torch.log_softmax(inputs.float(), dim=-1)
        index = (action.long() - self._start).unsqueeze(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return LogProbEntropy(log_probs.gather(-1, index).squeeze(-1), entropy)


class _Joined(ActionHead):
    """Independent parts side by side; each takes its own slice of the inputs."""

    def __init__(self, heads: Sequence[ActionHead]) -> None:
        super().__init__()
        self._parts = nn.ModuleList(heads)
        self._widths = [head.input_count for head in heads]
        self.input_count = sum(self._widths)

    @abstractmethod
    def join(self, actions: list[Tree]) -> Tree:
        """Return one action of the parts', in the form of the space."""

    @abstractmethod
    def part(self, action: Tree) -> Sequence[Tree]:
        """Undo `join`, for any leading axes."""

    def _slices(self, inputs: Tensor) -> Iterator[tuple[ActionHead, Tensor]]:
        slices = torch.split_with_sizes(inputs, self._widths, -1)
        for part, part_inputs in zip(self._parts, slices, strict=True):
            assert isinstance(part, ActionHead)
            yield part, part_inputs

    def _together(self, acted: Sequence[tuple[Tree, Tensor]]) -> tuple[Tree, Tensor]:
        log_prob = torch.stack([log_prob for _, log_prob in acted], -1).sum(-1)
        return self.join([action for action, _ in acted]), log_prob

    def sample(self, inputs: Tensor, generator: torch.Generator | None) -> tuple[Tree, Tensor]:
        return self._together(
            [part.sample(part_inputs, generator) for part, part_inputs in self._slices(inputs)]
        )

    def mode(self, inputs: Tensor) -> tuple[Tree, Tensor]:
        return self._together(
            [part.mode(part_inputs) for part, part_inputs in self._slices(inputs)]
        )

    def judge(self, inputs: Tensor, action: Tree) -> LogProbEntropy:
        judged = [
            part.judge(part_inputs, part_action)
            for (part, part_inputs), part_action in zip(
                self._slices(inputs), self.part(action), strict=True
            )
        ]
        return LogProbEntropy(
            torch.stack([part.log_prob for part in judged], -1).sum(-1),
            torch.stack([part.entropy for part in judged], -1).sum(-1),
        )


class _MultiCategorical(_Joined):
    """Several independent choices; the action is an integer array of the space's shape."""

    def __init__(
        self, choice_counts: Sequence[int], starts: Sequence[int], shape: tuple[int, ...]
    ) -> None:
        super().__init__([_Categorical(*each) for each in zip(choice_counts, starts, strict=True)])
        self._shape = shape

    def join(self, actions: list[Tree]) -> Tree:
        action = torch.stack(actions, -1)
        return action.reshape(*action.shape[:-1], *self._shape)

    def part(self, action: Tree) -> Sequence[Tree]:
        leading = action.shape[: action.dim() - len(self._shape)]
        flat: Tensor = action.reshape(*leading, len(self._widths))
        return flat.unbind(-1)


class _Dict(_Joined):
    """Independent parts, in the order of their keys; the action is a dict."""

    def __init__(self, heads: dict[str, ActionHead]) -> None:
        super().__init__(list(heads.values()))
        self._keys = list(heads)

    def join(self, actions: list[Tree]) -> Tree:
        return dict(zip(self._keys, actions, strict=True))

    def part(self, action: Tree) -> Sequence[Tree]:
        return [action[key] for key in self._keys]


class _Tuple(_Joined):
    def join(self, actions: list[Tree]) -> Tree:
        return tuple(actions)

    def part(self, action: Tree) -> Sequence[Tree]:
        return list(action)


class _Gaussian(ActionHead):
    """Independent normal distributions with learned, state-independent deviations.

    Inputs -1 and 1 are a box's ends. Actions may be beyond them: the environment's side clips, and
    the fragment keeps the sample, so its log-prob is right.
    """

    def __init__(
        self, low: NDArray[np.floating[Any]], high: NDArray[np.floating[Any]], log_std: float = -0.5
    ) -> None:
        super().__init__()
        self.input_count = low.size
        self._shape = low.shape
        self.log_std = nn.Parameter(torch.full((self.input_count,), log_std))
        lows, highs = (
            torch.from_numpy(each.astype(np.float32).reshape(-1)) for each in (low, high)
        )
        scale, centre = (highs - lows) / 2, (highs + lows) / 2
        has_ends = scale.isfinite() & centre.isfinite() & (scale > 0)
        # Constants of the space, not weights: older weights without them still load.
        self.register_buffer("_scale", torch.where(has_ends, scale, 1.0), persistent=False)
        self.register_buffer("_centre", torch.where(has_ends, centre, 0.0), persistent=False)
        self._scale: Tensor
        self._centre: Tensor

    def sample(self, inputs: Tensor, generator: torch.Generator | None) -> tuple[Tree, Tensor]:
        mean = inputs.float()
        noise = torch.randn(mean.shape, generator=generator, device=mean.device)
        return self._action(mean + noise * self.log_std.exp()), self._log_prob(noise)

    def mode(self, inputs: Tensor) -> tuple[Tree, Tensor]:
        mean = inputs.float()
        return self._action(mean), self._log_prob(torch.zeros_like(mean))

    def judge(self, inputs: Tensor, action: Tree) -> LogProbEntropy:
        mean = inputs.float()
        taken = (action.reshape(mean.shape) - self._centre) / self._scale
        log_prob = self._log_prob((taken - mean) / self.log_std.exp())
        entropy = (0.5 + _LOG_SQRT_2PI + self.log_std + self._scale.log()).sum()
        return LogProbEntropy(log_prob, entropy.expand(log_prob.shape))

    def _action(self, unit: Tensor) -> Tensor:
        action = self._centre + self._scale * unit
        return action.reshape(*action.shape[:-1], *self._shape)

    def _log_prob(self, noise: Tensor) -> Tensor:
        density = -0.5 * noise.square() - self.log_std - self._scale.log() - _LOG_SQRT_2PI
        return density.sum(-1)


def make_action_head(space: "gymnasium.Space[object]", path: str = "") -> ActionHead:
    """Build the head for an action space, or refuse it."""
    if isinstance(space, gymnasium.spaces.Discrete):
        return _Categorical(int(space.n), int(space.start))
    if isinstance(space, gymnasium.spaces.MultiDiscrete):
        counts, starts = space.nvec.reshape(-1).tolist(), space.start.reshape(-1).tolist()
        return _MultiCategorical(counts, starts, space.shape)
    if isinstance(space, gymnasium.spaces.MultiBinary):
        size = math.prod(space.shape)
        return _MultiCategorical([2] * size, [0] * size, space.shape)
    if isinstance(space, gymnasium.spaces.Box) and space.dtype.kind == "f":
        return _Gaussian(space.low, space.high)
    if isinstance(space, gymnasium.spaces.Dict):
        return _Dict(
            {
                key: make_action_head(part, child_path(path, key))
                for key, part in in_order(space.spaces)
            }
        )
    if isinstance(space, gymnasium.spaces.Tuple):
        return _Tuple([make_action_head(p, child_path(path, i)) for i, p in enumerate(space)])
    where = f" at {path}" if path else ""
    raise InvalidRequestError("action_space", f"has no action head for {space}{where}")
