"""Distributions over actions: from an action space to network outputs, samples and log-probs.

Written with plain tensor operations rather than `torch.distributions`, whose objects cost more
than the whole network of a small policy at each step.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import gymnasium
import torch
from torch import Tensor, nn

from breadbox.errors import InvalidRequestError
from breadbox.trees import child_path
from breadbox_policies.protocol import Tree

_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True, slots=True)
class Judged:
    """Log-probability and entropy of actions, both float32 with the leading axes of the input."""

    log_prob: Tensor
    entropy: Tensor


class ActionHead(nn.Module):
    """Turns `input_count` numbers of a network, in the last axis, into actions."""

    input_count: int

    @abstractmethod
    def sample(self, inputs: Tensor, generator: torch.Generator | None) -> tuple[Tree, Tensor]:
        """Return actions (leaves [B, ...]) and their log-probs (float32[B]) for inputs [B, n]."""

    @abstractmethod
    def mode(self, inputs: Tensor) -> tuple[Tree, Tensor]:
        """Return what is likeliest, and its log-probs, in the form of `sample`."""

    def choose(
        self, inputs: Tensor, generator: torch.Generator | None, *, greedy: bool
    ) -> tuple[Tree, Tensor]:
        """Return the mode where *greedy*, else a sample."""
        return self.mode(inputs) if greedy else self.sample(inputs, generator)

    @abstractmethod
    def judge(self, inputs: Tensor, action: Tree) -> Judged:
        """Return log-prob and entropy, [...], for inputs [..., n] and actions [..., *action]."""


class CategoricalHead(ActionHead):
    """One of *choice_count* choices; the action is `start` plus the index, int64."""

    def __init__(self, choice_count: int, start: int = 0) -> None:
        super().__init__()
        self.input_count = choice_count
        self._start = start

    def sample(self, inputs: Tensor, generator: torch.Generator | None) -> tuple[Tree, Tensor]:
        """See `ActionHead.sample`."""
        log_probs = torch.log_softmax(inputs.float(), dim=-1)
        # The choice whose exponential clock, running at its probability, rings first. The same
        # draw as torch.multinomial's, without its checks: they wait for a CUDA device each time.
        clocks = torch.empty_like(log_probs).exponential_(generator=generator)
        index = (log_probs.exp() / clocks).argmax(-1, keepdim=True)
        return index.squeeze(-1) + self._start, log_probs.gather(-1, index).squeeze(-1)

    def mode(self, inputs: Tensor) -> tuple[Tree, Tensor]:
        """See `ActionHead.mode`; of choices equally likely the first."""
        log_prob, index = torch.log_softmax(inputs.float(), dim=-1).max(-1)
        return index + self._start, log_prob

    def judge(self, inputs: Tensor, action: Tree) -> Judged:
        """See `ActionHead.judge`."""
        log_probs = torch.log_softmax(inputs.float(), dim=-1)
        index = (action.long() - self._start).unsqueeze(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return Judged(log_probs.gather(-1, index).squeeze(-1), entropy)


class JoinedHeads(ActionHead):
    """Independent parts side by side; each takes its own slice of the inputs."""

    def __init__(self, heads: Sequence[ActionHead]) -> None:
        super().__init__()
        self._parts = nn.ModuleList(heads)
        self._widths = [head.input_count for head in heads]
        self.input_count = sum(self._widths)

    def _slices(self, inputs: Tensor) -> Iterator[tuple[ActionHead, Tensor]]:
        slices = torch.split_with_sizes(inputs, self._widths, -1)
        for part, part_inputs in zip(self._parts, slices, strict=True):
            assert isinstance(part, ActionHead)
            yield part, part_inputs

    def sample_parts(
        self, inputs: Tensor, generator: torch.Generator | None
    ) -> tuple[list[Tree], Tensor]:
        """Return the parts' actions, and the log-prob of them together."""
        return _together(
            [part.sample(part_inputs, generator) for part, part_inputs in self._slices(inputs)]
        )

    def mode_parts(self, inputs: Tensor) -> tuple[list[Tree], Tensor]:
        """Return the parts' likeliest actions, and the log-prob of them together."""
        return _together([part.mode(part_inputs) for part, part_inputs in self._slices(inputs)])

    def judge_parts(self, inputs: Tensor, actions: Sequence[Tree]) -> Judged:
        """Return log-prob and entropy of the parts' actions together."""
        judged = [
            part.judge(part_inputs, action)
            for (part, part_inputs), action in zip(self._slices(inputs), actions, strict=True)
        ]
        return Judged(
            torch.stack([part.log_prob for part in judged], -1).sum(-1),
            torch.stack([part.entropy for part in judged], -1).sum(-1),
        )


def _together(acted: Sequence[tuple[Tree, Tensor]]) -> tuple[list[Tree], Tensor]:
    """The parts' actions, and the log-prob of them together."""
    log_prob = torch.stack([log_prob for _, log_prob in acted], -1).sum(-1)
    return [action for action, _ in acted], log_prob


