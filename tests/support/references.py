"""References to fragments that no store has, told apart by their index."""

from collections.abc import Sequence
from dataclasses import replace

from breadbox.model.types import FragmentMetadata, FragmentReference, PayloadReference


def references(count: int) -> list[FragmentReference]:
    return [
        FragmentReference(
            FragmentMetadata(
                worker_id="w",
                fragment_index=number,
                session_id="s",
                model_version_min=0,
                model_version_max=0,
                payload=PayloadReference(f"{number:032x}", 1),
                step_count=1,
            ),
            chunk_id=number,
            staleness_when_granted=0,
            use_count=1,
        )
        for number in range(count)
    ]


def groups(*member_counts: int) -> list[FragmentReference]:
    """References to groups, which are a chunk each; `numbers` tells all their members apart."""
    sizes = [chunk for chunk, count in enumerate(member_counts) for _ in range(count)]
    return [
        replace(
            each,
            metadata=replace(each.metadata, worker_id=f"g{chunk}", discontinuity=True),
            chunk_id=chunk,
        )
        for each, chunk in zip(references(len(sizes)), sizes, strict=True)
    ]


def numbers(job: Sequence[FragmentReference]) -> list[int]:
    return [reference.metadata.fragment_index for reference in job]
