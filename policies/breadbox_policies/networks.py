"""The policies of this package, and any policy by name."""

import importlib
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, cast

import gymnasium
import torch
from torch import Tensor, nn

from breadbox.model.errors import InvalidRequestError
from breadbox_policies.actions import ActionHead, make_action_head
from breadbox_policies.encoders import (
    ObservationEncoder,
    VectorFlattener,
    has_picture,
    image_parts,
    initialise,
    mlp,
)
from breadbox_policies.protocol import ActResult, Evaluation, PolicyModule, State, Tree


class _HeadPolicy(PolicyModule):
    """Base of policies with an action head: subclasses compute its inputs, and the value."""

    head: ActionHead

    @abstractmethod
    def _step(self, obs: Tree, state: State, first: Tensor) -> tuple[Tensor, Tensor, State]:
        """Return the head's inputs [B, n], the values [B], and the state after the step."""

    def _sequence(self, obs: Tree, state: State, first: Tensor) -> tuple[Tensor, Tensor, State]:
        """Return what `_step` does, for all steps [B, T]."""
        return self._step(obs, state, first)

    def initial_state(self, batch_size: int) -> State:
        """Return None: there is no memory."""
        return None

    def act(
        self,
        obs: Tree,
        state: State,
        first: Tensor,
        *,
        generator: torch.Generator | None = None,
        greedy: bool = False,
    ) -> ActResult:
        """See `Policy.act`."""
        inputs, value, state = self._step(obs, state, first)
        action, log_prob = self.head.choose(inputs, generator, greedy=greedy)
        return ActResult(action, log_prob, value, state)

    def evaluate(self, obs: Tree, action: Tree, state: State, first: Tensor) -> Evaluation:
        """See `Policy.evaluate`."""
        inputs, value, state = self._sequence(obs, state, first)
        judged = self.head.judge(inputs, action)
        return Evaluation(judged.log_prob, judged.entropy, value, state)

    def update_statistics(self, batch: Any) -> None:
        """See `Policy.update_statistics`."""
        for module in self.modules():
            if isinstance(module, VectorFlattener):
                module.update_statistics(batch.obs)


class MlpPolicy(_HeadPolicy):
    """Two tanh networks without memory, for action and value; sharing features does more harm.

    With `normalize_observations` the numbers of observations get mean 0 and deviation 1, by
    statistics of the learner's batches, and are clipped at `observation_clip`.
    """

    def __init__(
        self,
        observation_space: "gymnasium.Space[object]",
        action_space: "gymnasium.Space[object]",
        hidden_sizes: Sequence[int] = (64, 64),
        normalize_observations: bool = False,
        observation_clip: float = 10.0,
    ) -> None:
        super().__init__()
        clip = observation_clip if normalize_observations else None
        self._flattener = VectorFlattener(observation_space, clip)
        self.head = make_action_head(action_space)
        input_count = self._flattener.output_count
        # A small gain starts the policy near uniform; the value starts near zero.
        self.actor = mlp(input_count, hidden_sizes, self.head.input_count, gain=0.01)
        self.critic = mlp(input_count, hidden_sizes, 1, gain=1.0)

    def _step(self, obs: Tree, state: State, first: Tensor) -> tuple[Tensor, Tensor, State]:
        features = self._flattener(obs)
        return self.actor(features), self.critic(features).squeeze(-1).float(), None