class MultiCategoricalHead(JoinedHeads):
    """Several independent choices; the action is an integer array of the space's shape."""

    def __init__(self, choice_counts: Sequence[int], shape: tuple[int, ...]) -> None:
        super().__init__([CategoricalHead(int(count)) for count in choice_counts])
        self._shape = shape

    def sample(self, inputs: Tensor, generator: torch.Generator | None) -> tuple[Tree, Tensor]:
        """See `ActionHead.sample`."""
        choices, log_prob = self.sample_parts(inputs, generator)
        return self._joined(choices), log_prob

    def mode(self, inputs: Tensor) -> tuple[Tree, Tensor]:
        """See `ActionHead.mode`."""
        choices, log_prob = self.mode_parts(inputs)
        return self._joined(choices), log_prob

    def _joined(self, choices: Sequence[Tensor]) -> Tensor:
        action = torch.stack(list(choices), -1)
        return action.reshape(*action.shape[:-1], *self._shape)

    def judge(self, inputs: Tensor, action: Tree) -> Judged:
        """See `ActionHead.judge`."""
        flat: Tensor = action.reshape(*inputs.shape[:-1], len(self._widths))
        return self.judge_parts(inputs, flat.unbind(-1))


class GaussianHead(ActionHead):
    """Independent normal distributions with learned, state-independent deviations.

    Actions are unbounded; whoever steps the environment clips them to its bounds, and the
    fragment keeps what was sampled, so that its log-prob stays right.
    """

    def __init__(self, shape: tuple[int, ...], log_std: float = -0.5) -> None:
        super().__init__()
        self.input_count = math.prod(shape)
        self._shape = shape
        self.log_std = nn.Parameter(torch.full((self.input_count,), log_std))

    def sample(self, inputs: Tensor, generator: torch.Generator | None) -> tuple[Tree, Tensor]:
        """See `ActionHead.sample`."""
        mean = inputs.float()
        noise = torch.randn(mean.shape, generator=generator, device=mean.device)
        action = mean + noise * self.log_std.exp()
        log_prob = (-0.5 * noise.square() - self.log_std - _LOG_SQRT_2PI).sum(-1)
        return action.reshape(*action.shape[:-1], *self._shape), log_prob

    def mode(self, inputs: Tensor) -> tuple[Tree, Tensor]:
        """See `ActionHead.mode`: the mean."""
        mean = inputs.float()
        log_prob = (-self.log_std - _LOG_SQRT_2PI).sum().expand(mean.shape[:-1])
        return mean.reshape(*mean.shape[:-1], *self._shape), log_prob

    def judge(self, inputs: Tensor, action: Tree) -> Judged:
        """See `ActionHead.judge`."""
        mean = inputs.float()
        noise = (action.reshape(mean.shape) - mean) / self.log_std.exp()
        log_prob = (-0.5 * noise.square() - self.log_std - _LOG_SQRT_2PI).sum(-1)
        entropy = (0.5 + _LOG_SQRT_2PI + self.log_std).sum()
        return Judged(log_prob, entropy.expand(log_prob.shape))


class DictHead(JoinedHeads):
    """Independent parts, by key; the action is a dict in the space's order."""

    def __init__(self, heads: dict[str, ActionHead]) -> None:
        super().__init__(list(heads.values()))
        self._keys = list(heads)

    def sample(self, inputs: Tensor, generator: torch.Generator | None) -> tuple[Tree, Tensor]:
        """See `ActionHead.sample`."""
        actions, log_prob = self.sample_parts(inputs, generator)
        return dict(zip(self._keys, actions, strict=True)), log_prob

    def mode(self, inputs: Tensor) -> tuple[Tree, Tensor]:
        """See `ActionHead.mode`."""
        actions, log_prob = self.mode_parts(inputs)
        return dict(zip(self._keys, actions, strict=True)), log_prob

    def judge(self, inputs: Tensor, action: Tree) -> Judged:
        """See `ActionHead.judge`."""
        return self.judge_parts(inputs, [action[key] for key in self._keys])


def make_action_head(space: "gymnasium.Space[object]", path: str = "") -> ActionHead:
    """Build the head for an action space.

    Raises:
        InvalidRequestError: The space, or a part of it, is of a kind no head exists for.
    """
    if isinstance(space, gymnasium.spaces.Discrete):
        return CategoricalHead(int(space.n), int(space.start))
    if isinstance(space, gymnasium.spaces.MultiDiscrete):
        return MultiCategoricalHead(space.nvec.reshape(-1).tolist(), space.shape)
    if isinstance(space, gymnasium.spaces.MultiBinary):
        return MultiCategoricalHead([2] * math.prod(space.shape), space.shape)
    if isinstance(space, gymnasium.spaces.Box) and space.dtype.kind == "f":
        return GaussianHead(space.shape)
    if isinstance(space, gymnasium.spaces.Dict):
        return DictHead(
            {key: make_action_head(part, child_path(path, key)) for key, part in space.items()}
        )
    where = f" at {path}" if path else ""
    raise InvalidRequestError("action_space", f"has no action head for {space}{where}")
