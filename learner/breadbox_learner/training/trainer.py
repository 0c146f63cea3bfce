"""The loop: wait for a batch, train on it, publish, write down what happened."""

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum, IntEnum
from typing import Protocol

import torch

from breadbox.model.errors import ClosedError, ReplayBufferError
from breadbox_learner.ranks.ranks import Alone, Ranks
from breadbox_learner.runs.progress import Progress, Record
from breadbox_learner.runs.run_folder import RunFolderError
from breadbox_learner.settings import LearnSettings
from breadbox_learner.training.ppo import PpoUpdater, UpdateStatistics
from breadbox_learner.training.returns import Ended, EnvironmentSteps, EpisodeReturns
from breadbox_learner.training.source import BatchSource, FetchedBatch, UnusableShareError
from breadbox_policies import PolicyModule

_log = logging.getLogger(__name__)

MEANINGFUL_EPISODES = 100
"""Episodes below which a mean return is not compared with the target."""
LAST_EVALUATION_S_MAX = 60.0
"""How long the end of a run waits for evaluations under way; one that is stopped does not."""


class Outcome(Enum):
    """Why training ended."""

    TARGET_REACHED = "target_reached"
    UPDATES_DONE = "updates_done"
    TIME_LIMIT = "time_limit"
    STOPPED = "stopped"


class _Vote(IntEnum):
    """What a rank says about the next update; the largest decides."""

    GO_ON = 0
    SKIP = 1
    """A rank has nothing to train on in its share of this draw."""
    TARGET_REACHED = 2
    UPDATES_DONE = 3
    TIME_LIMIT = 4
    STOPPED = 5
    STARVED = 6


