"""Every limit of a buffer, with its unit, its default and its behaviour at the limit (B15)."""

import math
from dataclasses import dataclass
from typing import Final

from breadbox.model.types import NUMBERS_MAX as NUMBERS_MAX
from breadbox.model.types import AssemblyPolicy as AssemblyPolicy
from breadbox.model.types import FullPolicy as FullPolicy
from breadbox.model.types import LeaseExpiryPolicy as LeaseExpiryPolicy
from breadbox.model.types import MinimumChunks as MinimumChunks
from breadbox.model.types import SampleToInsertRatio as SampleToInsertRatio
from breadbox.model.types import SchemaPolicy as SchemaPolicy
from breadbox.model.types import StaleBy as StaleBy
from breadbox.model.types import StalePolicy as StalePolicy
from breadbox_server.core.model.errors import InvalidArgumentError

DAY_S = 86_400.0
MEMBERS_MAX = 1024
"""Members of a group."""
GROUP_SILENCE_S_MIN = 1.0
"""Shortest `open_chunk_s` of groups: so often each that waits for room looks for it."""
FRAGMENT_INDEX_MAX = 2**48
"""Largest fragment index accepted; a larger one is a caller's bug, not a long run."""
MODEL_VERSION_MAX = 2**53
COUNT_MAX = 2**40
PRIORITY_DEFAULT = 1.0
PRIORITY_MAX = 1e30
"""Largest priority: raised to `PRIORITY_EXPONENT_MAX` and summed over all chunks it stays
finite."""
PRIORITY_EXPONENT_MAX = 8.0
NAME_SIZE_BYTES_MAX = 128
BUFFER_NAME_LENGTH_MAX = 64
NUMBER_NAME_BYTES_MAX = 64
PART_NAME_BYTES_MAX = 64
MEMBER_PARTS_MAX = 64
"""Parts of a member."""
TOKENS = "tokens"
"""Name of the part that a member itself is: its sequence, or fragment."""


