"""Offline data: recorded episodes to training batches, without executing anything in them.

Nothing here imports torch, but `breadbox_offline.cloning`.
"""

from breadbox_offline.batch import OfflineBatch
from breadbox_offline.dataset import Dataset
from breadbox_offline.episode import Episode
from breadbox_offline.episode_buffer import AddOutcome, EpisodeBuffer
from breadbox_offline.errors import OfflineDataError, ValidationError
from breadbox_offline.mixing import BufferMixer, MixedLease
from breadbox_offline.multi_agent import MultiAgentEpisode
from breadbox_offline.options import MappingOptions, RowGrouping
from breadbox_offline.pipeline import Draft, Pipeline, PipelineContext, Stage
from breadbox_offline.prefetch import Prefetcher
from breadbox_offline.prelearner import (
    InputMode,
    ModuleSnapshot,
    OfflinePreLearner,
    PreLearnerConfig,
)
from breadbox_offline.report import (
    Finding,
    FindingKind,
    FindingPolicy,
    ValidationPolicy,
    ValidationReport,
)
from breadbox_offline.sampling import (
    SequenceSampling,
    ShortWindow,
    StepSampling,
    epoch_positions,
    sample_moments,
    sample_rows,
    sample_sequences,
    sample_steps,
)
from breadbox_offline.schema import OfflineSchema
from breadbox_offline.stages import default_pipeline
from breadbox_offline.writers import write_episodes

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
    "MultiAgentEpisode",
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
