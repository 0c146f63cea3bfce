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
_TINY = torch.finfo(torch.float32).tiny
_LOG_STD_START = -0.5
_LOG_STD_RANGE = (-5.0, 2.0)
"""Ends of a state-dependent deviation's logarithm; float32 cannot resolve finer ones."""
_SATURATED = 0.999
"""Share of the way from a box's middle to its end from which on squashed actions are one event."""
_SATURATED_AT = math.atanh(_SATURATED)
_NODES = torch.linspace(-6, 6, 61)
_WEIGHTS = torch.softmax(-_NODES.square() / 2, 0)
"""A normal distribution as even points, for means over it."""


@dataclass(frozen=True, slots=True)
class LogProbEntropy:
    """Log-probability and entropy of actions, both float32 with the leading axes of the input."""

    log_prob: Tensor
    entropy: Tensor


class ActionHead(nn.Module):
    """Turn `input_count` numbers of a network, in the last axis, into actions."""

    input_count: int
    is_choice: Sequence[bool]
    """For each input, whether it is the logit of a choice."""
    choice_counts: Sequence[int] = ()
    """Number of inputs of each independent choice among the parts."""

    @abstractmethod
    def choose(
        self, inputs: Tensor, generator: torch.Generator | None, *, greedy: bool = False
    ) -> tuple[Tree, Tensor]:
        """Return actions (leaves [B, ...]) and their log-probs (float32[B]) for inputs [B, n].

        They are drawn, or the likeliest ones if *greedy*.
        """

    @abstractmethod
    def judge(self, inputs: Tensor, action: Tree) -> LogProbEntropy:
        """Return log-prob and entropy, [...], for inputs [..., n] and actions [..., *action]."""


class _Categorical(ActionHead):
    """One of *choice_count* choices; the action is `start` plus the index, int64."""

    def __init__(self, choice_count: int, start: int = 0) -> None:
        super().__init__()
        self.input_count = choice_count
        self.is_choice, self.choice_counts = [True] * choice_count, [choice_count]
        self._start = start

    def choose(
        self, inputs: Tensor, generator: torch.Generator | None, *, greedy: bool = False
    ) -> tuple[Tree, Tensor]:
        log_probs = torch.log_softmax(inputs.float(), dim=-1)
        if greedy:
            log_prob, index = log_probs.max(-1)
            return index + self._start, log_prob
        # An exponential race: each choice's clock runs at its probability, and the first wins. This
        # equals torch.multinomial without its checks, which wait for a CUDA device each time.
        clocks = torch.empty_like(log_probs).exponential_(generator=generator)
        clocks.clamp_(min=_TINY)  # At 0, a choice of probability 0 could win.
        index = (log_probs.exp() / clocks).argmax(-1, keepdim=True)
        return index.squeeze(-1) + self._start, log_probs.gather(-1, index).squeeze(-1)

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
        self.is_choice = [each for head in heads for each in head.is_choice]
        self.choice_counts = [each for head in heads for each in head.choice_counts]

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

    def choose(
        self, inputs: Tensor, generator: torch.Generator | None, *, greedy: bool = False
    ) -> tuple[Tree, Tensor]:
        chosen = [
            part.choose(part_inputs, generator, greedy=greedy)
            for part, part_inputs in self._slices(inputs)
        ]
        log_prob = torch.stack([log_prob for _, log_prob in chosen], -1).sum(-1)
        return self.join([action for action, _ in chosen]), log_prob

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
    """Independent normal distributions; the deviations are learned, or come from the network.

    Inputs -1 and 1 are a box's ends. Actions may be beyond them: the environment's side clips, and
    the fragment keeps the sample, so its log-prob is right. *squash* keeps them within by a tanh.
    """

    def __init__(
        self,
        low: NDArray[np.floating[Any]],
        high: NDArray[np.floating[Any]],
        *,
        squash: bool = False,
        state_dependent_std: bool = False,
    ) -> None:
        super().__init__()
        self.input_count = low.size * (2 if state_dependent_std else 1)
        self.is_choice = [False] * self.input_count
        self._shape = low.shape
        self._squash = squash
        if not state_dependent_std:
            self.log_std = nn.Parameter(torch.full((low.size,), _LOG_STD_START))
        lows, highs = (
            torch.from_numpy(each.astype(np.float32).reshape(-1)) for each in (low, high)
        )
        scale, centre = (highs - lows) / 2, (highs + lows) / 2
        has_ends = scale.isfinite() & centre.isfinite() & (scale > 0)
        if squash and not has_ends.all():
            raise InvalidRequestError(
                "squash", f"needs boxes between two ends, got {low} to {high}"
            )
        # Constants of the space, not weights: older weights without them still load.
        self.register_buffer("_scale", torch.where(has_ends, scale, 1.0), persistent=False)
        self.register_buffer("_centre", torch.where(has_ends, centre, 0.0), persistent=False)
        ends = torch.from_numpy(_float32_within(low.reshape(-1), high.reshape(-1)))
        self.register_buffer("_ends", ends, persistent=False)
        self._scale: Tensor
        self._centre: Tensor
        self._ends: Tensor

    def choose(
        self, inputs: Tensor, generator: torch.Generator | None, *, greedy: bool = False
    ) -> tuple[Tree, Tensor]:
        mean, log_std = self._normal(inputs)
        noise = torch.zeros_like(mean)
        if not greedy:
            noise = torch.randn(mean.shape, generator=generator, device=mean.device)
        unit = mean + noise * log_std.exp()
        action = self._centre + self._scale * (unit.tanh() if self._squash else unit)
        if self._squash:
            action = action.clamp(*self._ends)
            # From the rounded action, which is recorded: so judging it gives the same.
            taken = (action - self._centre) / self._scale
            log_prob = self._squashed_log_prob(taken, mean, log_std)
        else:
            log_prob = self._log_prob(noise, log_std)
        return action.reshape(*action.shape[:-1], *self._shape), log_prob

    def judge(self, inputs: Tensor, action: Tree) -> LogProbEntropy:
        mean, log_std = self._normal(inputs)
        taken = (action.reshape(mean.shape) - self._centre) / self._scale
        entropy = 0.5 + _LOG_SQRT_2PI + log_std + self._scale.log()
        if self._squash:
            entropy = entropy + _mean_log_slope(mean, log_std)
            log_prob = self._squashed_log_prob(taken, mean, log_std)
        else:
            log_prob = self._log_prob((taken - mean) / log_std.exp(), log_std)
        return LogProbEntropy(log_prob, entropy.sum(-1).expand(log_prob.shape))

    def _normal(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and logarithm of the deviation, before a tanh, in units of the box."""
        inputs = inputs.float()
        if self.input_count == len(self._scale):
            return inputs, self.log_std
        mean, log_std = inputs.chunk(2, -1)
        return mean, (log_std + _LOG_STD_START).clamp(*_LOG_STD_RANGE)

    def _log_prob(self, noise: Tensor, log_std: Tensor) -> Tensor:
        density = -0.5 * noise.square() - log_std - self._scale.log() - _LOG_SQRT_2PI
        return density.sum(-1)

    def _squashed_log_prob(self, taken: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
        """Return the log-density of *taken* = tanh(u), by change of variables.

        Close to an end u cannot be found from a float32. All of that is one event, with its mean
        density: P(u beyond) / width, as in Acme's TanhTransformedDistribution (Hoffman et al.
        2020). So what acted and what judges agree, and gradients stay finite.
        """
        std = log_std.exp()
        near = taken.clamp(-_SATURATED, _SATURATED)
        noise = (near.atanh() - mean) / std
        within = -0.5 * noise.square() - log_std - _LOG_SQRT_2PI - torch.log1p(-near.square())
        beyond = _log_ndtr((taken.sign() * mean - _SATURATED_AT) / std)
        beyond = beyond - math.log(1 - _SATURATED)
        density = torch.where(taken.abs() < _SATURATED, within, beyond) - self._scale.log()
        return density.sum(-1)


def _float32_within(
    low: NDArray[np.floating[Any]], high: NDArray[np.floating[Any]]
) -> NDArray[np.float32]:
    """Return a box's ends [2, n], rounded to float32 inwards."""
    ends = np.stack([low, high]).astype(np.float32)
    outside = np.stack([ends[0] < low, ends[1] > high])
    inwards = np.array([[np.inf], [-np.inf]], np.float32)
    return np.where(outside, np.nextafter(ends, inwards), ends)


