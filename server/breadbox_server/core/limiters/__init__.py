"""Who may proceed: one module per limiter, all behind `interface.Limiter`.

A new limiter is one new module, its limits in `core.config`, and one new line in `make_limiter`.
"""

from breadbox_server.core.limiters.interface import Flow, Limiter
from breadbox_server.core.limiters.minimum_chunks import MinimumChunksLimiter
from breadbox_server.core.limiters.sample_to_insert_ratio import SampleToInsertRatioLimiter
from breadbox_server.core.model.config import LimiterConfig, MinimumChunksConfig

__all__ = ["Flow", "Limiter", "make_limiter"]


def make_limiter(config: LimiterConfig) -> Limiter:
    """Make the limiter that a configuration describes."""
    if isinstance(config, MinimumChunksConfig):
        return MinimumChunksLimiter(config)
    return SampleToInsertRatioLimiter(config)
