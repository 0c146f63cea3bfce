"""Run stages `(draft, context)` from episodes to one batch per module; none changes an episode."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from breadbox.model import trees
from breadbox.model.summaries import summary
from breadbox.model.trees import Tree
from breadbox_offline.episodes.episode import Episode


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineBatch:
    """Tensors (or arrays) by module and column. Steps are counted without padding."""

    modules: Mapping[str, Mapping[str, Tree]]
    """Trees by module and column."""
    env_step_count: int = 0
    """Number of environment steps; steps of several agents at one moment count once."""
    agent_step_counts: Mapping[str, int] = field(default_factory=dict)
    """Number of steps of the agents that train a module, by module in the batch."""
    left_out_modules: tuple[str, ...] = ()
    """Modules that are not trained; the batch has no data of them."""
    model_version: int | None = None
    """Version of the weights that stages of the pipeline used."""

    def __repr__(self) -> str:
        """Name the leaves with their dtypes and shapes, in one line."""
        return summary("OfflineBatch", [f"{self.env_step_count} environment steps"], self.modules)

    @property
    def agent_step_count(self) -> int:
        """Number of steps of all agents together."""
        return sum(self.agent_step_counts.values())

    def flat(self) -> dict[str, Any]:
        """Return one level: `module/column` or `module/column/key` to array, with RLlib's names."""
        return {
            "/".join(map(str, (module, *trees.path_parts(path)))): leaf
            for module, batch in self.modules.items()
            for path, leaf in trees.leaves(batch)
        }


def count_env_steps(episodes: Iterable[Episode]) -> int:
    """Return the number of environment steps; a step counts once for all agents, but per draw."""
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
"""Function that returns the values of all T + 1 observations of every episode."""


@dataclass(frozen=True, slots=True)
class RowSpan:
    """The steps of an episode that make one padded row."""

    episode: int
    """Index of the episode in the draft."""
    start: int
    stop: int


@dataclass(slots=True)
class Draft:
    """The data that stages change."""

    episodes: list[Episode]
    """Episodes, one per agent."""
    columns: dict[str, list[Tree]] = field(default_factory=dict)
    """Trees by column, one per episode, leaves [T, ...]."""
    modules: list[str] | None = None
    """Module that each episode trains, or None until a stage decides."""
    rows: list[RowSpan] | None = None
    """Padded rows, in the order of episodes, or None if steps are batched without rows."""
    row_length: int = 0
    row_columns: dict[str, list[Tree]] = field(default_factory=dict)
    """Trees by column, one per row, without a time axis."""
    batches: dict[str, dict[str, Tree]] = field(default_factory=dict)
    """The result: trees by module and column, leaves [N, ...] or [rows, row_length, ...]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineContext:
    """What stages need besides the episodes."""

    initial_states: Mapping[str, Tree] = field(default_factory=dict)
    """State at the start of an episode, without a batch axis, by recurrent module."""
    row_length: int = 0
    """Steps of a padded row for recurrent modules (max_seq_len)."""
    burn_in: int = 0
    """Steps that only warm the state up, at the start of a row that begins in mid-episode."""
    module_of: Mapping[str, str] | Callable[[str], str] | None = None
    """Module by agent, for episodes that name none."""
    values: ValueFunction | None = None
    model_version: int | None = None
    """Version of the weights behind `values` and `initial_states`."""
    device: str = "cpu"

    @property
    def is_stateful(self) -> bool:
        """True if a module is recurrent."""
        return bool(self.initial_states)


Stage = Callable[[Draft, PipelineContext], None]


class Pipeline:
    """Stages in order, with unique names."""

    def __init__(self, stages: Iterable[tuple[str, Stage]] = ()) -> None:
        self._stages = list(stages)
        if len({name for name, _ in self._stages}) != len(self._stages):
            raise ValueError(f"two stages have one name: {self.names}")

    @property
    def names(self) -> list[str]:
        """Names in order."""
        return [name for name, _ in self._stages]

    def __call__(self, episodes: Iterable[Episode], context: PipelineContext) -> Draft:
        """Run all stages over some episodes, which do not change."""
        draft = Draft(list(episodes))
        for _, stage in self._stages:
            stage(draft, context)
        return draft

    def prepend(self, name: str, stage: Stage) -> None:
        """Add a stage before all others."""
        self._insert(0, name, stage)

    def append(self, name: str, stage: Stage) -> None:
        """Add a stage after all others."""
        self._insert(len(self._stages), name, stage)

    def insert_before(self, other: str, name: str, stage: Stage) -> None:
        """Add a stage before another one."""
        self._insert(self._place_of(other), name, stage)

    def insert_after(self, other: str, name: str, stage: Stage) -> None:
        """Add a stage after another one."""
        self._insert(self._place_of(other) + 1, name, stage)

    def remove(self, name: str) -> None:
        """Remove a stage."""
        del self._stages[self._place_of(name)]

    def _place_of(self, name: str) -> int:
        if name not in self.names:
            raise ValueError(f"no stage is named {name!r}; there are {', '.join(self.names)}")
        return self.names.index(name)

    def _insert(self, place: int, name: str, stage: Stage) -> None:
        if name in self.names:
            raise ValueError(f"a stage is named {name!r} already")
        self._stages.insert(place, (name, stage))
