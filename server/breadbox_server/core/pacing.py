"""For which group a fetch waits, so that no older one becomes too stale (B35). Pure."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from breadbox_server.core.model.ids import ModelVersion, WorkerId


class Reserved(NamedTuple):
    """A group, or a chunk with a ticket, that is under way."""

    version: ModelVersion
    """The oldest that it can have."""
    name: WorkerId


def must_wait(
    counts: Mapping[ModelVersion, int],
    newest: ModelVersion,
    *,
    version_min: int,
    per_version: int,
    spare: int,
) -> bool:
    """Return whether a fetch waits, as `awaited` says, by how many are under way of each version.

    Of those of a version the last is the first to come too late.
    """
    place = -1
    for version in sorted([each for each in counts if version_min <= each < newest]):
        place += counts[version]
        if place >= per_version * (version - version_min) + spare:
            return True
    return False


def awaited(
    reserved: Iterable[Reserved],
    newest: ModelVersion,
    *,
    version_min: int,
    per_version: int,
    spare: int,
) -> Reserved | None:
    """Return what a fetch waits for before it takes chunks up to version *newest*, or None.

    Chunks are taken in order of version, *per_version* for each version that is published, and a
    chunk can be taken until its version is below `version_min`, which rises by one with each. So
    the i-th of what is under way, the oldest first, comes too late if fewer than i can be taken
    after this fetch: *spare* at the current version, and *per_version* at each that it has left.
    Then the fetch waits for it, as the fetch would take a newer chunk in its place. What is too
    stale already, or no older than what the fetch takes, gains nothing by that.
    """
    older = sorted([each for each in reserved if version_min <= each.version < newest])
    for place, each in enumerate(older):
        if place >= per_version * (each.version - version_min) + spare:
            return each
    return None
