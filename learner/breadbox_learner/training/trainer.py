"""The session, and the training loop: fetch a batch, train on it, publish, write a record."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum, IntEnum

import torch

from breadbox import Client
from breadbox.model.errors import ClosedError, ReplayBufferError, SessionEndedError
from breadbox.model.types import WorkerSteps
from breadbox.shared.step_ends import ENDS, ends_of, left_out
from breadbox_learner.evaluation import Evaluator
from breadbox_learner.ranks import Ranks
from breadbox_learner.runs import Progress, Record, RunFolderError
from breadbox_learner.settings import LearnSettings
from breadbox_learner.training.batching import Ended, EnvironmentSteps, EpisodeReturns
from breadbox_learner.training.ppo import PpoUpdater, UpdateStatistics
from breadbox_learner.training.source import FetchedBatch, LeaseSource, UnusableShareError
from breadbox_policies import PolicyModule, policy_weights

_log = logging.getLogger(__name__)


class Publisher:
    """Start (or, given its id and version, continue) a session, publish in it, and end it."""

    def __init__(
        self,
        client: Client,
        *,
        session_id: str = "",
        model_version: int = 0,
        take_over: bool = False,
    ) -> None:
        self._client = client
        self._takes_over = take_over
        self.session_id = session_id
        self.model_version = model_version

    def start(self, policy: PolicyModule) -> None:
        """Make the session current and publish the policy as its next version."""
        # A session that is still current continues from its last version, so that its fragments are
        # kept. One that ended is replaced by a new one at that version.
        try:
            self._start(policy)
        except SessionEndedError:
            self.session_id = ""
            self._start(policy)

    def _start(self, policy: PolicyModule) -> None:
        state = self._client.start_session(
            self.session_id or None, model_version=self.model_version, take_over=self._takes_over
        )
        self.session_id = state.session_id
        self.model_version = max(self.model_version, state.model_version or 0)
        self.publish(policy)

    def keep(self, policy: PolicyModule) -> None:
        """Start the session again if the server lost it; raise SessionEndedError if superseded."""
        state = self._client.watch_model()
        current = "" if state is None else state.session_id
        if current == self.session_id:
            return
        if current:
            raise SessionEndedError(self.session_id, current)
        _log.warning("the server has lost session %s; starting it again", self.session_id)
        self._start(policy)

    def publish(self, policy: PolicyModule) -> None:
        """Publish the policy's weights as the next version."""
        self._client.publish(self.session_id, self.model_version + 1, policy_weights(policy))
        self.model_version += 1

    def end(self) -> None:
        """End the session. If the server is unreachable, only log that."""
        try:
            self._client.end_session(self.session_id)
        except ReplayBufferError as error:
            _log.warning("the session could not be ended: %s", error)


class NullPublisher:
    """Publisher of other ranks: count the versions that rank 0 publishes, and send none."""

    def __init__(self, session_id: str, model_version: int) -> None:
        self.session_id = session_id
        self.model_version = model_version

    def publish(self, policy: PolicyModule) -> None:
        """Count the version that rank 0 publishes."""
        self.model_version += 1

    def keep(self, policy: PolicyModule) -> None:
        """Do nothing: rank 0 keeps the session."""


MEANINGFUL_EPISODES = 100
"""Episodes below which a mean return is not compared with the target."""
WORKERS_S = 1.0
"""Seconds between two questions where the steps of workers went; they report every few seconds."""
LAST_EVALUATION_S_MAX = 60.0
"""Seconds that the end of a run waits for evaluations, unless it was stopped."""


class Outcome(Enum):
    """The reason why training ended."""

    TARGET_REACHED = "target_reached"
    UPDATES_DONE = "updates_done"
    TIME_LIMIT = "time_limit"
    STOPPED = "stopped"


class _Vote(IntEnum):
    """A rank's decision about the next update; the largest one of all ranks counts."""

    GO_ON = 0
    SKIP = 1
    """A rank can use nothing of its share of this draw."""
    TARGET_REACHED = 2
    UPDATES_DONE = 3
    TIME_LIMIT = 4
    STOPPED = 5
    STARVED = 6


