"""The rollout worker: environments, policy, fragments and sender, joined in one loop.

The loop's thread owns everything but the watcher, the sender and the reporter, which have a thread
each and meet the loop at a lock. One turn: take a new model if there is one; read what groups
answered; run the policy on those that have waited longest; tell them to step; and only then, while
they do, cut fragments.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from breadbox.fragment import Fragment
from breadbox.heartbeat import Heartbeat
from breadbox.policies import PolicyModule, State, set_policy_weights
from breadbox.types import EpisodeReport
from breadbox_rollout.batching import ReadyQueue
from breadbox_rollout.columns import tree_row
from breadbox_rollout.episodes import EpisodeReporter, EpisodeTracker
from breadbox_rollout.fragmenter import Fragmenter, Step
from breadbox_rollout.group import FailureKind
from breadbox_rollout.inference import Inference, state_arrays
from breadbox_rollout.manifest import Recordings
from breadbox_rollout.metrics import WorkerCounts
from breadbox_rollout.models import NO_MODEL, Model, ModelWatcher
from breadbox_rollout.pool import EnvPool, GroupFailed, GroupReady
from breadbox_rollout.sender import Sender
from breadbox_rollout.slots import Reader, Slot
from breadbox_rollout.throttle import Throttle
from breadbox_rollout.turns import Turn, take_turn

logger = logging.getLogger(__name__)

_POLL_S = 0.2
"""Longest the loop waits for anything before it looks whether it shall stop."""
_SAY_WAITING_FIRST_S = 1.0
"""Shorter waits than this are not worth a line."""
_SAY_WAITING_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """How the loop runs."""

    fragment_steps: int
    batch_env_count: int
    """Environments of a full inference batch."""
    batch_wait_s_max: float
    """Longest time a ready environment waits for others to join its batch."""
    worker_prefix: str
    """Begins the ids of this worker's environments; no two running workers may share it."""
    task: str = "default"
    discount: float = 0.99
    strict_weights: bool = True
    log_interval_s: float = 10.0
    steps_max: int | None = None
    """Steps after which the worker ends by itself; None: never."""


@dataclass(slots=True)
class WorkerStats:
    """Counts over the worker's life. Written by the loop's thread only."""

    batch_count: int = 0
    batch_env_count: int = 0
    """Environments over all batches; by `batch_count`, the mean fill."""
    fragment_count: int = 0
    model_count: int = 0
    blocked_s: float = 0.0
    """Time for which a full sender held up the environments."""
    blocked: bool = False
    """Whether one does so now."""
    failures: Counter[str] = field(default_factory=Counter)
    """Environment failures by kind."""
    returns: list[float] = field(default_factory=list)
    """Of episodes since the last log line."""


