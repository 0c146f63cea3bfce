"""The rollout worker: environments, policies, fragments and senders, joined in one loop.

The loop's thread owns all but watchers, senders and reporters. A round: take new models, read
answers, run the policies for the groups that waited longest, ask for steps, and meanwhile cut
fragments. A *group* is a process with environments; a *row* is the steps of one agent of one
environment. A *part* is the rows of one pair of spaces; a *player* has a policy, part and buffer.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from breadbox.model.fragment import Fragment
from breadbox.shared.step_ends import REPORT_S, REPORTED_ENDS, ends_of
from breadbox.shared.throttle import Throttle
from breadbox.transport.heartbeat import Heartbeat
from breadbox_policies import NotRepeatableError
from breadbox_rollout.acting.batching import BatchSize, ReadyQueue
from breadbox_rollout.acting.player import Participant
from breadbox_rollout.environments.failures import FailureKind
from breadbox_rollout.metrics import WorkerCounts
from breadbox_rollout.processes.pool import EnvProcesses, GroupFailed, GroupReady
from breadbox_rollout.recording.recording import Recordings
from breadbox_rollout.sending.models import NO_MODEL, Model
from breadbox_rollout.settings import RolloutSettings

logger = logging.getLogger(__name__)

_POLL_S = 0.2
"""Longest wait of the loop before it checks if it shall stop."""
_TICKET_POLL_S = 0.01
"""The same while an environment waits for a ticket."""
_SAY_WAITING_FIRST_S = 1.0
"""Shorter waits than this at the start are not logged."""
_SAY_WAITING_S = 10.0
"""Seconds between two reasons of a wait that are logged; the same one is logged once."""


@dataclass(slots=True)
class WorkerStats:
    """Counts over the worker's life. Written by the loop's thread only."""

    batch_count: int = 0
    batch_env_count: int = 0
    """Sum of the environments in each batch; divided by `batch_count`, the mean batch size."""
    blocked_s: float = 0.0
    blocked: bool = False
    failures: Counter[str] = field(default_factory=Counter)
    returns: list[float] = field(default_factory=list)
    """Returns of episodes since the last log line."""


class RolloutWorker:
    """Run environments with the current models until it is stopped."""

    def __init__(
        self,
        pool: EnvProcesses,
        players: Sequence[Participant],
        settings: RolloutSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        recordings: Recordings | None = None,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self._pool = pool
        self._players = players
        self._settings = settings
        self._clock = clock
        self._recordings = recordings
        self._heartbeat = heartbeat or Heartbeat(None)
        self._logged_steps = 0
        self._is_running = True
        self._env_count = env_count = sum(len(env_indices) for env_indices in pool.groups)
        fixed_count = settings.batch_envs or settings.rounds_per_version
        self._batch_size = None if fixed_count else BatchSize(env_count)
        self._ready = ReadyQueue(settings.batch_envs or env_count, settings.batch_wait_s)
        self._unpaced: list[int] = []
        """Groups that have answered, and may not act yet."""
        self._stop = threading.Event()
        self._waits_for = ""
        """The reason of the present wait that was logged, or empty."""
        self._say_at = 0.0
        self._throttle = Throttle(clock)
        self._acted_with: Model = NO_MODEL
        """The model of the batch in progress, with `rounds_per_version`."""
        self._rounds_left: int | None = None
        """Rounds until that batch is made, or None once it is sent."""
        self.stats = WorkerStats()

    def stop(self) -> None:
        """End the loop at its next round. From any thread, or a signal handler."""
        self._stop.set()

    @property
    def step_count(self) -> int:
        """Number of answered steps, of all agents."""
        return sum(player.step_count for player in self._players)

    @property
    def fragment_count(self) -> int:
        """Number of fragments cut, whatever their outcome."""
        return sum(player.fragment_count for player in self._players)

    def counts(self) -> WorkerCounts:
        """Return the counts so far. From any thread."""
        return WorkerCounts(
            step_count=self.step_count,
            fragments=self._fragments(),
            steps=self.steps_by_end(),
            slow_env_count=sum(len(player.slow_steps()) for player in self._players),
            failures=dict(self.stats.failures),
            waiting_fragment_count=sum(
                player.sender.waiting_count for player in self._players if player.sender
            ),
            live_env_count=self._pool.live_env_count,
            blocked_s=self.stats.blocked_s,
        )

    def run(self) -> None:
        """Run until `stop`.

        Raises EnvironmentStartError without environments, InvalidRequestError for another policy's
        session, PolicyOutputError on divergence, an error of `PERMANENT` or after a minute of
        refusals, and any bug that ended a thread.
        """
        try:
            with self._pool:
                self._loop()
        finally:
            self._is_running = False
            if self._recordings is not None:
                self._recordings.clean()

    def _loop(self) -> None:
        log_at = reported_at = self._clock()
        self._say_at = log_at + _SAY_WAITING_FIRST_S
        while not self._stop.is_set():
            self._heartbeat.beat()
            if self._are_seated:  # Until the spaces are known, watchers keep the models.
                for player in self._players:
                    player.take_model()
            self._read_pool()
            if not self._in_session:
                self._wait_for_learner()
            elif self._patience_s() == 0.0 and self._has_round():
                self._waits_for = ""
                self._turn()
            if self._clock() - reported_at >= REPORT_S:
                reported_at = self._clock()
                for player in self._players:
                    player.report_steps()
            if self._clock() - log_at >= self._settings.log_interval_s:
                if self._in_session or self.step_count > self._logged_steps:
                    self._log(self._clock() - log_at)
                log_at = self._clock()
            if self._settings.steps_max and self.step_count >= self._settings.steps_max:
                return

    @property
    def _in_session(self) -> bool:
        """True if all policies are in a session; else none of them acts."""
        return all(player.in_session for player in self._players)

    @property
    def _are_seated(self) -> bool:
        return all(player.part for player in self._players)

    def _has_round(self) -> bool:
        """Return True if environments may act; once a version's batch is sent, wait for the next.

        Raises NotRepeatableError if the model changes before its batch is sent.
        """
        if self._settings.rounds_per_version is None:
            return True
        (player,) = self._players
        if self._rounds_left == 0:
            self._rounds_left = None
            for group in range(len(self._pool.groups)):
                for fragment in player.finish(group, self._pool.arrays(group)):
                    self._put(player, fragment)
            self._say_at = self._clock() + _SAY_WAITING_S
        before, model = self._acted_with, player.model
        if self._rounds_left is None and (model is before or not model.model_version):
            self._wait_for_learner()
            return False
        if model is not before:
            if self._rounds_left or before.session_id not in ("", model.session_id):
                raise NotRepeatableError(
                    f"version {model.model_version} of session {model.session_id!r} came while the "
                    f"batch of version {before.model_version} was made: a run is repeatable with "
                    "one learner, of the same --fragments-per-batch, and a worker started with it"
                )
            self._acted_with = model
            assert player.part is not None
            self._rounds_left = self._settings.rounds_per_version // len(player.part.labels)
        return True

    def _wait_for_learner(self) -> None:
        waiting = [player for player in self._players if player.waits_for]
        if self._clock() >= self._say_at:
            troubles = [each.watcher.trouble for each in self._players if each.watcher.trouble]
            reasons = [f"the server: {trouble}" for trouble in troubles]
            reasons += [player.waits_for for player in waiting]
            reasons += [] if self._are_seated else ["the first environment to start"]
            if self._in_session:
                version = self._players[0].model.model_version
                reasons.append(f"a learner to train on the batch of version {version}")
            reason = next(iter(reasons), "")
            if reason and reason != self._waits_for:
                logger.info("waiting for %s", reason)
                self._waits_for, self._say_at = reason, self._clock() + _SAY_WAITING_S
        if self._are_seated:
            (waiting or self._players)[0].watcher.wait(_POLL_S)

    def _read_pool(self) -> None:
        patience_s = self._patience_s()
        # Without a session nothing is urgent; otherwise wait no longer than a batch may.
        wait_s = _POLL_S if patience_s is None else patience_s
        if self._unpaced:
            wait_s = min(wait_s, _TICKET_POLL_S)
        if not self._in_session and self._are_seated:
            wait_s = 0.0  # The loop waits for a session instead.
        events = self._pool.poll(wait_s)
        if self._pool.parts and not self._are_seated:
            for player, part in zip(self._players, self._pool.parts, strict=True):
                player.sit(part, self._pool.groups)
        for event in events:
            if isinstance(event, GroupReady):
                self._group_ready(event)
            else:
                self._group_failed(event)
        if self._are_seated:
            self._let_act()

    def _group_ready(self, event: GroupReady) -> None:
        if event.notes is not None:
            self._read_notes(event.group, event.notes)
        for part, player in enumerate(self._players):
            self.stats.returns += player.read(event.group, self._pool.arrays(event.group, part))
        for part, player in enumerate(self._players):
            for fragment in player.cut_full(event.group, self._pool.arrays(event.group, part)):
                self._put(player, fragment)
        self._unpaced.append(event.group)

    def _let_act(self) -> None:
        """Let the groups act of which each row has a ticket, where rows need one."""
        for group in list(self._unpaced):
            # All players are asked, so that each asks for its tickets.
            if all([player.may_act(group) for player in self._players]):
                self._unpaced.remove(group)
                self._ready.add(group, len(self._pool.groups[group]), now=self._clock())

    def _read_notes(self, group: int, notes: dict[str, Any]) -> None:
        for failure in notes["failures"]:
            self._count_failure(failure["kind"], failure["detail"], failure["trace"])
        for episode in notes["episodes"]:
            assert self._recordings is not None
            try:
                entry = self._recordings.add(episode)
            except OSError as error:
                self._count_failure(FailureKind.RECORDING_FAILED.value, str(error))
            else:
                logger.info("recorded an episode of return %.1f", entry["return_sum"])
        for named in notes["tasks"]:
            self._players[0].name_task(group, named["env"], named["task"])

    def _group_failed(self, event: GroupFailed) -> None:
        if event.notes is not None:
            self._read_notes(event.group, event.notes)
        self._count_failure(event.kind.value, event.detail, event.trace)
        if self._settings.rounds_per_version is not None:
            raise NotRepeatableError(
                f"an environment process failed ({event.kind.value}: {event.detail}), and the next "
                "one begins other episodes: start worker and learner anew"
            )
        self._ready.remove(event.group)
        if event.group in self._unpaced:
            self._unpaced.remove(event.group)
        if self._recordings is not None:
            for env_index in self._pool.groups[event.group]:
                self._recordings.clean(env_index)
        for part, player in enumerate(self._players):
            arrays = self._pool.arrays_or_none(event.group, part)
            self.stats.returns += player.read_failed(event.group, arrays)
        if event.final:
            logger.error("environment process %d is not started again", event.group)

    def _count_failure(self, kind: str, detail: str, trace: str = "") -> None:
        self.stats.failures[kind] += 1
        is_first = self.stats.failures[kind] == 1
        words = self._throttle.words(kind)
        if words is not None:
            logger.warning("environment failed (%s): %s%s", kind, detail, words)
        if is_first and trace:
            shown = {"below": trace}
            logger.warning("the first %s, as the environment raised it:", kind, extra=shown)

    def _patience_s(self) -> float | None:
        if self._settings.rounds_per_version and self._ready.env_count < self._env_count:
            return None
        return self._ready.patience_s(self._pool.live_env_count, now=self._clock())

    def _turn(self) -> None:
        groups = sorted(self._take_batch())
        if self._rounds_left is not None:
            self._rounds_left -= 1
        cuts = [
            player.act(groups, [self._pool.arrays(group, part) for group in groups])
            for part, player in enumerate(self._players)
        ]
        for group in groups:
            self._pool.step(group)
        for player, cut in zip(self._players, cuts, strict=True):
            for fragment in cut():
                self._put(player, fragment)

    def _take_batch(self) -> list[int]:
        groups = self._ready.take()
        env_count = sum(len(self._pool.groups[group]) for group in groups)
        self.stats.batch_count += 1
        self.stats.batch_env_count += env_count
        if self._batch_size is not None:
            self._batch_size.batch_taken(env_count, now=self._clock())
            self._ready.batch_env_count = self._batch_size.batch_env_count
        return groups

    def _put(self, player: Participant, fragment: Fragment) -> None:
        """Queue a fragment; a full sender blocks the loop, and so the environments."""
        began_at = self._clock()
        assert player.sender is not None
        while not player.sender.put(fragment, _POLL_S):
            # Waiting for room is no hang: the demo must not end this worker for it.
            self._heartbeat.beat()
            self.stats.blocked = True
            if self._batch_size is not None:
                self._batch_size.disturb()
            if self._stop.is_set():
                player.sender.count_undelivered()
                return
        self.stats.blocked = False
        self.stats.blocked_s += self._clock() - began_at

    def _log(self, interval_s: float) -> None:
        stats, steps = self.stats, self.step_count
        returns, stats.returns = stats.returns, []
        logger.info(
            "%.0f steps/s, %d environments live, batch fill %.1f, model version %d, "
            "%d episodes%s, fragments %s, steps %s",
            (steps - self._logged_steps) / interval_s,
            self._pool.live_env_count,
            stats.batch_env_count / max(1, stats.batch_count),
            self._players[0].model.model_version,
            len(returns),
            f" with mean return {np.mean(returns):.1f}" if returns else "",
            self._fragments(),
            self.steps_by_end(),
        )
        self._logged_steps = steps

    def steps_by_end(self) -> dict[str, int]:
        """Return the number of steps by what became of them, as far as this worker knows."""
        steps = [each for player in self._players for each in player.steps()]
        return ends_of(
            steps if self._is_running else [each.ended() for each in steps], REPORTED_ENDS
        )

    def _fragments(self) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for player in self._players:
            counts.update(player.fragments())
        return dict(counts)