class LstmPolicy(_HeadPolicy):
    """Convolutions and linear layers, then one LSTM; state (hidden, cell), [B, memory_count].

    `normalize_observations` is as in `MlpPolicy`, for all but images.
    """

    def __init__(
        self,
        observation_space: "gymnasium.Space[object]",
        action_space: "gymnasium.Space[object]",
        feature_count: int = 128,
        memory_count: int = 128,
        normalize_observations: bool = False,
        observation_clip: float = 10.0,
    ) -> None:
        super().__init__()
        clip = observation_clip if normalize_observations else None
        self.encoder = ObservationEncoder(observation_space, feature_count, clip)
        self.head = make_action_head(action_space)
        self.memory_count = memory_count
        self.cell = nn.LSTMCell(self.encoder.output_count, memory_count)
        for name, parameter in self.cell.named_parameters():
            nn.init.zeros_(parameter) if "bias" in name else nn.init.orthogonal_(parameter)
        self.actor = initialise(nn.Linear(memory_count, self.head.input_count), 0.01)
        self.critic = initialise(nn.Linear(memory_count, 1), 1.0)

    def initial_state(self, batch_size: int) -> State:
        """Return zeros, on the policy's device."""
        zeros = torch.zeros(batch_size, self.memory_count, device=self.cell.weight_ih.device)
        return (zeros, zeros.clone())

    def _step(self, obs: Tree, state: State, first: Tensor) -> tuple[Tensor, Tensor, State]:
        hidden, cell = self._remember(self.encoder(obs), state, first)
        value = self.critic(hidden).squeeze(-1).float()
        return self.actor(hidden), value, (hidden.float(), cell.float())

    def _sequence(self, obs: Tree, state: State, first: Tensor) -> tuple[Tensor, Tensor, State]:
        # Only the LSTM goes through time; the other layers get all steps at once.
        features = self.encoder(obs)
        remember = self._remember_stretches if features.device.type == "cpu" else self._step_by_step
        hidden, state = remember(features, state, first)
        return self.actor(hidden), self.critic(hidden).squeeze(-1).float(), state

    def _step_by_step(
        self, features: Tensor, state: State, first: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        hidden_by_step = []
        for step in range(features.shape[1]):
            state = self._remember(features[:, step], state, first[:, step])
            hidden_by_step.append(state[0])
        return torch.stack(hidden_by_step, 1), state

    def _remember_stretches(
        self, features: Tensor, state: State, first: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Do the same faster on a CPU: one fused call per stretch in which no episode starts."""
        starts = [0, *((first[:, 1:].any(0).nonzero().flatten() + 1).tolist())]
        ends = [*starts[1:], features.shape[1]]
        weights = [self.cell.weight_ih, self.cell.weight_hh, self.cell.bias_ih, self.cell.bias_hh]
        stretches = []
        with torch.autocast("cpu", enabled=False):  # The fused call takes only one type.
            for start, end in zip(starts, ends, strict=True):
                keep = (~first[:, start]).unsqueeze(-1)
                before = [(part.float() * keep).unsqueeze(0) for part in state]
                stretch = features[:, start:end].float()
                hidden, last_hidden, last_cell = torch.lstm(
                    stretch, before, weights, True, 1, 0.0, self.training, False, True
                )
                stretches.append(hidden)
                state = (last_hidden.squeeze(0), last_cell.squeeze(0))
        return torch.cat(stretches, 1), state

    def _remember(self, features: Tensor, state: State, first: Tensor) -> tuple[Tensor, Tensor]:
        keep = (~first).unsqueeze(-1)
        hidden, cell = self.cell(features, (state[0] * keep, state[1] * keep))
        return hidden, cell


class ConvLstmPolicy(LstmPolicy):
    """An `LstmPolicy` that requires images."""

    def __init__(
        self,
        observation_space: "gymnasium.Space[object]",
        action_space: "gymnasium.Space[object]",
        feature_count: int = 256,
        memory_count: int = 256,
        **options: Any,
    ) -> None:
        if not image_parts(observation_space):
            raise InvalidRequestError(
                "observation_space",
                f"holds no uint8 image, got {observation_space}; an image of floats has to come "
                "as uint8, from 0 to 255, and what is none goes to the policy 'lstm' or 'mlp'",
            )
        super().__init__(observation_space, action_space, feature_count, memory_count, **options)


class UniformPolicy(_HeadPolicy):
    """Uniform over choices, normal around boxes' middles, value 0; greedy: first choice, middle."""

    def __init__(
        self, observation_space: "gymnasium.Space[object]", action_space: "gymnasium.Space[object]"
    ) -> None:
        super().__init__()
        del observation_space
        self.head = make_action_head(action_space)

    def _step(self, obs: Tree, state: State, first: Tensor) -> tuple[Tensor, Tensor, State]:
        inputs = torch.zeros(*first.shape, self.head.input_count, device=first.device)
        return inputs, torch.zeros(first.shape, device=first.device), None


_POLICIES = {
    "mlp": MlpPolicy,
    "lstm": LstmPolicy,
    "conv_lstm": ConvLstmPolicy,
    "random": UniformPolicy,
}


def policy_names() -> list[str]:
    """Return the names that `make_policy` knows, besides `module:factory`."""
    return ["auto", *_POLICIES]


def make_policy(
    name: str,
    observation_space: "gymnasium.Space[object]",
    action_space: "gymnasium.Space[object]",
    **options: object,
) -> PolicyModule:
    """Build a policy with fresh weights, drawn from torch's global generator, on the CPU.

    The name is "auto" ("conv_lstm" for images, else "mlp"), "mlp", "lstm", "conv_lstm", "random",
    or your own `module:factory`, which gets the same arguments. Spaces are those of one
    environment, options the policy's keyword arguments. Raises `InvalidRequestError` if they do
    not fit.
    """
    if name == "auto":
        name = "conv_lstm" if has_picture(observation_space) else "mlp"
    factory: Any = _POLICIES.get(name)
    if factory is None:
        module_name, _, attribute = name.partition(":")
        if not attribute:
            known = ", ".join(policy_names())
            raise InvalidRequestError(
                "policy", f"{name!r} is not one of {known}, nor module:factory"
            )
        try:
            factory = getattr(importlib.import_module(module_name), attribute)
        except (ImportError, AttributeError) as error:
            raise InvalidRequestError("policy", f"{name!r} cannot be loaded: {error}") from error
    try:
        return cast(PolicyModule, factory(observation_space, action_space, **options))
    except TypeError as error:
        raise InvalidRequestError("policy_options", f"do not fit {name!r}: {error}") from error
