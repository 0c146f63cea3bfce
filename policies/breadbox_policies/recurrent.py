"""Recurrent policies: an encoder, an LSTM, and heads for action and value."""

import gymnasium
import torch
from torch import Tensor, nn

from breadbox.model.errors import InvalidRequestError
from breadbox_policies.actions import make_action_head
from breadbox_policies.encoders import ObservationEncoder, image_layout, initialise
from breadbox_policies.protocol import ActResult, Evaluation, PolicyModule, State, Tree


class LstmPolicy(PolicyModule):
    """Images through convolutions, vectors through a linear layer, then one LSTM.

    The state is (hidden, cell), float32[B, memory_count] each; zeros at the start of an episode.
    """

    def __init__(
        self,
        observation_space: "gymnasium.Space[object]",
        action_space: "gymnasium.Space[object]",
        feature_count: int = 128,
        memory_count: int = 128,
    ) -> None:
        super().__init__()
        self.encoder = ObservationEncoder(observation_space, feature_count)
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
        hidden, cell = self._remember(self.encoder(obs), state, first)
        action, log_prob = self.head.choose(self.actor(hidden), generator, greedy=greedy)
        value = self.critic(hidden).squeeze(-1).float()
        return ActResult(action, log_prob, value, (hidden.float(), cell.float()))

    def evaluate(self, obs: Tree, action: Tree, state: State, first: Tensor) -> Evaluation:
        """See `Policy.evaluate`. Only the LSTM goes through time; the rest sees all steps."""
        features = self.encoder(obs)
        remember = self._remember_stretches if features.device.type == "cpu" else self._step_by_step
        hidden, state = remember(features, state, first)
        judged = self.head.judge(self.actor(hidden), action)
        value = self.critic(hidden).squeeze(-1).float()
        return Evaluation(judged.log_prob, judged.entropy, value, state)

    def _step_by_step(
        self, features: Tensor, state: State, first: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Advance over [B, T] features; the hidden state of every step, and the last state."""
        hidden_by_step = []
        for step in range(features.shape[1]):
            state = self._remember(features[:, step], state, first[:, step])
            hidden_by_step.append(state[0])
        return torch.stack(hidden_by_step, 1), state

    def _remember_stretches(
        self, features: Tensor, state: State, first: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Do the same with one fused call for each stretch in which no episode starts.

        On a CPU this spares most of the cost of small operations. (cuDNN would ask for weights in
        one piece, which a cell's are not.)
        """
        starts = [0, *((first[:, 1:].any(0).nonzero().flatten() + 1).tolist())]
        ends = [*starts[1:], features.shape[1]]
        weights = [self.cell.weight_ih, self.cell.weight_hh, self.cell.bias_ih, self.cell.bias_hh]
        stretches = []
        with torch.autocast("cpu", enabled=False):  # The fused call takes one type only.
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
        """Advance the memory by one step, from zeros where an episode starts."""
        keep = (~first).unsqueeze(-1)
        hidden, cell = self.cell(features, (state[0] * keep, state[1] * keep))
        return hidden, cell


class ConvLstmPolicy(LstmPolicy):
    """An `LstmPolicy` that insists on images."""

    def __init__(
        self,
        observation_space: "gymnasium.Space[object]",
        action_space: "gymnasium.Space[object]",
        feature_count: int = 256,
        memory_count: int = 256,
    ) -> None:
        parts = (
            list(observation_space.values())
            if isinstance(observation_space, gymnasium.spaces.Dict)
            else [observation_space]
        )
        if not any(image_layout(part) for part in parts):
            raise InvalidRequestError(
                "observation_space",
                f"holds no uint8 image, got {observation_space}; an image of floats has to come "
                "as uint8, from 0 to 255, and what is none goes to the policy 'lstm' or 'mlp'",
            )
        super().__init__(observation_space, action_space, feature_count, memory_count)
