"""Turn recorded episodes into batches, executing nothing of them; only `cloning` needs torch."""

from breadbox_offline.episodes.episode import Episode
from breadbox_offline.episodes.episode_buffer import AddOutcome, EpisodeBuffer
from breadbox_offline.episodes.sampling import (
    SequenceSampling,
    ShortWindow,
    StepSampling,
    epoch_positions,
    sample_moments,
    sample_rows,
    sample_sequences,
    sample_steps,
)
from breadbox_offline.errors import OfflineDataError, ValidationError
from breadbox_offline.files.dataset import Dataset
from breadbox_offline.files.writers import write_episodes
from breadbox_offline.report import (
    Finding,
    FindingKind,
    FindingPolicy,
    ValidationPolicy,
    ValidationReport,
)
from breadbox_offline.rows.options import MappingOptions, OfflineSchema, RowGrouping
from breadbox_offline.training.mixing import BufferMixer, MixedLease
from breadbox_offline.training.pipeline import Draft, OfflineBatch, Pipeline, PipelineContext, Stage
from breadbox_offline.training.prefetch import Prefetcher
from breadbox_offline.training.prelearner import (
    InputMode,
    ModuleSnapshot,
    OfflinePreLearner,
    PreLearnerConfig,
)
from breadbox_offline.training.stages import default_pipeline

__all__ = [
    "AddOutcome",
    "BufferMixer",
    "Dataset",
    "Draft",
    "Episode",
    "EpisodeBuffer",
    "Finding",
    "FindingKind",
    "FindingPolicy",
    "InputMode",
    "MappingOptions",
    "MixedLease",
    "ModuleSnapshot",
    "OfflineBatch",
    "OfflineDataError",
    "OfflinePreLearner",
    "OfflineSchema",
    "Pipeline",
    "PipelineContext",
    "PreLearnerConfig",
    "Prefetcher",
    "RowGrouping",
    "SequenceSampling",
    "ShortWindow",
    "Stage",
    "StepSampling",
    "ValidationError",
    "ValidationPolicy",
    "ValidationReport",
    "default_pipeline",
    "epoch_positions",
    "sample_moments",
    "sample_rows",
    "sample_sequences",
    "sample_steps",
    "write_episodes",
]