LimiterConfig = MinimumChunks | SampleToInsertRatio
_ANY_CHUNK: Final = MinimumChunks(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferConfig:
    """The limits of one buffer; checked on construction."""

    fragments_per_chunk: int = 1
    """Consecutive fragments that make a chunk, or members of a group; 1 to 1024; changes only in
    an empty buffer. 0: groups never close, and their members are rows (B34)."""
    capacity_chunks: int = 4096
    """Chunks held for sampling, and under BLOCK those that a lease may bring back; at the limit
    `full_policy` decides."""
    capacity_bytes: int = 8 * 2**30
    """Payload bytes referred to by open chunks, chunks and leases; at the limit `full_policy`
    decides. Only chunks without a lease are evicted for bytes; where that cannot make room,
    BYTES_FULL."""
    staleness_max: int = 2
    """Versions; a chunk this stale is still served; one version staler is evicted, or `stale`
    decides."""
    uses_max: int = 1
    """Deliveries after which a chunk leaves the buffer."""
    full_policy: FullPolicy = FullPolicy.EVICT
    lease_expiry_policy: LeaseExpiryPolicy = LeaseExpiryPolicy.GIVE_BACK
    lease_s: float = 60.0
    """Seconds a lease lives from grant or renewal; then `lease_expiry_policy` decides."""
    waiters_max: int = 1024
    """Requests that may wait at a time; the next fetch is refused with WAITERS_FULL."""
    leases_max: int = 1024
    """Leases alive at a time; at the limit a fetch waits until one ends."""
    workers_max: int = 65_536
    """Workers, or groups, remembered in a session. The next replaces the longest silent that has
    nothing here, or else is refused with WORKERS_FULL."""
    outcomes_per_worker_max: int = 64
    """Latest indices of a worker of which the first outcome is remembered (B2); an older index
    is answered DUPLICATE without one."""
    requests_remembered_max: int = 4096
    """Ended requests remembered for B12; the oldest is forgotten first."""
    open_chunk_s: float = 600.0
    """Seconds of a worker's silence after which its open chunk is discarded, or of a group's after
    which it ends."""
    retry_delay_s: float = 0.25
    """Seconds for which a producer is asked to wait when there is no room."""
    sampler: str = "uniform"
    """Name of the sampler; see `breadbox_server.core.samplers`."""
    priority_exponent: float = 1.0
    """Power to which `prioritised` raises priorities; 0 to 8. Others ignore it."""
    remover: str = "oldest_first"
    """Name of the sampler that says which chunks leave when there is no room (B19)."""
    with_replacement: bool = False
    """Whether a draw may take a chunk several times, each of which is a use."""
    limiter: LimiterConfig = _ANY_CHUNK
    schema: SchemaPolicy = SchemaPolicy.ONE
    """How alike the schemas of a session's fragments must be."""
    assembly: AssemblyPolicy = AssemblyPolicy.CONSECUTIVE
    """How fragments become chunks; changes only in an empty buffer without a session."""
    group_min: int = 0
    """Members with which a silent group is delivered; with fewer it is dropped. 0: all members."""
    drop_equal: str = ""
    """Name of a number: a group with the same in all members is dropped. Empty: none is."""
    tag: str = ""
    """Name of a number, or text, by which ends of groups are counted. Empty: by none."""
    stale: StalePolicy = StalePolicy.EVICT
    """What becomes of what is staler than `staleness_max`."""
    stale_by: StaleBy = StaleBy.OLDEST
    """From which version staleness counts; changes only in an empty buffer without a session."""
    groups_per_version: int = 0
    """Groups, or chunks, that the learner takes for each version that it publishes: so many tickets
    are given for each version (B33). 0: none are given."""
    lead_versions: int = 0
    """Versions that groups with tickets may be ahead of the learner."""
    required_parts: str = ""
    """Names of the parts with which a member is complete, separated by commas (B34). Empty: its
    sequence alone. Changes only in an empty buffer."""

    def __post_init__(self) -> None:
        self._check_counts()
        self._take_durations()
        self._check_limiter()
        exponent = self.priority_exponent
        if not (isinstance(exponent, int | float) and 0 <= exponent <= PRIORITY_EXPONENT_MAX):
            raise InvalidArgumentError(
                "priority_exponent",
                f"must be from 0 to {PRIORITY_EXPONENT_MAX:g}, got {exponent!r}",
            )
        if self.fragments_per_chunk > MEMBERS_MAX:
            raise InvalidArgumentError("fragments_per_chunk", f"must be at most {MEMBERS_MAX}")
        if self.keeps_rows and (self.assembly is not AssemblyPolicy.GROUPS or self.tickets_max):
            raise InvalidArgumentError(
                "fragments_per_chunk",
                "must be at least 1, but for `assembly` groups without `groups_per_version`",
            )
        if self.assembly is AssemblyPolicy.GROUPS and self.open_chunk_s < GROUP_SILENCE_S_MIN:
            raise InvalidArgumentError(
                "open_chunk_s",
                f"must be at least {GROUP_SILENCE_S_MIN:g} s in a buffer of groups, "
                f"got {self.open_chunk_s:g}",
            )
        if self.group_min > self.fragments_per_chunk:
            raise InvalidArgumentError(
                "group_min",
                f"must be at most fragments_per_chunk ({self.fragments_per_chunk}), "
                f"got {self.group_min}",
            )
        self._check_required_parts()
        for option, name in {"drop_equal": self.drop_equal, "tag": self.tag}.items():
            if name and self.assembly is not AssemblyPolicy.GROUPS:
                raise InvalidArgumentError(option, "is for `assembly` groups alone")
            if len(name.encode(errors="replace")) > NUMBER_NAME_BYTES_MAX:
                raise InvalidArgumentError(
                    option, f"must be at most {NUMBER_NAME_BYTES_MAX} bytes of UTF-8"
                )
        if self.tickets_max > self.workers_max:
            raise InvalidArgumentError(
                "groups_per_version",
                f"times (lead_versions + 1) is {self.tickets_max}, more than the groups remembered "
                f"(workers_max {self.workers_max})",
            )
        if self.stale is StalePolicy.WAIT:
            self._check_wait()

    def _check_required_parts(self) -> None:
        names = self.required_parts.split(",") if self.required_parts else [TOKENS]
        if (
            TOKENS not in names
            or len(set(names)) < len(names)
            or len(names) > MEMBER_PARTS_MAX
            or any([not 0 < len(each.encode()) <= PART_NAME_BYTES_MAX for each in names])
        ):
            raise InvalidArgumentError(
                "required_parts",
                f"must be at most {MEMBER_PARTS_MAX} different names of at most "
                f"{PART_NAME_BYTES_MAX} bytes, with commas between them, and {TOKENS} among them; "
                f"got {self.required_parts!r:.200}",
            )
        if self.required_parts and (self.assembly is not AssemblyPolicy.GROUPS or self.keeps_rows):
            raise InvalidArgumentError(
                "required_parts", "is for `assembly` groups, with at least 1 in fragments_per_chunk"
            )

    def _check_counts(self) -> None:
        smallest = {
            "fragments_per_chunk": 0,
            "capacity_chunks": 1,
            "capacity_bytes": 1,
            "staleness_max": 0,
            "group_min": 0,
            "groups_per_version": 0,
            "lead_versions": 0,
            "uses_max": 1,
            "waiters_max": 1,
            "leases_max": 1,
            "workers_max": 1,
            "outcomes_per_worker_max": 1,
            "requests_remembered_max": 1,
        }
        for name, minimum in smallest.items():
            value = getattr(self, name)
            largest = 2**62 if name == "capacity_bytes" else COUNT_MAX
            if type(value) is not int or not minimum <= value <= largest:
                raise InvalidArgumentError(
                    name, f"must be a whole number from {minimum} to {largest}, got {value!r}"
                )

    def _take_durations(self) -> None:
        """Check the durations, and round them to nanoseconds, as journal and replies hold them."""
        for name in ("lease_s", "open_chunk_s", "retry_delay_s"):
            span_s = getattr(self, name)
            check_duration(name, span_s)
            rounded_s = round(span_s * 1e9) / 1e9
            check_duration(name, rounded_s)
            object.__setattr__(self, name, rounded_s)

    def _check_wait(self) -> None:
        """Refuse limits under which fetches cannot wait for what is under way (B35)."""
        for field_name, is_met, needed in (
            ("groups_per_version", self.groups_per_version > 0, "at least 1"),
            ("uses_max", self.uses_max == 1, "1"),
            (
                "lead_versions",
                self.lead_versions <= self.staleness_max,
                f"at most staleness_max ({self.staleness_max})",
            ),
            (
                "capacity_chunks",
                self.capacity_chunks >= self.tickets_max,
                f"at least (lead_versions + 1) * groups_per_version ({self.tickets_max})",
            ),
        ):
            if not is_met:
                raise InvalidArgumentError(
                    field_name,
                    f"must be {needed} where `stale` is wait, got {getattr(self, field_name)}",
                )

    def _check_limiter(self) -> None:
        limiter = self.limiter
        if isinstance(limiter, MinimumChunks):
            self._check_held("limiter.chunk_count", limiter.chunk_count)
            return
        ratio, error_chunks = limiter.ratio, limiter.error_chunks
        if not (math.isfinite(ratio) and ratio > 0):
            raise InvalidArgumentError("limiter.ratio", f"must be positive, got {ratio!r}")
        if not (math.isfinite(error_chunks) and error_chunks >= max(1.0, ratio)):
            raise InvalidArgumentError(
                "limiter.error_chunks",
                f"must be at least 1 and at least ratio ({ratio}), got {error_chunks!r}",
            )
        self._check_held("limiter.minimum_chunk_count", limiter.minimum_chunk_count)
        lead_max = ratio * limiter.minimum_chunk_count + error_chunks
        if not (math.isfinite(limiter.lead_chunks) and limiter.lead_chunks <= lead_max):
            raise InvalidArgumentError(
                "limiter.lead_chunks",
                f"must be at most ratio * minimum_chunk_count + error_chunks ({lead_max:g}), or "
                f"nothing could ever be drawn; got {limiter.lead_chunks!r}",
            )

    def _check_held(self, name: str, count: int) -> None:
        if not 1 <= count <= self.capacity_chunks:
            raise InvalidArgumentError(
                name, f"must be from 1 to capacity_chunks ({self.capacity_chunks}), got {count}"
            )

    @property
    def keeps_rows(self) -> bool:
        """Whether groups never close: their members are rows (B34)."""
        return self.fragments_per_chunk == 0

    @property
    def parts_of_complete(self) -> tuple[str, ...]:
        """Parts with which a member is complete, as fragments name them."""
        names = self.required_parts.split(",") if self.required_parts else [TOKENS]
        return tuple(["" if each == TOKENS else each for each in names])

    @property
    def tickets_max(self) -> int:
        """Groups that may be open, held or granted at the current version for a ticket (B33)."""
        return (self.lead_versions + 1) * self.groups_per_version

    @property
    def capacity_fragments(self) -> int:
        """Largest fetch, in fragments, that can ever be met (B8)."""
        return self.capacity_chunks * self.fragments_per_chunk


def check_duration(name: str, seconds: float) -> None:
    """Raise InvalidArgumentError unless a duration is a number over 0 and at most a day."""
    if not (isinstance(seconds, int | float) and math.isfinite(seconds) and 0 < seconds <= DAY_S):
        raise InvalidArgumentError(
            name, f"must be over 0 and at most {DAY_S:.0f} s, got {seconds!r}"
        )