def _log_ndtr(x: Tensor) -> Tensor:
    """Return log P(normal < x); torch's own has a wrong gradient, or NaN, far below 0.

    There it is the asymptotic series (Abramowitz and Stegun 26.2.12), right to 1e-6 at -10.
    """
    far = x.clamp(max=-10.0)
    inverse = far.square().reciprocal()
    series = torch.log1p(inverse * (-1 + inverse * (3 - 15 * inverse)))
    tail = -0.5 * far.square() - torch.log(-far) - _LOG_SQRT_2PI + series
    return torch.where(x < -10.0, tail, torch.special.log_ndtr(x.clamp(min=-10.0)))


def _mean_log_slope(mean: Tensor, log_std: Tensor) -> Tensor:
    """Return the mean of log(1 - tanh(u)^2) over a normal u, which a tanh adds to the entropy.

    The sum over even points is right to 0.01 at the widest deviation, has a gradient and needs no
    draw. The logarithm is 2 (log 2 - u - softplus(-2u)), which does not overflow (TensorFlow
    Probability's `Tanh`).
    """
    unit = mean.unsqueeze(-1) + log_std.exp().unsqueeze(-1) * _NODES.to(mean.device)
    slope = 2 * (math.log(2) - unit - nn.functional.softplus(-2 * unit))
    return (slope * _WEIGHTS.to(mean.device)).sum(-1)


def make_action_head(
    space: "gymnasium.Space[object]", path: str = "", **gaussian: bool
) -> ActionHead:
    """Build the head for an action space, or refuse it; with options of boxes' heads."""
    if isinstance(space, gymnasium.spaces.Discrete):
        return _Categorical(int(space.n), int(space.start))
    if isinstance(space, gymnasium.spaces.MultiDiscrete):
        counts, starts = space.nvec.reshape(-1).tolist(), space.start.reshape(-1).tolist()
        return _MultiCategorical(counts, starts, space.shape)
    if isinstance(space, gymnasium.spaces.MultiBinary):
        size = math.prod(space.shape)
        return _MultiCategorical([2] * size, [0] * size, space.shape)
    if isinstance(space, gymnasium.spaces.Box) and space.dtype.kind == "f":
        return _Gaussian(space.low, space.high, **gaussian)
    if isinstance(space, gymnasium.spaces.Dict):
        return _Dict(
            {
                key: make_action_head(part, child_path(path, key), **gaussian)
                for key, part in in_order(space.spaces)
            }
        )
    if isinstance(space, gymnasium.spaces.Tuple):
        return _Tuple(
            [make_action_head(p, child_path(path, i), **gaussian) for i, p in enumerate(space)]
        )
    where = f" at {path}" if path else ""
    raise InvalidRequestError("action_space", f"has no action head for {space}{where}")
