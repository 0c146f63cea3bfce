"""`OfflineBatch`: what one call of the pre-learner gives a learner."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from breadbox.model import trees
from breadbox.model.summaries import summary
from breadbox.model.trees import Tree
from breadbox_offline.episodes.episode import Episode


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineBatch:
    """One batch of tensors (or arrays) per module. Steps are counted without padding."""

    modules: Mapping[str, Mapping[str, Tree]]
    """Per module and column."""
    env_step_count: int = 0
    """Environment steps; the steps that several agents took at one moment count once."""
    agent_step_counts: Mapping[str, int] = field(default_factory=dict)
    """Per module in the batch, the steps of the agents that train it."""
    left_out_modules: tuple[str, ...] = ()
    """Modules that are not to be trained; nothing of them is in the batch."""
    model_version: int | None = None
    """Version of the weights that stages of the pipeline used."""

    def __repr__(self) -> str:
        """Name the leaves with their dtypes and shapes, in one line."""
        return summary("OfflineBatch", [f"{self.env_step_count} environment steps"], self.modules)

    @property
    def agent_step_count(self) -> int:
        """Steps of all agents together."""
        return sum(self.agent_step_counts.values())

    def flat(self) -> dict[str, Any]:
        """One level: `module/column` or `module/column/key` to array, as RLlib names them."""
        return {
            "/".join(map(str, (module, *trees.path_parts(path)))): leaf
            for module, batch in self.modules.items()
            for path, leaf in trees.leaves(batch)
        }


def count_env_steps(episodes: Iterable[Episode]) -> int:
    """Environment steps of agents' episodes.

    Steps of different agents in one episode at the same time are one step of the environment; a
    step that was drawn twice counts twice.
    """
    total = 0
    drawn: dict[tuple[str, int], Counter[str]] = {}
    for episode in episodes:
        if episode.agent_id is None:
            total += len(episode)
            continue
        for t in range(episode.t_started, episode.t):
            drawn.setdefault((episode.id, t), Counter())[episode.agent_id] += 1
    return total + sum(max(agents.values()) for agents in drawn.values())
