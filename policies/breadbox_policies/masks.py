"""Masks of actions: an entry of the observation says which choices there are at this step."""

import math

import gymnasium
import torch
from torch import Tensor, nn

from breadbox.model.errors import InvalidRequestError
from breadbox_policies.actions import ActionHead
from breadbox_policies.protocol import Tree

_FORBIDDEN = -1e30
"""Logit of a forbidden choice: its probability is exactly 0, and a sum of such is still finite."""


class ActionMask(nn.Module):
    """Leave a policy the choices with a nonzero entry in `obs[key]`, in the order of the inputs."""

    def __init__(
        self, key: str, observation_space: "gymnasium.Space[object]", head: ActionHead
    ) -> None:
        super().__init__()
        count = len(head.choice_counts) and sum(head.choice_counts)
        parts = getattr(observation_space, "spaces", {})
        if not isinstance(observation_space, gymnasium.spaces.Dict) or key not in parts:
            problem = f"{key!r} is no key of the observations, {observation_space}"
        elif not count:
            problem = "needs an action space with choices"
        elif parts[key].shape is None or math.prod(parts[key].shape) != count:
            problem = f"{key!r} needs {count} entries, one for each choice, and is {parts[key]}"
        elif len(parts) == 1:
            problem = f"{key!r} is all that there is to observe"
        else:
            problem = ""
        if problem:
            raise InvalidRequestError("action_mask", problem)
        self.key = key
        self.rest = gymnasium.spaces.Dict({k: part for k, part in parts.items() if k != key})
        """What the networks see: the observations without the mask."""
        self._counts = list(head.choice_counts)
        self.register_buffer("_is_choice", torch.tensor(head.is_choice), persistent=False)
        self._is_choice: Tensor

    def forward(self, inputs: Tensor, obs: Tree) -> Tensor:
        """Return a head's inputs [..., n] with forbidden choices out of reach, float32."""
        allowed = torch.ones_like(inputs, dtype=torch.bool)
        allowed[..., self._is_choice] = self._allowed(obs, inputs.shape[:-1])
        return torch.where(allowed, inputs.float(), _FORBIDDEN)

    def check(self, obs: Tree, acts: Tensor | None) -> None:
        """Raise InvalidRequestError if no action is allowed in a row, of those that act."""
        allowed = self._allowed(obs, obs[self.key].shape[:1])
        parts = torch.split_with_sizes(allowed, self._counts, -1)
        blocked = ~torch.stack([part.any(-1) for part in parts], -1)
        if acts is not None:
            blocked &= acts[:, None]
        if blocked.any():
            row, part = blocked.nonzero()[0].tolist()
            which = f" for part {part} of the action" if len(parts) > 1 else ""
            raise InvalidRequestError(
                "action_mask",
                f"{self.key!r} allows nothing{which} in row {row} of {len(blocked)} observations: "
                "an environment needs at least one action in each step of an episode",
            )

    def _allowed(self, obs: Tree, leading: torch.Size) -> Tensor:
        mask: Tensor = obs[self.key]
        return mask.reshape(*leading, -1) != 0
