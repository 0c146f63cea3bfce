"""`OfflinePreLearner`: turn recorded data into training batches."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np

from breadbox.model.trees import Tree
from breadbox_offline.episodes.episode import Episode
from breadbox_offline.episodes.episode_buffer import AddOutcome, EpisodeBuffer
from breadbox_offline.episodes.sampling import (
    SequenceSampling,
    StepSampling,
    sample_moments,
    sample_sequences,
    sample_steps,
)
from breadbox_offline.episodes.serialized import map_serialized
from breadbox_offline.episodes.validation import validate_episodes
from breadbox_offline.errors import EpisodeJoinError, SamplingError, SchemaError
from breadbox_offline.report import FindingKind, ValidationPolicy, ValidationReport
from breadbox_offline.rows.assembly import RowAssembler, map_rows
from breadbox_offline.rows.columns import Columns
from breadbox_offline.rows.options import Column, MappingOptions, RowGrouping
from breadbox_offline.rows.sample_batches import map_sample_batches
from breadbox_offline.training.pipeline import (
    Draft,
    OfflineBatch,
    Pipeline,
    PipelineContext,
    ValueFunction,
    count_env_steps,
)
from breadbox_offline.training.stages import STATE_IN, STATE_OUT, default_pipeline

logger = logging.getLogger(__name__)

ITEM = "item"
"""Name of the column of serialized episodes."""
ModulesToTrain = Collection[str] | Callable[[str, Mapping[str, Tree]], bool] | None
"""None for all modules, a collection of those to train, or a function that decides."""


class InputMode(StrEnum):
    """What a call's rows are."""

    COLUMNS = "columns"
    """A row is a step."""
    SAMPLE_BATCHES = "sample_batches"
    """A row is an episode, as RLlib's old stack wrote them."""
    EPISODES = "episodes"
    """The column `item` holds serialized episodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSnapshot:
    """What the pipeline needs of the modules, at one version of their weights."""

    version: int | None = None
    initial_states: Mapping[str, Tree] = field(default_factory=dict)
    """State at the start of an episode, without a batch axis, by recurrent module."""
    values: ValueFunction | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreLearnerConfig:
    """How recorded data becomes batches."""

    train_batch_size: int
    """Steps of a batch; in mode COLUMNS a call's rows are its batch."""
    mode: InputMode | None = None
    """What rows are, or None to find it out from the first call's columns."""
    mapping: MappingOptions = field(default_factory=MappingOptions)
    validation: ValidationPolicy = field(default_factory=ValidationPolicy)
    holds_unfinished: bool = False
    """In mode COLUMNS, make rows of an episode wait for its end in later calls."""
    capacity_steps: int | None = None
    """Steps of the episode buffer, or None for ten batches."""
    seed: int | None = None
    """Seed of the draws, or None for a random one."""
    steps: StepSampling = field(default_factory=StepSampling)
    draws_agents_together: bool = False
    """Draw environment steps with all agents (`sample_moments`); not for recurrent modules."""
    row_length: int = 0
    """For recurrent modules: steps of a row (max_seq_len)."""
    lookback: int = 1
    """For recurrent modules: earlier steps that a sequence keeps as context."""
    burn_in: int = 0
    """For recurrent modules: steps at the start of a row in mid-episode that are not trained on."""
    uses_recorded_states: bool = False
    """Start rows from recorded recurrent states instead of the initial one."""
    modules_to_train: ModulesToTrain = None
    refresh_every: int = 1
    """Number of calls after which `modules` is called again; weights are never older."""
    device: str = "cpu"
    findings_max: int = 1000

    def __post_init__(self) -> None:
        if self.train_batch_size < 1 or self.refresh_every < 1:
            raise ValueError("train_batch_size and refresh_every must be at least 1")


