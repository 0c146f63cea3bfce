"""One rank of a learner in a process of its own, started by torchrun or as torchrun would.

Joins the others over gloo, takes its shares of some draws, and prints one JSON object about it:
python rank_process.py ADDRESS FRAGMENTS_PER_DRAW DRAWS
"""

import json
import sys

import torch

import breadbox
from breadbox_learner.ranks import joined
from breadbox_learner.settings import membership_from_environment
from breadbox_learner.training.batching import EpisodeReturns
from breadbox_learner.training.source import LeaseSource, Share

RANK_LIMIT_S = 60.0


def main(address: str, fragments_per_draw: int, draws: int) -> None:
    membership = membership_from_environment()
    returns = EpisodeReturns(window=10_000)
    own: list[float] = []
    seen: list[tuple[str, str, int]] = []
    sizes = []
    with (
        breadbox.connect(address) as client,
        joined(membership, device=torch.device("cpu"), limit_s=RANK_LIMIT_S) as ranks,
    ):
        # Ranks meet here once; asking for their shares they say nothing to each other.
        nonce = ranks.from_main(f"made-by-rank-{membership.rank}".encode()).decode()
        source = LeaseSource(
            client,
            fragment_count=fragments_per_draw,
            share=Share(membership.rank, membership.world_size, nonce),
            prefetch_batches=1,
        )
        for _ in range(draws):
            fetched = source.next(lambda: False)
            assert fetched is not None
            batch = fetched.batch
            names = zip(batch.session_ids, batch.worker_ids, batch.fragment_indices, strict=True)
            seen += names
            sizes.append(len(batch))
            own += [value for _, value in returns.ended_in(batch)]
            fetched.release(True)
        source.close()
        mine = torch.tensor(own, dtype=torch.float64)
        sys.stdout.write(
            json.dumps(
                {
                    "rank": membership.rank,
                    "nonce": nonce,
                    "seen": seen,
                    "sizes": sizes,
                    "own": own,
                    "gathered": ranks.gathered(mine).tolist(),
                    # Unequal lengths: rank 1 has none.
                    "uneven": ranks.gathered(
                        torch.full(
                            (membership.rank - 1 if membership.rank else 1, 2), membership.rank
                        )
                    ).tolist(),
                    "none": ranks.gathered(torch.zeros(0, 2)).tolist(),
                    "summed": float(ranks.sum(mine.sum())),
                    "largest": ranks.largest(membership.rank),
                }
            )
            + "\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
