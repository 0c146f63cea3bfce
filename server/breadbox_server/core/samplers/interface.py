"""What a sampler is."""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Protocol

from breadbox_server.core.model.ids import ChunkId, ModelVersion

UsesLeft = Callable[[ChunkId], int]
"""How often a draw may take a chunk; at least 1."""


class Candidate(Protocol):
    """What a sampler may know of a chunk."""

    @property
    def chunk_id(self) -> ChunkId:
        """Unique; ascending in order of arrival."""

    @property
    def version(self) -> ModelVersion:
        """Version of its oldest fragment."""

    @property
    def priority(self) -> float:
        """From 0 to `config.PRIORITY_MAX`; when it changes, the sampler is notified."""

    sampler_position: int
    """The sampler's own note about the chunk; nobody else reads or writes it."""


class Sampler(ABC):
    """Knows the chunks that may be drawn, and draws some of them.

    It is notified of every chunk that enters or leaves, so that it can keep whatever order it
    needs; every method should cost O(1) or a logarithm per chunk. It decides *which* chunks;
    whether a draw may happen at all is the limiter's business.
    """

    @abstractmethod
    def add(self, chunk: Candidate) -> None:
        """Let a chunk, not yet known, be drawn from now on."""

    @abstractmethod
    def remove(self, chunk: Candidate) -> None:
        """Never draw a known chunk again, unless it is added again."""

    def update(self, chunk: Candidate) -> None:  # noqa: B027 - most samplers look at no priority
        """Take note that the priority of a known chunk was set, to what it was or to another."""

    @abstractmethod
    def clear(self) -> None:
        """Forget every chunk."""

    @abstractmethod
    def draw(
        self, count: int, rng: random.Random, uses_left: UsesLeft | None = None
    ) -> list[ChunkId]:
        """Choose `count` chunks, one after the other, in the order of being handed out.

        They stay known. The result depends on nothing but what was added, updated and removed, in
        which order, and on `rng`.

        Args:
            count: At least 1, and no more than there is to be had.
            rng: The only source of randomness.
            uses_left: How often each may be drawn in a draw with replacement, or None if once.
        """

    @abstractmethod
    def probabilities(self, chunks: Iterable[Candidate]) -> list[float]:
        """Give, for each of several known chunks, how likely it is to be the next one drawn.

        Positive, also for those that come only when nothing else is left.
        """

    @abstractmethod
    def order(self) -> list[ChunkId]:
        """List the chunks so that adding them in this order to an empty sampler makes a twin."""