class RolloutWorker:
    """Runs environments against the current model until it is told to stop.

    Args:
        pool: Started by the loop; closed by it.
        make_policy: Called with observation and action space once they are known.
        watcher: Started and closed by the caller, as are sender and reporter.
        sender: Where fragments go.
        reporter: Where episodes go.
        options: See there.
        make_inference: Puts the policy on its device.
        clock: Monotonic seconds.
        recordings: Where the processes record episodes; None: nowhere.
        heartbeat: Told at every turn; None: nobody watches.
    """

    def __init__(
        self,
        pool: EnvPool,
        make_policy: Callable[[Any, Any], PolicyModule],
        watcher: ModelWatcher,
        sender: Sender,
        reporter: EpisodeReporter,
        options: WorkerOptions,
        *,
        make_inference: Callable[[PolicyModule], Inference],
        clock: Callable[[], float] = time.monotonic,
        recordings: Recordings | None = None,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self._pool = pool
        self._make_policy = make_policy
        self._make_inference = make_inference
        self._watcher = watcher
        self._sender = sender
        self._reporter = reporter
        self._options = options
        self._clock = clock
        self._recordings = recordings
        self._heartbeat = heartbeat or Heartbeat(None)
        self._model: Model = NO_MODEL
        self._logged_steps = 0
        self._inference: Inference | None = None
        self._ready = ReadyQueue(options.batch_env_count, options.batch_wait_s_max)
        self._slots = [
            [self._make_slot(index) for index in env_indices] for env_indices in pool.groups
        ]
        self._readers = [Reader(slots) for slots in self._slots]
        self._stop = threading.Event()
        self._throttle = Throttle(clock)
        self.stats = WorkerStats()

    def stop(self) -> None:
        """End the loop at its next turn. From any thread, or a signal handler."""
        self._stop.set()

    @property
    def policy(self) -> PolicyModule | None:
        """The policy; None until an environment has told its spaces."""
        return None if self._inference is None else self._inference.policy

    @property
    def step_count(self) -> int:
        """Steps answered so far."""
        return sum(reader.step_count for reader in self._readers)

    def counts(self) -> WorkerCounts:
        """Return what has been done so far. From any thread."""
        return WorkerCounts(
            step_count=self.step_count,
            fragments=self._sender.counts(),
            failures=dict(self.stats.failures),
            waiting_fragment_count=self._sender.waiting_count,
            live_env_count=self._pool.live_env_count,
            blocked_s=self.stats.blocked_s,
        )

    def run(self) -> None:
        """Run until `stop`.

        Raises:
            EnvironmentStartError: No environment starts or ever answers a step, or none is left.
            WeightsMismatchError: Published weights are not those of this policy.
            PolicyOutputError: They have diverged.
            Exception: What ended the thread of the watcher, the sender or the reporter: a bug, told
                here so that it leaves no environments that wait, or report, in vain.
        """
        try:
            with self._pool:
                self._loop()
        finally:
            if self._recordings is not None:
                self._recordings.clean()

    def _loop(self) -> None:
        log_at = self._clock()
        say_at = log_at + _SAY_WAITING_FIRST_S
        while not self._stop.is_set():
            self._heartbeat.beat()
            self._take_model()
            self._read_pool()
            if not self._model.in_session:
                say_at = self._wait_for_session(say_at)
            elif self._may_run():
                self._turn()
            if self._clock() - log_at >= self._options.log_interval_s:
                if self._model.in_session or self.step_count > self._logged_steps:
                    self._log(self._clock() - log_at)
                log_at = self._clock()
            if self._options.steps_max and self.step_count >= self._options.steps_max:
                return

    # Models ------------------------------------------------------------------------------------

    def _take_model(self) -> None:
        if self._inference is None and not self._build_policy():
            return  # No environment has told its spaces yet; until then the watcher keeps it.
        model = self._watcher.take()
        if model is not None:
            self._adopt(model)

    def _build_policy(self) -> bool:
        if self._pool.observation_space is None:
            return False
        policy = self._make_policy(self._pool.observation_space, self._pool.action_space)
        self._inference = self._make_inference(policy)
        for slots in self._slots:
            for slot in slots:
                slot.state = slot.initial_state = self._inference.initial_state
        return True

    def _adopt(self, model: Model) -> None:
        """Make session, version and weights current in one step, between two batches."""
        assert self._inference is not None
        if model.weights is not None:
            set_policy_weights(
                self._inference.policy, model.weights, strict=self._options.strict_weights
            )
        if model.session_id != self._model.session_id:
            what = f"session {model.session_id!r}" if model.in_session else "no session"
            logger.info("now in %s at model version %d", what, model.model_version)
        self._model = model
        self.stats.model_count += 1
        for slots in self._slots:
            for slot in slots:
                slot.fragmenter.staleness_max = model.staleness_max

    def _wait_for_session(self, say_at: float) -> float:
        """Let time pass until a learner is there; says so now and then. Produces nothing."""
        if self._clock() >= say_at:
            if trouble := self._watcher.trouble:
                logger.info("waiting for the server: %s", trouble)
            elif not self._watcher.latest.in_session:
                logger.info("waiting for a learner to start a session")
            elif self._inference is None:
                logger.info("waiting for the first environment to start")
            say_at = self._clock() + _SAY_WAITING_S
        if self._inference is not None:
            self._watcher.wait(_POLL_S)
        return say_at

    # Environments ------------------------------------------------------------------------------

    def _read_pool(self) -> None:
        patience_s = self._ready.patience_s(self._pool.live_env_count, now=self._clock())
        # Without a session there is nothing to hurry for; otherwise no longer than a batch waits.
        wait_s = _POLL_S if patience_s is None else patience_s
        if not self._model.in_session and self._inference is not None:
            wait_s = 0.0  # The wait is for a session then, not for environments.
        for event in self._pool.poll(wait_s):
            if isinstance(event, GroupReady):
                self._group_ready(event)
            else:
                self._group_failed(event)

    def _group_ready(self, event: GroupReady) -> None:
        if event.notes is not None:
            self._read_notes(event.group, event.notes)
        self._report(self._readers[event.group].read(self._pool.arrays(event.group)))
        self._ready.add(event.group, len(self._slots[event.group]), now=self._clock())

    def _read_notes(self, group: int, notes: dict[str, Any]) -> None:
        for failure in notes["failures"]:
            self._count_failure(failure["kind"], failure["detail"])
        for episode in notes["episodes"]:
            self._add_recording(episode)
        for named in notes["tasks"]:
            slot = self._slots[group][named["env"]]
            slot.next_task = named["task"]
            if slot.tracker.is_empty and not slot.awaits_answer:
                slot.tracker.task = named["task"]

    def _add_recording(self, episode: dict[str, Any]) -> None:
        assert self._recordings is not None
        try:
            entry = self._recordings.add(episode)
        except OSError as error:
            self._count_failure(FailureKind.RECORDING_FAILED.value, str(error))
        else:
            logger.info("recorded an episode of return %.1f", entry["return_sum"])

    def _group_failed(self, event: GroupFailed) -> None:
        if event.notes is not None:
            self._read_notes(event.group, event.notes)
        self._count_failure(event.kind.value, event.detail)
        self._ready.remove(event.group)
        if self._recordings is not None:
            for env_index in self._pool.groups[event.group]:
                self._recordings.clean(env_index)
        arrays = self._pool.arrays_or_none(event.group)
        self._report(self._readers[event.group].read_failed(arrays))
        if event.final:
            logger.error("environment process %d is not started again", event.group)

    def _count_failure(self, kind: str, detail: str) -> None:
        self.stats.failures[kind] += 1
        words = self._throttle.words(kind)
        if words is not None:
            logger.warning("environment failed (%s): %s%s", kind, detail, words)

    def _report(self, reports: list[EpisodeReport]) -> None:
        for report in reports:
            self._reporter.put(report)
            self.stats.returns.append(report.return_sum)

    # Turns -------------------------------------------------------------------------------------

    def _may_run(self) -> bool:
        return self._ready.patience_s(self._pool.live_env_count, now=self._clock()) == 0.0

    def _turn(self) -> None:
        """Run the policy once, send its actions, then cut fragments while environments step."""
        assert self._inference is not None
        groups = self._ready.take()
        slots = [slot for group in groups for slot in self._slots[group]]
        states_before = [slot.state for slot in slots]
        turn = take_turn(
            self._pool, groups, self._inference, states_before, self._model.model_version
        )
        for index, slot in enumerate(slots):
            slot.state = turn.decision.states[index]
            self._push(slot, index, turn, states_before[index])
        self.stats.batch_count += 1
        self.stats.batch_env_count += len(slots)

    def _push(self, slot: Slot, index: int, turn: Turn, state_before: State) -> None:
        model = self._model
        wants_state = state_before is not None and slot.fragmenter.wants_state(
            model.session_id, model.model_version
        )
        slot.awaits_answer = True
        fragment = slot.fragmenter.push(
            Step(
                session_id=model.session_id,
                model_version=model.model_version,
                obs=tree_row(turn.obs, index),
                action=tree_row(turn.decision.action, index),
                first=bool(turn.first[index]),
                episode_id=slot.episode_id,
                state=state_arrays(state_before) if wants_state else None,
                log_prob=float(turn.decision.log_prob[index]),
                value=float(turn.decision.value[index]),
            )
        )
        if fragment is not None:
            self._put(fragment)

    def _put(self, fragment: Fragment) -> None:
        """Hand over a fragment; a full sender holds up the loop, and so the environments."""
        self.stats.fragment_count += 1
        began_at = self._clock()
        while not self._sender.put(fragment, _POLL_S):
            # To wait for room is to live: nobody shall end this worker for it.
            self._heartbeat.beat()
            self.stats.blocked = True
            if self._stop.is_set():
                self._sender.count_undelivered()
                return
        self.stats.blocked = False
        self.stats.blocked_s += self._clock() - began_at

    def _make_slot(self, env_index: int) -> Slot:
        worker_id = f"{self._options.worker_prefix}-{env_index}"
        return Slot(
            Fragmenter(worker_id=worker_id, step_count=self._options.fragment_steps),
            EpisodeTracker(worker_id, self._options.task, self._options.discount),
            None,
        )

    # Telling -----------------------------------------------------------------------------------

    def _log(self, interval_s: float) -> None:
        stats, steps = self.stats, self.step_count
        returns, stats.returns = stats.returns, []
        logger.info(
            "%.0f steps/s, %d environments live, batch fill %.1f, model version %d, "
            "%d episodes with mean return %.1f, fragments %s",
            (steps - self._logged_steps) / interval_s,
            self._pool.live_env_count,
            stats.batch_env_count / max(1, stats.batch_count),
            self._model.model_version,
            len(returns),
            float(np.mean(returns)) if returns else float("nan"),
            self._sender.counts(),
        )
        self._logged_steps = steps