class OfflinePreLearner:
    """Map, validate, buffer, sample and batch; the buffer lasts between calls. Not thread-safe.

    Subclasses may override `map`, `make_buffer`, `make_pipeline`, `should_module_be_updated`.

    Attributes:
        report: Everything found in the data so far.
        buffer: Episodes to draw from; unused in mode COLUMNS.
        pipeline: Stages, which may be exchanged between calls.
    """

    def __init__(
        self, config: PreLearnerConfig, *, modules: Callable[[], ModuleSnapshot] | None = None
    ) -> None:
        """Make a pre-learner; `modules` returns the current modules, for states and values."""
        self.config = config
        self.report = ValidationReport(config.validation, findings_max=config.findings_max)
        self.buffer = self.make_buffer()
        self.pipeline = self.make_pipeline()
        self._mode = config.mode
        self._modules = modules
        self._snapshot = ModuleSnapshot() if modules is None else modules()
        self._call_count = 0
        self._assembler = RowAssembler(config.mapping, self.report)

    def __call__(self, columns: Columns) -> dict[str, Any]:
        """Return `make_batch` in one level, `module/column/leaf` to tensor, for data libraries."""
        return self.make_batch(columns).flat()

    def make_batch(self, columns: Columns) -> OfflineBatch:
        """Add some data and return a batch.

        In mode COLUMNS the batch has these rows, each once and in order. In the other modes the
        episodes go to the buffer, and the batch is drawn from all of it. Raises OfflineDataError
        for malformed data, a finding with policy RAISE, or nothing to draw from.
        """
        mode = self._check_mode(columns)
        self._refresh_modules()
        episodes = self.map(columns, mode)
        if mode is InputMode.COLUMNS:
            if self.config.mapping.grouping == RowGrouping.ASSEMBLE:
                episodes = validate_episodes(episodes, self.report)
            return self.batch_episodes(self._without_states(episodes))
        self.take_in(episodes)
        return self.batch_episodes(self.sample())

    def finish(self) -> OfflineBatch:
        """Return the batch of rows that waited for the rest of their episodes."""
        episodes = validate_episodes(self._assembler.finish(), self.report)
        return self.batch_episodes(self._without_states(episodes))

    def map(self, columns: Columns, mode: InputMode) -> list[Episode]:
        """Return a call's episodes; `OfflineDataError` if malformed or a policy is to raise."""
        assembler = self._assembler if self.config.holds_unfinished else None
        return map_columns(columns, mode, self.config.mapping, self.report, assembler)

    def take_in(self, episodes: list[Episode]) -> list[AddOutcome]:
        """Validate episodes into the buffer; report the others, or raise ValidationError."""
        outcomes = []
        for episode in self._without_states(
            validate_episodes(episodes, self.report, held_digest=self.buffer.held_digest)
        ):
            try:
                outcomes.append(self.buffer.add(episode))
            except EpisodeJoinError as error:
                self.report.note(
                    FindingKind.CONFLICT,
                    error.problem,
                    episode_id=episode.id,
                    agent_id=episode.agent_id,
                    t=episode.t_started,
                )
        return outcomes

    def sample(self) -> list[Episode]:
        """Draw a batch's worth of steps from the buffer, as short episodes.

        Raises SamplingError for an empty buffer, or a recurrent module with agents drawn together.
        """
        config = self.config
        if config.draws_agents_together:
            if self._snapshot.initial_states:
                raise SamplingError("draws_agents_together is not for recurrent modules")
            moments = sample_moments(self.buffer, config.train_batch_size, config.steps)
            return [item for moment in moments for item in moment]
        if not self._snapshot.initial_states:
            return sample_steps(self.buffer, config.train_batch_size, config.steps)
        sampling = SequenceSampling(
            length=config.row_length,
            lookback=config.lookback,
            start_margin=config.burn_in,
            n_step=config.steps.n_step_range[0],
        )
        return sample_sequences(self.buffer, config.train_batch_size, sampling)

    def batch_episodes(self, episodes: Sequence[Episode]) -> OfflineBatch:
        """Run the pipeline over episodes, and leave out the modules that are not trained."""
        if not episodes:
            return OfflineBatch(modules={}, model_version=self._snapshot.version)
        draft = self.pipeline(episodes, self._context())
        kept, left_out = {}, []
        for module_id, batch in draft.batches.items():
            if self.should_module_be_updated(module_id, batch):
                kept[module_id] = batch
            else:
                left_out.append(module_id)
        counts = _count_agent_steps(episodes, draft, kept)
        return OfflineBatch(
            modules=kept,
            env_step_count=count_env_steps(episodes),
            agent_step_counts=counts,
            left_out_modules=tuple(left_out),
            model_version=self._snapshot.version,
        )

    def should_module_be_updated(self, module_id: str, batch: Mapping[str, Tree]) -> bool:
        """Return True if a module is trained on this batch."""
        chosen = self.config.modules_to_train
        if chosen is None:
            return True
        if callable(chosen):
            return bool(chosen(module_id, batch))
        return module_id in chosen

    def make_buffer(self) -> EpisodeBuffer:
        """Return the episode buffer; called once."""
        capacity = self.config.capacity_steps or 10 * self.config.train_batch_size
        return EpisodeBuffer(capacity, seed=self.config.seed)

    def make_pipeline(self) -> Pipeline:
        """Return the pipeline; called once."""
        return default_pipeline()

    def _check_mode(self, columns: Columns) -> InputMode:
        if self._mode is InputMode.EPISODES and ITEM in columns:
            return InputMode.EPISODES
        found = detect_mode(columns, self.config.mapping)
        if self._mode is None:
            self._mode = found
            logger.info("offline data is read in mode %s", found)
        elif self._mode is not found:
            raise SchemaError(f"the columns look like mode {found}, but the mode is {self._mode}")
        return found

    def _refresh_modules(self) -> None:
        is_due = self._call_count > 0 and self._call_count % self.config.refresh_every == 0
        if self._modules is not None and is_due:
            self._snapshot = self._modules()
        self._call_count += 1

    def _without_states(self, episodes: list[Episode]) -> list[Episode]:
        """Remove recorded recurrent states unless they are used: other weights made them."""
        if self.config.uses_recorded_states:
            return episodes
        return [
            replace(
                episode,
                extra_model_outputs={
                    name: output
                    for name, output in episode.extra_model_outputs.items()
                    if name not in (STATE_IN, STATE_OUT)
                },
                in_states={},
            )
            if episode.has_states(STATE_IN, STATE_OUT)
            else episode
            for episode in episodes
        ]

    def _context(self) -> PipelineContext:
        return PipelineContext(
            initial_states=self._snapshot.initial_states,
            row_length=self.config.row_length,
            burn_in=self.config.burn_in,
            module_of=self.config.mapping.module_of,
            values=self._snapshot.values,
            model_version=self._snapshot.version,
            device=self.config.device,
        )


