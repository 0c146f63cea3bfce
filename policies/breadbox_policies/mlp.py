"""A feed-forward policy for vector observations."""

from collections.abc import Sequence

import gymnasium
import torch
from torch import Tensor

from breadbox_policies.actions import make_action_head
from breadbox_policies.encoders import VectorFlattener, mlp
from breadbox_policies.protocol import ActResult, Evaluation, PolicyModule, State, Tree


class MlpPolicy(PolicyModule):
    """Two tanh networks, one for the action and one for the value, without memory.

    They share nothing: on small problems a value loss that shapes the actor's features does more
    harm than the shared features do good.
    """

    def __init__(
        self,
        observation_space: "gymnasium.Space[object]",
        action_space: "gymnasium.Space[object]",
        hidden_sizes: Sequence[int] = (64, 64),
    ) -> None:
        super().__init__()
        self._flattener = VectorFlattener(observation_space)
        self.head = make_action_head(action_space)
        input_count = self._flattener.output_count
        # A small gain starts the policy near uniform; the value starts near zero.
        self.actor = mlp(input_count, hidden_sizes, self.head.input_count, gain=0.01)
        self.critic = mlp(input_count, hidden_sizes, 1, gain=1.0)

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
        features = self._flattener(obs)
        action, log_prob = self.head.choose(self.actor(features), generator, greedy=greedy)
        return ActResult(action, log_prob, self.critic(features).squeeze(-1).float(), None)

    def evaluate(self, obs: Tree, action: Tree, state: State, first: Tensor) -> Evaluation:
        """See `Policy.evaluate`."""
        features = self._flattener(obs)
        judged = self.head.judge(self.actor(features), action)
        value = self.critic(features).squeeze(-1).float()
        return Evaluation(judged.log_prob, judged.entropy, value, None)