class StarvedError(ReplayBufferError):
    """No batch came for `wait_limit_s`."""

    def __init__(self, waited_s: float) -> None:
        super().__init__(
            f"no batch for {waited_s:.0f} s (wait_limit_s); "
            "are rollout workers running against this buffer?"
        )
        self.waited_s = waited_s


@dataclass(slots=True)
class TrainerState:
    """Counters of a run, which its checkpoints contain."""

    update: int = 0
    fragments: int = 0
    """Fragments trained on, by all ranks together."""
    steps: int = 0
    """Steps trained on, by all ranks together."""
    trained_s: float = 0.0
    misfits: int = 0
    """Fragments left out because they did not fit, by all ranks together."""
    skipped_draws: int = 0
    """Draws that no rank trained on, because one rank could use nothing of its share."""
    left_out: int = 0
    """Fragments left out because they were too stale at their update, by all ranks together."""


@dataclass(kw_only=True, eq=False)
class Trainer:
    """Run updates until there is a reason to end; call `run` once. Only rank 0 has outputs."""

    settings: LearnSettings
    updater: PpoUpdater
    source: LeaseSource
    publisher: Publisher | NullPublisher
    progress: Progress
    returns: EpisodeReturns
    state: TrainerState
    stopped: Callable[[], bool]
    checkpoint: Callable[[TrainerState], None]
    environment: EnvironmentSteps = field(default_factory=EnvironmentSteps)
    ranks: Ranks = field(default_factory=Ranks)
    evaluations: Evaluator | None = None
    workers: Callable[[], Sequence[WorkerSteps]] = lambda: ()
    """Asks the server where the steps of workers went."""
    clock: Callable[[], float] = time.monotonic
    _seen: Sequence[WorkerSteps] = ()
    """What `workers` returned last."""
    _seen_at: float = -math.inf
    _is_updating: bool = False
    """True in the middle of an update, and after one that failed."""
    _misfits_unsaid: int = 0
    """Fragments that this rank left out of draws that were skipped since the last update."""
    _saving_fails: bool = False
    _is_evaluation_due: bool = False

    def __post_init__(self) -> None:
        self._started_at = self.clock() - self.state.trained_s

    def run(self) -> Outcome:
        """Train; return why it ended. The last whole update has a checkpoint in any case."""
        try:
            outcome = self._train()
        except Exception as error:
            self._save_after_error()
            # A stopped run closes its client if the server is unreachable for too long.
            if isinstance(error, ClosedError) and self.stopped():
                return Outcome.STOPPED
            raise
        self._save()
        if self.evaluations is not None:
            limit_s = 0.0 if outcome is Outcome.STOPPED else LAST_EVALUATION_S_MAX
            self._write_down(self.evaluations.finish(self.stopped, limit_s))
        return outcome

    def _train(self) -> Outcome:
        asked_at = self.clock()
        if not self.state.update:
            self._evaluate()  # The first point of the curve.
        while True:
            # Rank 0 also publishes at its start, and after the server lost its session.
            self.publisher.model_version = self.ranks.largest(self.publisher.model_version)
            fetched, vote = self._fetch(asked_at)
            # Every rank votes once per draw, so that all end with the same draw.
            decision = _Vote(self.ranks.largest(vote))
            waited_s = self.clock() - asked_at
            if decision is _Vote.GO_ON:
                assert fetched is not None
                self._train_on(fetched, waited_s)
                asked_at = self.clock()
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
        return self.clock() - self._started_at

    def _fetch(self, asked_at: float) -> tuple[FetchedBatch | None, _Vote]:
        """Wait for a batch, or a reason to end or skip this draw; the wait began at *asked_at*."""
        vote = self._reason_to_end()
        if vote is not _Vote.GO_ON:
            return None, vote

        def must_give_up() -> bool:
            return self._waiting_vote(asked_at) is not _Vote.GO_ON

        otherwise = _Vote.STOPPED
        try:
            fetched = self.source.next(must_give_up)
        except UnusableShareError as unusable:
            self._misfits_unsaid += unusable.misfit_count
            fetched, otherwise = None, _Vote.SKIP
        except ClosedError:
            if not self.stopped():
                raise
            fetched = None
        if fetched is not None:
            return fetched, _Vote.GO_ON
        vote = self._waiting_vote(asked_at)
        return None, vote if vote is not _Vote.GO_ON else otherwise

    def _waiting_vote(self, asked_at: float) -> _Vote:
        if self.stopped():
            return _Vote.STOPPED
        if self._out_of_time():
            return _Vote.TIME_LIMIT
        waited_s = self.clock() - asked_at
        return _Vote.STARVED if waited_s > self.settings.wait_limit_s else _Vote.GO_ON

    def _reason_to_end(self) -> _Vote:
        settings = self.settings
        if self.stopped():
            return _Vote.STOPPED
        if settings.updates_max and self.state.update >= settings.updates_max:
            return _Vote.UPDATES_DONE
        mean = self.returns.mean
        if (
            settings.target_return is not None
            and mean is not None
            and self.returns.episode_count >= MEANINGFUL_EPISODES
            and mean >= settings.target_return
        ):
            return _Vote.TARGET_REACHED
        return _Vote.TIME_LIMIT if self._out_of_time() else _Vote.GO_ON

    def _out_of_time(self) -> bool:
        limit_s = self.settings.time_limit_s
        return limit_s is not None and self.elapsed_s >= limit_s

    def _train_on(self, fetched: FetchedBatch, waited_s: float) -> None:
        started_at = self.clock()
        settings, batch, number = self.settings, fetched.batch, self.state.update
        train_policy = number >= settings.value_warmup_updates
        version = self.publisher.model_version
        trained = is_published = False
        self._is_updating = True
        try:
            statistics = self.updater.update(batch, number=number, train_policy=train_policy)
            trained = True
            self._is_updating = False
            self.state.update += 1
            ended = self.returns.ended_in(batch)
            seen = self.environment.seen_in(batch)
            step_count = batch.step_count
        finally:
            fetched.release(trained)  # This frees the batch's memory for the next one.
        at_use, at_grant = [version - each for each in fetched.versions], fetched.staleness
        left_out = self.source.take_left_out_count()
        misfits = fetched.misfit_count + self._misfits_unsaid
        self._misfits_unsaid = 0
        # Over the shares of all ranks.
        counts = [len(at_use), step_count, misfits, left_out]
        sums = [*counts, sum(at_use), sum(at_grant), sum(fetched.use_count)]
        summed = self.ranks.sum(torch.tensor(sums, dtype=torch.float64)).tolist()
        fragments, steps, misfits, left_out, at_use_sum, at_grant_sum, use_count_sum = summed
        shares = {
            "staleness_mean": at_use_sum / max(1.0, fragments),
            "staleness_max": self.ranks.largest(max(at_use, default=0)),
            "staleness_at_grant_mean": at_grant_sum / max(1.0, fragments),
            "staleness_at_grant_max": self.ranks.largest(max(at_grant, default=0)),
            "use_count_mean": use_count_sum / max(1.0, fragments),
        }
        self.returns.count(self._of_all_ranks(ended))
        rows = torch.tensor(seen, dtype=torch.int64).reshape(-1, 2)
        self.environment.count(map(tuple, self.ranks.gathered(rows).tolist()))
        self.state.fragments += int(fragments)
        self.state.steps += int(steps)
        self.state.misfits += int(misfits)
        self.state.left_out += int(left_out)
        if train_policy and self.state.update % settings.publish_every == 0:
            self.publisher.publish(self.updater.policy)
            is_published = True
        update_s = self.clock() - started_at
        self._look_at_workers()
        self.progress.write(self._record(fetched, shares, statistics, waited_s, update_s))
        self._is_evaluation_due |= self._is_turn(settings.evaluate_every)
        if is_published and self._is_evaluation_due:
            self._evaluate()
        if self.evaluations is not None:
            self._write_down(self.evaluations.finished())
        if self._is_turn(settings.checkpoint_every):
            self._save_on_the_way()

    def _look_at_workers(self) -> None:
        if self.clock() - self._seen_at < WORKERS_S:
            return
        self._seen_at = self.clock()
        try:
            self._seen = self.workers()
        except ClosedError:
            raise
        except ReplayBufferError as error:
            _log.debug("where the steps of workers went is not known: %s", error)
        else:
            self.environment.report(self._seen)

    def _is_turn(self, every: int) -> bool:
        return bool(every) and self.state.update % every == 0

    def _evaluate(self) -> None:
        self._is_evaluation_due = False
        if self.evaluations is None:
            return
        marks = {
            "time_s": round(self.elapsed_s, 3),
            "update": self.state.update,
            "model_version": self.publisher.model_version,
            "environment_steps": self.environment.total,
        }
        self.evaluations.begin(marks, self.updater.policy)

    def _write_down(self, evaluations: list[Record]) -> None:
        for record in evaluations:
            self.progress.write_evaluation(record)

    def _of_all_ranks(self, ended: list[Ended]) -> list[Ended]:
        identities = torch.tensor([identity for identity, _ in ended], dtype=torch.int64)
        # Returns are sent as the bits of a float64, beside the identities.
        values = torch.tensor([value for _, value in ended], dtype=torch.float64)
        rows = torch.stack([identities, values.view(torch.int64)], dim=1)
        every = self.ranks.gathered(rows)
        values = every[:, 1].contiguous().view(torch.float64)
        return list(zip(every[:, 0].tolist(), values.tolist(), strict=True))

    def _save_on_the_way(self) -> None:
        """Write a checkpoint; if there is no room, training continues without one."""
        try:
            self._save()
        except RunFolderError as error:
            if not self._saving_fails:
                _log.error("training continues without a new checkpoint: %s", error)
            self._saving_fails = True
        else:
            self._saving_fails = False

    def _save_after_error(self) -> None:
        """Save the trained weights, unless an update is incomplete."""
        if self._is_updating or not self.state.update:
            return
        try:
            self._save()
        except (ReplayBufferError, RuntimeError) as error:
            # The first error is the one to raise; a device that failed cannot be read.
            _log.error("no checkpoint of the last update: %s", error)

    def _save(self) -> None:
        self.state.trained_s = self.elapsed_s
        self.checkpoint(self.state)

    def _step_ends(self) -> Record:
        """Return where the steps of workers went since their start, or None for each if unknown."""
        counts = ends_of(self._seen)
        ends = {f"steps_{end}": counts.get(end, 0) if self._seen else None for end in ENDS}
        acted = sum([each.acted_count for each in self._seen]) if self._seen else None
        return {"steps_acted": acted, **ends, "workers_left_out": len(left_out(self._seen))}

    def _record(
        self,
        fetched: FetchedBatch,
        shares: Record,
        statistics: UpdateStatistics,
        waited_s: float,
        update_s: float,
    ) -> dict[str, float | int | str | None]:
        """Return the record: counts and returns of all ranks, times and losses of this one."""
        return {
            "time_s": round(self.elapsed_s, 3),
            "update": self.state.update,
            "model_version": self.publisher.model_version,
            "return_mean_100": self.returns.mean,
            "episode_count": self.returns.episode_count,
            **shares,
            "fetch_wait_s": waited_s,
            "load_s": fetched.load_s,
            "update_s": update_s,
            "fragments": self.state.fragments,
            "steps": self.state.steps,
            "environment_steps": self.environment.total,
            **self._step_ends(),
            "misfits": self.state.misfits,
            "left_out": self.state.left_out,
            "skipped_draws": self.state.skipped_draws,
            "waiting_reason": fetched.waiting_reason,
            **asdict(statistics),
        }
