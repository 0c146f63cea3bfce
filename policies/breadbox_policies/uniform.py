"""A policy that does not look."""

import gymnasium
import torch
from torch import Tensor

from breadbox_policies.actions import make_action_head
from breadbox_policies.protocol import ActResult, Evaluation, PolicyModule, State, Tree


class UniformPolicy(PolicyModule):
    """Uniform over choices, and normal around the middle of boxes; the value is 0.

    Greedy, it takes the first of each choice, and the middle (zero, where there are no bounds).

    Useful to fill a buffer, or to see an environment, before there is anything to act with.
    """

    def __init__(
        self,
        observation_space: "gymnasium.Space[object]",
        action_space: "gymnasium.Space[object]",
    ) -> None:
        super().__init__()
        del observation_space
        self.head = make_action_head(action_space)

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
        inputs = torch.zeros(len(first), self.head.input_count, device=first.device)
        action, log_prob = self.head.choose(inputs, generator, greedy=greedy)
        return ActResult(action, log_prob, torch.zeros(len(first), device=first.device), None)

    def evaluate(self, obs: Tree, action: Tree, state: State, first: Tensor) -> Evaluation:
        """See `Policy.evaluate`."""
        inputs = torch.zeros(*first.shape, self.head.input_count, device=first.device)
        judged = self.head.judge(inputs, action)
        value = torch.zeros(first.shape, device=first.device)
        return Evaluation(judged.log_prob, judged.entropy, value, None)
