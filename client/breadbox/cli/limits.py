"""Limits of a buffer as settings: of `breadbox serve`, and of the commands that change a buffer."""

from breadbox.cli.settings import Bytes, Settings, setting
from breadbox.model.presets import PRESETS, Preset
from breadbox.v1 import buffer_pb2

_SAMPLERS = tuple(buffer_pb2.Sampler.DESCRIPTOR.fields_by_name)


class BufferLimits(Settings):
    """Limits, without those that are enums; None for one that is not given.

    No variables: BREADBOX_CAPACITY_CHUNKS is a server's own.
    """

    presets = PRESETS

    preset: Preset | None = setting(None, environment=False)
    """Limits for a kind of learner; other options override them. on-policy: staleness-max 2,
    uses-max 1, sampler uniform, full-policy evict, remover oldest_first. off-policy: staleness-max
    and uses-max without end, capacity-chunks 65536, schema ragged. prioritised: the same with
    sampler prioritised, priority-exponent 0.6. queue: staleness-max without end, uses-max 1,
    full-policy block, sampler oldest_first. stack: the same with sampler newest_first. groups:
    assembly groups, sampler oldest_first, uses-max 1, schema ragged, lead-versions 2,
    staleness-max 8."""
    fragments_per_chunk: int | None = setting(None, environment=False, ge=0)
    """Consecutive fragments of one worker, or members of a group, that are fetched, used and
    evicted together; cannot be changed later. 0, of groups: they never close, and their members are
    rows."""
    group_min: int | None = setting(None, environment=False, ge=0)
    """Members with which a group that is silent for --open-chunk-s is delivered; with fewer it is
    dropped. 0: all of them."""
    drop_equal: str | None = setting(None, environment=False)
    """Name of a number of sequences, such as reward: a group is dropped if all its members have the
    same. Empty: none is."""
    groups_per_version: int | None = setting(None, environment=False, ge=0)
    """Groups that the learner takes for each version: so many tickets are given for each. 0: none
    are given."""
    lead_versions: int | None = setting(None, environment=False, ge=0)
    """Versions that groups with tickets may be ahead of the learner."""
    required_parts: str | None = setting(None, environment=False)
    """Parts with which a member of a group is complete, such as tokens,reward. Empty: its sequence
    alone."""
    capacity_chunks: int | None = setting(None, environment=False, ge=1)
    """Chunks held for fetches; beyond, --full-policy decides."""
    capacity_bytes: Bytes | None = setting(None, environment=False, ge=1)
    """Payload bytes held, such as 8GiB; beyond, --full-policy decides."""
    staleness_max: int | None = setting(None, environment=False, ge=0)
    """Model versions that data may lag behind; staler data is evicted."""
    uses_max: int | None = setting(None, environment=False, ge=1)
    """Deliveries of a chunk before it is removed."""
    remover: str | None = setting(None, environment=False)
    """Which chunks are evicted when there is no room: a name from --sampler; a new chunk may be
    among them."""
    lease_s: float | None = setting(None, environment=False, gt=0)
    """Seconds after which a lease that is not renewed expires."""
    waiters_max: int | None = setting(None, environment=False, ge=1)
    """Fetches that may wait at a time; the next is refused, to be repeated later."""
    leases_max: int | None = setting(None, environment=False, ge=1)
    """Active leases at a time; beyond, fetches wait."""
    workers_max: int | None = setting(None, environment=False, ge=1)
    """Workers (environments), or groups, remembered in a session; one more is refused, unless
    another has nothing in the buffer any more."""
    open_chunk_s: float | None = setting(None, environment=False, gt=0)
    """Seconds without a fragment after which a worker's unfinished chunk is discarded, or an
    unfinished group ends."""
    sampler: str | None = setting(
        None, environment=False, description=f"Which chunks a fetch gets: {', '.join(_SAMPLERS)}."
    )
    priority_exponent: float | None = setting(None, environment=False, ge=0, le=8)
    """Power, 0 to 8, to which prioritised raises priorities; 0: all positive ones are equal."""
    with_replacement: bool | None = setting(None, environment=False)
    """Let a fetch draw a chunk several times; each draw is a use."""
    minimum_chunks: int | None = setting(None, environment=False, ge=0)
    """Chunks that must be held before a fetch is answered."""
