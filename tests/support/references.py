"""References to fragments that no store has, told apart by their index."""

from collections.abc import Sequence

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


def numbers(job: Sequence[FragmentReference]) -> list[int]:
    return [reference.metadata.fragment_index for reference in job]
