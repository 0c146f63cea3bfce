"""The loop: wait for a batch, train on it, publish, write down what happened."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Protocol

from breadbox.errors import ReplayBufferError
from breadbox.policies import PolicyModule
from breadbox_learner.ppo import PpoUpdater, UpdateStatistics
from breadbox_learner.progress import Progress
from breadbox_learner.returns import EpisodeReturns
from breadbox_learner.settings import LearnSettings
from breadbox_learner.source import BatchSource, FetchedBatch

MEANINGFUL_EPISODES = 100
"""Episodes below which a mean return is not compared with the target."""


class Outcome(Enum):
    """Why training ended."""

    TARGET_REACHED = "target_reached"
    UPDATES_DONE = "updates_done"
    TIME_LIMIT = "time_limit"
    STOPPED = "stopped"


class StarvedError(ReplayBufferError):
    """No batch came for as long as the learner was allowed to wait."""

    def __init__(self, waited_s: float, reason: str) -> None:
        super().__init__(
            f"no batch for {waited_s:.0f} s{': ' + reason if reason else ''}; "
            "are rollout workers running against this buffer?"
        )
        self.waited_s = waited_s


class ModelPublisher(Protocol):
    """Where versions go."""

    @property
    def model_version(self) -> int:
        """The last published version."""

    def publish(self, policy: PolicyModule) -> None:
        """Publish the next version."""


@dataclass(slots=True)
class TrainerState:
    """Counters of a run; they belong in a checkpoint."""

    update: int = 0
    fragments: int = 0
    steps: int = 0
    trained_s: float = 0.0
    """Seconds of earlier parts of the run."""


class Trainer:
    """Runs updates until there is a reason to end. Use `run` once."""

    def __init__(
        self,
        settings: LearnSettings,
        *,
        policy: PolicyModule,
        updater: PpoUpdater,
        source: BatchSource,
        publisher: ModelPublisher,
        progress: Progress,
        returns: EpisodeReturns,
        state: TrainerState,
        stopped: Callable[[], bool],
        checkpoint: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._policy = policy
        self._updater = updater
        self._source = source
        self._publisher = publisher
        self._progress = progress
        self._returns = returns
        self.state = state
        self._stopped = stopped
        self._checkpoint = checkpoint
        self._clock = clock
        self._started_at = clock()

    def run(self) -> Outcome:
        """Train; the reason why it ended.

        Raises:
            StarvedError: No batch came for `wait_limit_s`.
            ReplayBufferError: The server went away for good, or the session was taken over.
        """
        outcome = self._outcome()
        while outcome is None:
            fetched = self._fetch()
            if fetched is not None:
                self._train_on(fetched)
            outcome = self._outcome()
        if self._checkpoint is not None:
            self._checkpoint()
        return outcome

    @property
    def elapsed_s(self) -> float:
        """Seconds of training, earlier parts of the run included."""
        return self.state.trained_s + self._clock() - self._started_at

    def _fetch(self) -> FetchedBatch | None:
        """Wait for a batch; None when there is a reason to end first."""
        asked_at = self._clock()
        starved = False

        def give_up() -> bool:
            nonlocal starved
            starved = self._clock() - asked_at > self._settings.wait_limit_s
            return starved or self._stopped() or self._out_of_time()

        fetched = self._source.next(give_up)
        if fetched is None and starved:
            raise StarvedError(self._clock() - asked_at, "")
        return fetched

    def _train_on(self, fetched: FetchedBatch) -> None:
        started_at = self._clock()
        trained = False
        try:
            train_policy = self.state.update >= self._settings.value_warmup_updates
            statistics = self._updater.update(fetched.batch, train_policy=train_policy)
            trained = True
        finally:
            fetched.release(trained)
        self.state.update += 1
        self.state.fragments += len(fetched.batch)
        self.state.steps += fetched.batch.step_count
        self._returns.observe(fetched.batch)
        if train_policy and self.state.update % self._settings.publish_every == 0:
            self._publisher.publish(self._policy)
        self._progress.write(self._record(fetched, statistics, self._clock() - started_at))
        every = self._settings.checkpoint_every
        if self._checkpoint is not None and every and self.state.update % every == 0:
            self._checkpoint()

    def _record(
        self, fetched: FetchedBatch, statistics: UpdateStatistics, update_s: float
    ) -> dict[str, float | int | str | None]:
        count = max(1, len(fetched.batch))
        return {
            "time_s": round(self.elapsed_s, 3),
            "update": self.state.update,
            "model_version": self._publisher.model_version,
            "return_mean_100": self._returns.mean,
            "episode_count": self._returns.episode_count,
            "staleness_mean": sum(fetched.staleness) / count,
            "staleness_max": max(fetched.staleness, default=0),
            "use_count_mean": sum(fetched.use_count) / count,
            "fetch_wait_s": fetched.wait_s,
            "load_s": fetched.load_s,
            "update_s": update_s,
            "fragments": self.state.fragments,
            "steps": self.state.steps,
            "waiting_reason": fetched.waiting_reason,
            **asdict(statistics),
        }

    def _outcome(self) -> Outcome | None:
        settings = self._settings
        if self._stopped():
            return Outcome.STOPPED
        if settings.updates_max and self.state.update >= settings.updates_max:
            return Outcome.UPDATES_DONE
        mean = self._returns.mean
        if (
            settings.target_return is not None
            and mean is not None
            and self._returns.episode_count >= MEANINGFUL_EPISODES
            and mean >= settings.target_return
        ):
            return Outcome.TARGET_REACHED
        return Outcome.TIME_LIMIT if self._out_of_time() else None

    def _out_of_time(self) -> bool:
        limit_s = self._settings.time_limit_s
        return limit_s is not None and self.elapsed_s >= limit_s
