"""One rank of a learner of sequences in a process of its own.

Takes its share of some draws as micro-batches, and prints what was in each, as one JSON object:
python packed_rank.py ADDRESS RANK RANKS SEQUENCES_PER_DRAW DRAWS TOKENS_MAX
"""

import json
import sys
from typing import Any

import breadbox


def micro_batches(lease: Any, tokens_max: int) -> list[list[dict[str, Any]]]:
    found = []
    for batch in lease.packed(max_tokens=tokens_max):
        ends = batch.cu_seqlens.tolist()
        rows = [
            {
                "group": batch.groups[batch.group[row]],
                "member": reference.metadata.fragment_index,
                "ids": batch.tokens["ids"][ends[row] : ends[row + 1]].tolist(),
                "prompt": batch.context["prompt"][row].tolist(),
                "reward": float(batch.numbers["reward"][row]),
            }
            for row, reference in enumerate(batch.references)
        ]
        assert [*batch.references] == [lease.references[at] for at in batch.position]
        assert ends[-1] == len(batch.tokens["ids"]) == len(batch.position_ids)
        found.append(rows)
    return found


def main(address: str, *numbers: str) -> None:
    rank, ranks, per_draw, draws, tokens_max = map(int, numbers)
    with breadbox.connect(address) as client:
        taken = []
        for draw in range(draws):
            with client.fetch(
                per_draw, max_wait_s=30, rank=rank, world_size=ranks, request_id=f"draw-{draw}"
            ) as lease:
                taken.append(micro_batches(lease, tokens_max))
    sys.stdout.write(json.dumps(taken))


if __name__ == "__main__":
    main(*sys.argv[1:])
