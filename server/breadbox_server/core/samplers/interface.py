"""What a sampler is."""

import random
from abc import ABC, abstractmethod
from typing import Protocol

from breadbox_server.core.ids import ChunkId, ModelVersion


class Candidate(Protocol):
    """What a sampler may know of a chunk."""

    @property
    def chunk_id(self) -> ChunkId:
        """Unique; ascending in order of arrival."""

    @property
    def version(self) -> ModelVersion:
        """Version of its oldest fragment."""

    sampler_position: int
    """The sampler's own note about the chunk; nobody else reads or writes it."""


class Sampler(ABC):
    """Knows the chunks that may be drawn, and draws some of them.

    It is told of every chunk that enters or leaves, so that it can keep whatever order it needs;
    every method should cost O(1) or a logarithm per chunk. It decides *which* chunks; whether a
    draw may happen at all is the limiter's business.
    """

    @abstractmethod
    def add(self, chunk: Candidate) -> None:
        """Let a chunk, not yet known, be drawn from now on."""

    @abstractmethod
    def remove(self, chunk: Candidate) -> None:
        """Never draw a known chunk again, unless it is added again."""

    @abstractmethod
    def draw(self, count: int, rng: random.Random) -> list[ChunkId]:
        """Choose `count` different chunks, in the order in which they are to be handed out.

        They stay known. The result depends on nothing but what was added and removed, in which
        order, and on `rng`.

        Args:
            count: From 1 to the number of chunks known.
            rng: The only source of randomness.
        """

    @abstractmethod
    def order(self) -> list[ChunkId]:
        """List the chunks so that adding them in this order to an empty sampler makes a twin."""
