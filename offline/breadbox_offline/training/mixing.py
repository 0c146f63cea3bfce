"""Mix batches of several buffers by ratio, such as demonstrations and online experience."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from breadbox.client import Client
from breadbox.lease import Lease
from breadbox.model.fragment import Fragment
from breadbox.model.trees import field_of
from breadbox.model.types import ArrayType, FragmentReference
from breadbox.payload.fragments import FIELDS
from breadbox.reading.batches import Batch

_OPTIONAL_FIELDS = frozenset({"in_state", "log_prob", "value", "extras"})
"""Fields that may be None in a batch; they have no axis of varying length."""


@dataclass(slots=True)
class Apportioner:
    """Split batches by shares; later batches make up for what whole chunks do not allow."""

    shares: Mapping[str, float]
    fragments_per_chunk: Mapping[str, int]
    _owed: dict[str, float] = field(init=False)

    def __post_init__(self) -> None:
        total = sum(self.shares.values())
        if min(self.shares.values(), default=0.0) < 0 or not math.isclose(total, 1.0):
            raise ValueError(f"shares must not be negative and sum to 1, got {dict(self.shares)}")
        self._owed = dict.fromkeys(self.shares, 0.0)

    def split(self, fragment_count: int) -> dict[str, int]:
        """Return how many fragments to take from each buffer, in whole chunks."""
        counts = {}
        for buffer, share in self.shares.items():
            self._owed[buffer] += share * fragment_count
            chunk = self.fragments_per_chunk[buffer]
            counts[buffer] = max(0, chunk * math.floor(self._owed[buffer] / chunk + 0.5))
            self._owed[buffer] -= counts[buffer]
        return counts


class MixedLease:
    """Leases of several buffers as a context manager: consumed, or returned on an exception."""

    def __init__(self, client: Client, leases: Mapping[str, Lease], stack: ExitStack) -> None:
        """Take leases from `BufferMixer.fetch`."""
        self._client = client
        self._leases = dict(leases)
        self._stack = stack

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.__exit__(*exc)

    @property
    def references(self) -> list[FragmentReference]:
        """All granted fragments, buffer by buffer."""
        return [reference for lease in self._leases.values() for reference in lease.references]

    @property
    def sources(self) -> list[str]:
        """Name of the buffer of each of `references`."""
        return [buffer for buffer, lease in self._leases.items() for _ in lease.references]

    def fragments(self) -> Iterator[Fragment]:
        """Load the fragments, in the order of `references`."""
        for lease in self._leases.values():
            yield from lease.fragments()

    def load_batch(
        self, *, columns: Sequence[str] | None = None, device: Any = None, seed: int | None = None
    ) -> tuple[Batch, list[str]]:
        """Return one batch of all fragments, shuffled together, and each one's buffer.

        Fragments of another number of steps than most, such as the last one of an import, cannot be
        stacked: another fragment of the same buffer takes the place of each, if one was granted.

        Args:
            columns: Paths of the arrays to load, such as "reward" or "obs.image", or None for those
                that all fragments have. Recorded episodes often lack what rollout workers add:
                log-probabilities, values, recurrent states, extras; the batch then has None for
                them (keys of `extras` are absent). Observations, actions, rewards and flags are
                always loaded.
            device: Device of torch tensors, such as "cpu" or "cuda", or None for numpy arrays.
            seed: Seed of the order, or None for a random one.

        Raises:
            TreeMismatchError: Required fields, shapes or types differ; names the path.
            ReplayBufferError: See `Client.load_batch`.
        """
        references, sources = self.references, self.sources
        order = _stackable(references, sources, np.random.default_rng(seed))
        if columns is None:
            columns = _common_columns(self._client.describe_arrays([references[i] for i in order]))
        batch = self._client.load_batch(
            [references[i] for i in order], device=device, columns=columns
        )
        batch.extras = _without_absent(batch.extras)
        return batch, [sources[i] for i in order]


def _stackable(
    references: Sequence[FragmentReference], sources: Sequence[str], random: np.random.Generator
) -> list[int]:
    """Return the order of a batch; fragments of unusual lengths give way to others."""
    counts = [reference.metadata.step_count for reference in references]
    number = Counter(counts)
    usual = max(number, key=lambda count: (number[count], count), default=0)
    order: list[int] = random.permutation(len(references)).tolist()
    usable: dict[str, list[int]] = {}
    for place in order:
        if counts[place] == usual:
            usable.setdefault(sources[place], []).append(place)
    return [
        place if counts[place] == usual else others[int(random.integers(len(others)))]
        for place in order
        if (others := usable.get(sources[place]))
    ]


def _common_columns(described: Sequence[Mapping[str, ArrayType]]) -> list[str] | None:
    """Return the paths that all fragments have, or None if they have the same ones."""
    common = set(described[0]).intersection(*described)
    if all(name in common or not _is_optional(name) for arrays in described for name in arrays):
        return None
    required = [name for name in FIELDS if not _is_optional(name)]
    return required + sorted(filter(_is_optional, common))


def _is_optional(name: str) -> bool:
    return field_of(name) in _OPTIONAL_FIELDS


def _without_absent(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    kept = {key: _without_absent(branch) for key, branch in tree.items() if branch is not None}
    return {key: branch for key, branch in kept.items() if not isinstance(branch, dict) or branch}


class BufferMixer:
    """Fetch from several buffers by shares."""

    def __init__(self, client: Client, shares: Mapping[str, float]) -> None:
        """Request the buffers' limits.

        Args:
            client: A client of the server that has all of the buffers.
            shares: Part of every batch, by buffer; they sum to 1.

        Raises:
            BufferNotFoundError: There is no such buffer.
            ValueError: A share is negative, or they do not sum to 1.
        """
        self._client = client
        self._apportioner = Apportioner(
            shares,
            {name: client.get_buffer(name).config.fragments_per_chunk or 1 for name in shares},
        )

    def fetch(self, fragment_count: int, max_wait_s: float) -> MixedLease:
        """Lease about `fragment_count` fragments; over many batches the shares are exact.

        It fetches from the buffers one after the other, each for at most `max_wait_s`. If one fetch
        fails, it returns the leases of the others.

        Raises:
            WaitElapsedError: A buffer had too few chunks for all of `max_wait_s`.
            ReplayBufferError: See `Client.fetch`.
        """
        leases: dict[str, Lease] = {}
        with ExitStack() as stack:
            for buffer, count in self._apportioner.split(fragment_count).items():
                if count:
                    lease = self._client.fetch(count, max_wait_s, buffer=buffer)
                    leases[buffer] = stack.enter_context(lease)
            return MixedLease(self._client, leases, stack.pop_all())
