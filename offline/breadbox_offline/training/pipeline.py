"""Stages `(draft, context)` from episodes to one batch per module; none changes an episode."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from breadbox.model import trees
from breadbox.model.summaries import summary
from breadbox.model.trees import Tree
from breadbox_offline.episodes.episode import Episode
from breadbox_offline.episodes.multi_agent import AnyEpisode, flatten_agents


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
    """Count environment steps: agents at one time are one step, a step drawn twice counts twice."""
    total = 0
    drawn: dict[tuple[str, int], Counter[str]] = {}
    for episode in episodes:
        if episode.agent_id is None:
            total += len(episode)
            continue
        for t in range(episode.t_started, episode.t):
            drawn.setdefault((episode.id, t), Counter())[episode.agent_id] += 1
    return total + sum(max(agents.values()) for agents in drawn.values())


DEFAULT_MODULE = "default_policy"

ValueFunction = Callable[[Sequence[Episode]], Sequence[NDArray[Any]]]
"""Values of all T + 1 observations of every episode."""


@dataclass(frozen=True, slots=True)
class RowSpan:
    """The steps of an episode that make one padded row."""

    episode: int
    """Index in the draft."""
    start: int
    stop: int


@dataclass(slots=True)
class Draft:
    """What the stages work on."""

    episodes: list[Episode]
    """One per agent."""
    columns: dict[str, list[Tree]] = field(default_factory=dict)
    """Per column one tree per episode, leaves [T, ...]."""
    modules: list[str] | None = None
    """Per episode, the module that it trains; None until a stage decides."""
    rows: list[RowSpan] | None = None
    """Padded rows, in the order of episodes, or None if steps are batched without rows."""
    row_length: int = 0
    row_columns: dict[str, list[Tree]] = field(default_factory=dict)
    """Per column one tree per row, without a time axis."""
    batches: dict[str, dict[str, Tree]] = field(default_factory=dict)
    """The result: per module and column a tree with leaves [N, ...], or [rows, row_length, ...]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineContext:
    """What stages may need beside the episodes."""

    initial_states: Mapping[str, Tree] = field(default_factory=dict)
    """Per recurrent module, its state at the start of an episode, without a batch axis."""
    row_length: int = 0
    """Steps of a padded row for recurrent modules (max_seq_len)."""
    burn_in: int = 0
    """Steps at the start of a row that begins in mid-episode that only warm the state up."""
    module_of: Mapping[str, str] | Callable[[str], str] | None = None
    """Module of an agent where its episode names none."""
    values: ValueFunction | None = None
    model_version: int | None = None
    """Version of the weights behind `values` and `initial_states`."""
    device: str = "cpu"

    @property
    def is_stateful(self) -> bool:
        """Whether some module is recurrent."""
        return bool(self.initial_states)


Stage = Callable[[Draft, PipelineContext], None]


class Pipeline:
    """Ordered, named stages. Names are unique."""

    def __init__(self, stages: Iterable[tuple[str, Stage]] = ()) -> None:
        self._stages = list(stages)
        if len({name for name, _ in self._stages}) != len(self._stages):
            raise ValueError(f"two stages have one name: {self.names}")

    @property
    def names(self) -> list[str]:
        """Names in order."""
        return [name for name, _ in self._stages]

    def __call__(self, episodes: Iterable[AnyEpisode], context: PipelineContext) -> Draft:
        """Run all stages over some episodes, which stay as they are."""
        draft = Draft(flatten_agents(episodes))
        for _, stage in self._stages:
            stage(draft, context)
        return draft

    def prepend(self, name: str, stage: Stage) -> None:
        """Put a stage before all others."""
        self._insert(0, name, stage)

    def append(self, name: str, stage: Stage) -> None:
        """Put a stage after all others."""
        self._insert(len(self._stages), name, stage)

    def insert_before(self, other: str, name: str, stage: Stage) -> None:
        """Put a stage right before the one called `other`."""
        self._insert(self._place_of(other), name, stage)

    def insert_after(self, other: str, name: str, stage: Stage) -> None:
        """Put a stage right after the one called `other`."""
        self._insert(self._place_of(other) + 1, name, stage)

    def remove(self, name: str) -> None:
        """Take a stage out."""
        del self._stages[self._place_of(name)]

    def _place_of(self, name: str) -> int:
        if name not in self.names:
            raise ValueError(f"no stage is named {name!r}; there are {', '.join(self.names)}")
        return self.names.index(name)

    def _insert(self, place: int, name: str, stage: Stage) -> None:
        if name in self.names:
            raise ValueError(f"a stage is named {name!r} already")
        self._stages.insert(place, (name, stage))
