"""Offline data: recorded episodes to training batches, without executing anything in them."""

from breadbox_learner.offline.batch import OfflineBatch
from breadbox_learner.offline.cloning import CloningConfig, CloningResult, clone_policy
from breadbox_learner.offline.dataset import Dataset
from breadbox_learner.offline.episode import Episode
from breadbox_learner.offline.episode_buffer import AddOutcome, EpisodeBuffer
from breadbox_learner.offline.errors import OfflineDataError, ValidationError
from breadbox_learner.offline.mixing import BufferMixer, MixedLease
from breadbox_learner.offline.multi_agent import MultiAgentEpisode
from breadbox_learner.offline.options import MappingOptions, RowGrouping
from breadbox_learner.offline.pieces import default_pipeline
from breadbox_learner.offline.pipeline import Draft, Piece, Pipeline, PipelineContext
from breadbox_learner.offline.prefetch import Prefetcher
from breadbox_learner.offline.prelearner import (
    InputMode,
    ModuleSnapshot,
    OfflinePreLearner,
    PreLearnerConfig,
)
from breadbox_learner.offline.report import (
    Finding,
    FindingKind,
    FindingPolicy,
    ValidationPolicy,
    ValidationReport,
)
from breadbox_learner.offline.sampling import (
    SequenceSampling,
    ShortWindow,
    StepSampling,
    epoch_positions,
    sample_moments,
    sample_rows,
    sample_sequences,
    sample_steps,
)
from breadbox_learner.offline.schema import OfflineSchema
from breadbox_learner.offline.writers import write_episodes

__all__ = [
    "AddOutcome",
    "BufferMixer",
    "CloningConfig",
    "CloningResult",
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
    "Piece",
    "Pipeline",
    "PipelineContext",
    "PreLearnerConfig",
    "Prefetcher",
    "RowGrouping",
    "SequenceSampling",
    "ShortWindow",
    "StepSampling",
    "ValidationError",
    "ValidationPolicy",
    "ValidationReport",
    "clone_policy",
    "default_pipeline",
    "epoch_positions",
    "sample_moments",
    "sample_rows",
    "sample_sequences",
    "sample_steps",
    "write_episodes",
]