def detect_mode(columns: Columns, mapping: MappingOptions) -> InputMode:
    """Return what columns hold: serialized episodes, whole-episode rows, or steps."""
    if ITEM in columns and mapping.schema.find(Column.REWARDS, columns) is None:
        return InputMode.EPISODES
    rewards = columns[
        mapping.schema.require(Column.REWARDS, columns, "or item, for whole episodes")
    ]
    if isinstance(rewards, dict | tuple):
        raise SchemaError(
            "is nested; wanted numbers", column=mapping.schema.physical(Column.REWARDS)
        )
    first = rewards[0] if len(rewards) else 0.0
    is_sequence = isinstance(first, list | np.ndarray) and np.ndim(first) > 0
    return InputMode.SAMPLE_BATCHES if is_sequence else InputMode.COLUMNS


def map_columns(
    columns: Columns,
    mode: InputMode,
    mapping: MappingOptions,
    report: ValidationReport,
    assembler: RowAssembler | None,
    *,
    first_row: int = 0,
) -> list[Episode]:
    """Return the episodes of some columns; with an assembler, unfinished ones wait for more."""
    if mode is InputMode.EPISODES:
        return map_serialized(columns[ITEM], report, limits=mapping.limits)
    if mode is InputMode.SAMPLE_BATCHES:
        return map_sample_batches(columns, mapping, report)
    if assembler is not None and mapping.grouping == RowGrouping.ASSEMBLE:
        return assembler.add(columns, first_row=first_row)
    return map_rows(columns, mapping, report)


def _count_agent_steps(
    episodes: Sequence[Episode], draft: Draft, modules: Mapping[str, Any]
) -> dict[str, int]:
    """Return steps by module; an episode that a stage lengthened counts its original steps."""
    counts = dict.fromkeys(modules, 0)
    counted = episodes if len(episodes) == len(draft.episodes) else draft.episodes
    for episode, module in zip(counted, draft.modules or [], strict=True):
        if module in counts:
            counts[module] += len(episode)
    return counts