class StarvedError(ReplayBufferError):
    """No batch came for as long as the learner was allowed to wait."""

    def __init__(self, waited_s: float) -> None:
        super().__init__(
            f"no batch for {waited_s:.0f} s (wait_limit_s); "
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


class Evaluations(Protocol):
    """Where versions are evaluated; see `breadbox_learner.evaluation.evaluation.Evaluator`."""

    def begin(self, marks: Record, policy: PolicyModule) -> None:
        """Have the policy evaluated as it is now; does not wait."""

    def finished(self) -> list[Record]:
        """Records of evaluations that ended meanwhile."""

    def finish(self, stopped: Callable[[], bool], limit_s: float) -> list[Record]:
        """Wait for those under way."""


@dataclass(slots=True)
class TrainerState:
    """Counters of a run; they belong in a checkpoint."""

    update: int = 0
    fragments: int = 0
    """Trained on, by all ranks together."""
    steps: int = 0
    """Trained on, by all ranks together."""
    trained_s: float = 0.0
    """Seconds of training."""
    misfits: int = 0
    """Fragments left out because they did not fit, by all ranks together."""
    skipped_draws: int = 0
    """Draws that no rank trained on, since one could use nothing of its share."""


@dataclass(frozen=True, slots=True)
class _Shares:
    """The shares of one draw that all ranks trained on, together."""

    fragments: int
    steps: int
    staleness_mean: float
    staleness_max: int
    use_count_mean: float
    misfits: int


class Trainer:
    """Runs updates until there is a reason to end. Use `run` once.

    With several ranks all of them run one; only rank 0's publisher, progress, checkpoint and
    evaluations do anything.
    """

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
        checkpoint: Callable[[TrainerState], None],
        environment: EnvironmentSteps | None = None,
        ranks: Ranks | None = None,
        evaluations: Evaluations | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._policy = policy
        self._updater = updater
        self._source = source
        self._publisher = publisher
        self._progress = progress
        self._returns = returns
        self._environment = environment or EnvironmentSteps()
        self.state = state
        self._stopped = stopped
        self._checkpoint = checkpoint
        self._ranks = ranks or Alone()
        self._clock = clock
        self._started_at = clock() - state.trained_s
        self._is_updating = False
        """Whether weights stand in the middle of an update; also after one that failed."""
        self._misfits_unsaid = 0
        """Fragments that this rank left out of draws that were skipped since the last update."""
        self._saving_fails = False
        self._evaluations = evaluations
        self._is_evaluation_due = False

    def run(self) -> Outcome:
        """Train; the reason why it ended.

        A checkpoint is left in any case: at the end, and where an error ends the run, of the last
        whole update. Only an error within an update leaves the one before.

        Raises:
            StarvedError: No batch came for `wait_limit_s`.
            RankLostError: Another rank is gone.
            RunFolderError: The last checkpoint cannot be written.
            ReplayBufferError: The server went away for good, or the session was taken over.
        """
        try:
            outcome = self._train()
        except Exception as error:
            self._save_after_error()
            if not self._was_given_up(error):
                raise
            return Outcome.STOPPED
        self._save()
        if self._evaluations is not None:
            limit_s = 0.0 if outcome is Outcome.STOPPED else LAST_EVALUATION_S_MAX
            self._write_down(self._evaluations.finish(self._stopped, limit_s))
        return outcome

    def _train(self) -> Outcome:
        asked_at = self._clock()
        if not self.state.update:
            self._evaluate()  # Where the curve begins.
        while True:
            fetched, vote = self._fetch(asked_at)
            # Asked by every rank once per draw, so that all end with the same one.
            decision = _Vote(self._ranks.largest(vote))
            waited_s = self._clock() - asked_at
            if decision is _Vote.GO_ON:
                assert fetched is not None
                self._train_on(fetched, waited_s)
                asked_at = self._clock()
                continue
            if fetched is not None:
                fetched.release(False)
            if decision is _Vote.STARVED:
                raise StarvedError(waited_s)
            if decision is not _Vote.SKIP:
                return Outcome[decision.name]
            self._misfits_unsaid += 0 if fetched is None else fetched.misfit_count
            self.state.skipped_draws += 1

    @property
    def elapsed_s(self) -> float:
        """Seconds of training, earlier parts of the run included."""
        return self._clock() - self._started_at

    def _fetch(self, asked_at: float) -> tuple[FetchedBatch | None, _Vote]:
        """Wait for a batch, or a reason to end or to skip this draw; waiting since *asked_at*."""
        vote = self._reason_to_end()
        if vote is not _Vote.GO_ON:
            return None, vote

        def must_give_up() -> bool:
            return self._waiting_vote(asked_at) is not _Vote.GO_ON

        otherwise = _Vote.STOPPED
        try:
            fetched = self._source.next(must_give_up)
        except UnusableShareError as unusable:
            self._misfits_unsaid += unusable.misfit_count
            fetched, otherwise = None, _Vote.SKIP
        except ClosedError as error:
            if not self._was_given_up(error):
                raise
            fetched = None
        if fetched is not None:
            return fetched, _Vote.GO_ON
        vote = self._waiting_vote(asked_at)
        return None, vote if vote is not _Vote.GO_ON else otherwise

    def _was_given_up(self, error: Exception) -> bool:
        """Whether a call ended with the run that it was for: its server was away for too long."""
        return isinstance(error, ClosedError) and self._stopped()

    def _waiting_vote(self, asked_at: float) -> _Vote:
        """What to say while there is no batch yet."""
        if self._stopped():
            return _Vote.STOPPED
        if self._out_of_time():
            return _Vote.TIME_LIMIT
        waited_s = self._clock() - asked_at
        return _Vote.STARVED if waited_s > self._settings.wait_limit_s else _Vote.GO_ON

    def _reason_to_end(self) -> _Vote:
        settings = self._settings
        if self._stopped():
            return _Vote.STOPPED
        if settings.updates_max and self.state.update >= settings.updates_max:
            return _Vote.UPDATES_DONE
        mean = self._returns.mean
        if (
            settings.target_return is not None
            and mean is not None
            and self._returns.episode_count >= MEANINGFUL_EPISODES
            and mean >= settings.target_return
        ):
            return _Vote.TARGET_REACHED
        return _Vote.TIME_LIMIT if self._out_of_time() else _Vote.GO_ON

    def _out_of_time(self) -> bool:
        limit_s = self._settings.time_limit_s
        return limit_s is not None and self.elapsed_s >= limit_s

    def _train_on(self, fetched: FetchedBatch, waited_s: float) -> None:
        started_at = self._clock()
        number = self.state.update
        train_policy = number >= self._settings.value_warmup_updates
        trained = is_published = False
        ended: list[Ended] = []
        seen: list[tuple[int, int]] = []
        self._is_updating = True
        try:
            statistics = self._updater.update(
                fetched.batch, number=number, train_policy=train_policy
            )
            trained = True
            self._is_updating = False
            self.state.update += 1
            ended = self._returns.ended_in(fetched.batch)
            seen = self._environment.seen_in(fetched.batch)
            step_count = fetched.batch.step_count
        finally:
            fetched.release(trained)  # The end of the batch: its memory is used again.
        shares = self._shares(fetched, step_count)
        self._returns.count(self._of_all_ranks(ended))
        rows = torch.tensor(seen, dtype=torch.int64).reshape(-1, 2)
        self._environment.count(map(tuple, self._ranks.gathered(rows).tolist()))
        self.state.fragments += shares.fragments
        self.state.steps += shares.steps
        self.state.misfits += shares.misfits
        if train_policy and self.state.update % self._settings.publish_every == 0:
            self._publisher.publish(self._policy)
            is_published = True
        update_s = self._clock() - started_at
        self._progress.write(self._record(fetched, shares, statistics, waited_s, update_s))
        every = self._settings.evaluate_every
        self._is_evaluation_due |= bool(every) and self.state.update % every == 0
        if is_published and self._is_evaluation_due:
            self._evaluate()
        if self._evaluations is not None:
            self._write_down(self._evaluations.finished())
        every = self._settings.checkpoint_every
        if every and self.state.update % every == 0:
            self._save_on_the_way()

    def _evaluate(self) -> None:
        """Have the version that was published last evaluated."""
        self._is_evaluation_due = False
        if self._evaluations is None:
            return
        marks = {
            "time_s": round(self.elapsed_s, 3),
            "update": self.state.update,
            "model_version": self._publisher.model_version,
            "environment_steps": self._environment.total,
        }
        self._evaluations.begin(marks, self._policy)

    def _write_down(self, evaluations: list[Record]) -> None:
        for record in evaluations:
            self._progress.write_evaluation(record)

    def _of_all_ranks(self, ended: list[Ended]) -> list[Ended]:
        """The episodes that ended in the shares of all ranks."""
        identities = torch.tensor([identity for identity, _ in ended], dtype=torch.int64)
        # Returns travel as the bits of a float64, beside the identities.
        values = torch.tensor([value for _, value in ended], dtype=torch.float64)
        rows = torch.stack([identities, values.view(torch.int64)], dim=1)
        every = self._ranks.gathered(rows)
        values = every[:, 1].contiguous().view(torch.float64)
        return list(zip(every[:, 0].tolist(), values.tolist(), strict=True))

    def _shares(self, fetched: FetchedBatch, step_count: int) -> _Shares:
        """Add up what is known of the shares of all ranks."""
        staleness, uses = fetched.staleness, fetched.use_count
        misfits_unsaid = fetched.misfit_count + self._misfits_unsaid
        self._misfits_unsaid = 0
        numbers = [len(staleness), step_count, sum(staleness), sum(uses), misfits_unsaid]
        summed = self._ranks.sum(torch.tensor(numbers, dtype=torch.float64)).tolist()
        fragments, steps, staleness_sum, use_count_sum, misfits = summed
        count = max(1.0, fragments)
        return _Shares(
            fragments=int(fragments),
            steps=int(steps),
            staleness_mean=staleness_sum / count,
            staleness_max=self._ranks.largest(max(staleness, default=0)),
            use_count_mean=use_count_sum / count,
            misfits=int(misfits),
        )

    def _save_on_the_way(self) -> None:
        """Write a checkpoint, if there is room: what was trained goes on without one."""
        try:
            self._save()
        except RunFolderError as error:
            if not self._saving_fails:
                _log.error("training goes on without a new checkpoint: %s", error)
            self._saving_fails = True
        else:
            self._saving_fails = False

    def _save_after_error(self) -> None:
        """Keep what was trained, unless weights stand in the middle of an update."""
        if self._is_updating or not self.state.update:
            return
        try:
            self._save()
        except (ReplayBufferError, RuntimeError) as error:
            # The error that ended the run is the one to tell; a device that failed cannot be read.
            _log.error("no checkpoint of the last update: %s", error)

    def _save(self) -> None:
        self.state.trained_s = self.elapsed_s
        self._checkpoint(self.state)

    def _record(
        self,
        fetched: FetchedBatch,
        shares: _Shares,
        statistics: UpdateStatistics,
        waited_s: float,
        update_s: float,
    ) -> dict[str, float | int | str | None]:
        """What is written down: counts and returns of all ranks, times and losses of this one."""
        return {
            "time_s": round(self.elapsed_s, 3),
            "update": self.state.update,
            "model_version": self._publisher.model_version,
            "return_mean_100": self._returns.mean,
            "episode_count": self._returns.episode_count,
            "staleness_mean": shares.staleness_mean,
            "staleness_max": shares.staleness_max,
            "use_count_mean": shares.use_count_mean,
            "fetch_wait_s": waited_s,
            "load_s": fetched.load_s,
            "update_s": update_s,
            "fragments": self.state.fragments,
            "steps": self.state.steps,
            "environment_steps": self._environment.total,
            "misfits": self.state.misfits,
            "skipped_draws": self.state.skipped_draws,
            "waiting_reason": fetched.waiting_reason,
            **asdict(statistics),
        }
