"""A learner's batches without a server: environments in this process."""

from collections.abc import Callable
from dataclasses import dataclass, field

from breadbox.model.fragment import Fragment
from breadbox_learner.training.source import FetchedBatch
from breadbox_policies import PolicyModule
from support.collating import collate
from support.local_rollout import LocalRollout


@dataclass
class LocalSource:
    """Steps environments with the policy that is being trained; notes what is released."""

    rollout: LocalRollout
    policy: PolicyModule
    rounds: int = 4
    released: list[bool] = field(default_factory=list)
    last: list[Fragment] = field(default_factory=list)
    """Fragments of the last batch."""

    def next(self, stopped: Callable[[], bool]) -> FetchedBatch | None:
        if stopped():
            return None
        fragments = self.last = self.rollout.collect(self.policy, self.rounds)
        return FetchedBatch(
            batch=collate(fragments),
            versions=[fragment.model_version_min for fragment in fragments],
            staleness=[0] * len(fragments),
            use_count=[1] * len(fragments),
            load_s=0.0,
            waiting_reason="",
            release=self.released.append,
        )

    def take_left_out_count(self) -> int:
        return 0

    def close(self) -> None:
        self.rollout.close()
