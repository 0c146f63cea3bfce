"""Cut steps into fragments and send them, for producers that run environments themselves.

Invariants:
    W1  Steps of an environment are sent in the order in which they were added, each once.
    W2  If the buffer takes fragments of any length, a step waits at most about `flush_s` before its
        fragment is sent.
    W3  Every step added is counted as sent, dropped, or waiting. The appender counts the results
        of sent fragments. Reports to the server count it under one end of its environment.
"""

import atexit
import logging
import math
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, Protocol, Self, cast, get_args
from uuid import uuid4

import numpy as np
from numpy.typing import ArrayLike, NDArray

from breadbox.model.errors import (
    ClosedError,
    InvalidRequestError,
    ReplayBufferError,
    SessionEndedError,
    TreeMismatchError,
    WaitElapsedError,
)
from breadbox.model.fragment import Fragment, Tree
from breadbox.model.presets import OFF_POLICY_ADVICE
from breadbox.model.trees import (
    Structure,
    check_unmasked,
    child_path,
    copied,
    flatten_leaves,
    leaves,
    map_tree,
    plain_array,
    row_view,
    rows_equal,
)
from breadbox.model.trees import row as tree_row
from breadbox.model.types import (
    AdmissionOutcome,
    BufferDescription,
    ModelState,
    SchemaPolicy,
    WorkerSteps,
)
from breadbox.shared.process_bound import ProcessBound
from breadbox.shared.step_ends import REPORT_S
from breadbox.writing.appender import (
    AppendClient,
    Appender,
    AppenderCounts,
    AppenderOptions,
    FragmentEnd,
    close_at_exit,
)
from breadbox.writing.autoreset import Autoreset, StepsAfterEnds, autoreset_of
from breadbox.writing.fragmenter import EPISODE_COLUMNS, Fragmenter, Step
from breadbox.writing.pacing import ASK_S, Pacer, TicketClient, check_paced
from breadbox.writing.reporting import EpisodeReporter, ReportClient, SentSteps, worker_steps

_log = logging.getLogger(__name__)

EXIT_WAIT_S = 10.0
"""Seconds that the process waits at its exit for the steps of a writer that was not closed."""
ANOTHER_SESSION = "another session"
"""The reason under which fragments of an ended session are dropped."""
_VERSION_MAX = 2**63 - 1

Follows = Literal["obs", "flags"]
"""How a writer recognises that a step begins an episode, besides after an end.

obs: the step's observation differs from the `next_obs` of the step before. So a `reset` in
mid-episode, which sets no flag, never joins two episodes. flags: only the flags of the step before,
terminated or truncated. This is for loops that read their sensors again for each step, such as
robots and noisy wrappers. The observation of a step is then the `next_obs` of the one before, and a
loop that resets in mid-episode must pass truncated.
"""

SEAMS_TO_WARN = 8
"""Episodes ended by an unexpected observation before a warning may be logged."""
SEAM_STEPS_MAX = 4
"""Most steps per such episode: with fewer, the loop probably reads its sensors for each step."""


class StepClient(AppendClient, ReportClient, Protocol):
    """The part of a client that a writer calls; `breadbox.connect` returns one."""

    def watch_model(
        self, known: ModelState | None = None, *, max_wait_s: float = 0.0, buffer: str | None = None
    ) -> ModelState | None:
        """Wait until a session or version other than the known one is current."""

    def get_buffer(self, name: str | None = None) -> BufferDescription:
        """Describe a buffer."""


@dataclass(frozen=True, slots=True)
class StepCounts:
    """The steps added so far; `sent`, `dropped` and `waiting` add up to `added`."""

    added: int
    sent: int
    """Steps in fragments that the appender took; `fragments` counts the results of these."""
    dropped: int
    """Steps of a session that ended, steps added after sending failed, and steps too few for a
    fragment when the writer was closed."""
    waiting: int
    """Steps in fragments that are being filled."""
    seams: int
    """Number of episodes ended because an observation was not the `next_obs` of the step before;
    see `follows`."""
    fragments: AppenderCounts


class StepWriter(ProcessBound):
    """Cut steps of one or several environments into fragments, and append them. Thread-safe.

    ```python
    with breadbox.connect("localhost:50051") as client, breadbox.StepWriter(client) as writer:
        writer.add(obs[None], action[None], [reward], next_obs[None], [terminated], [truncated])
    ```

    Each environment is a worker of the service, named `WORKER_ID-0`, `WORKER_ID-1`, ... The writer
    reports where its steps went every 5 s, and at its end.

    A background thread sends. It retries while the server is unreachable, for the client's
    `reconnect_s`; after that, the next call raises the error. A clean exit of the context sends the
    waiting steps. If the writer was not closed, the exit of the process sends them, for at most
    about 10 s, and a warning says what may be lost.

    A session ends when a learner starts another one, or when a server restarts without a journal.
    Its unsent steps are dropped and counted. A writer without a `session_id` continues in the next
    session; a writer with one raises SessionEndedError.

    Another process cannot use it: after a fork, and to pickle, it raises ClosedError.
    """

    _kind = "StepWriter"
    _remedy = "connect, and make one, in each process"

    def __init__(
        self,
        client: StepClient,
        *,
        worker_id: str | None = None,
        env_count: int = 1,
        steps_per_fragment: int = 32,
        flush_s: float = 0.1,
        session_id: str | None = None,
        session_wait_s: float = 30.0,
        autoreset: Autoreset | Enum | None = None,
        follows: Follows = "obs",
        buffer: str | None = None,
        options: AppenderOptions | None = None,
        pace: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Look up buffer and session, and start the threads.

        Blocks for at most `session_wait_s` plus the time of the client's calls.

        Args:
            client: The client that sends. The caller closes it, after the writer.
            worker_id: Prefix of the names of its workers, or None for one made of host name,
                process id and a random part. No other writer of the same session may use it, not
                even a later one.
            env_count: n, the number of environments; each `add` takes a step of each.
            steps_per_fragment: T; a fragment has T steps, or fewer after `flush_s`.
            flush_s: Seconds after which steps are sent although a fragment is not full; `math.inf`
                for never. It applies to buffers that take fragments of any length (`schema`
                "ragged" or "any"); in others steps wait until there are T.
            session_id: The session to write for, which must be current, or None for the current
                one.
            session_wait_s: Seconds to wait for a session while none is current.
            autoreset: How the environments begin the next episode: "same_step", "next_step", or the
                mode that a vector environment has in `metadata["autoreset_mode"]`. None: found out
                by the observations after ends. Where these contradict "next_step" no step is left
                out, and a warning says so; "same_step" is refused after 8 ends. With
                `follows="flags"` nothing is found out: several environments need a mode, and for
                one None is "same_step".
            follows: How the writer recognises that an episode begins: by "obs" that differ from the
                `next_obs` before, or by "flags" alone, for loops that read their sensors again for
                each step.
            buffer: The buffer's name, or None for the client's buffer.
            options: Bounds and error policy of the appender, or None for the defaults of
                `AppenderOptions` with `flush_after_s=0`.
            pace: Hold a ticket for the fragment that each environment fills. Then `add` also blocks
                while no ticket is free for the next one (docs/slow-workers.md).
            clock: Monotonic clock, seconds.

        Raises:
            InvalidRequestError: An argument is out of its range, or the buffer gives no tickets.
            BufferNotFoundError: There is no such buffer.
            SessionEndedError: `session_id` is not current.
            WaitElapsedError: No session was current within `session_wait_s`.
        """
        counted = {"env_count": env_count, "steps_per_fragment": steps_per_fragment}
        for name, number in counted.items():
            if number < 1:
                raise InvalidRequestError(name, f"must be at least 1, got {number}")
        if not flush_s > 0:
            raise InvalidRequestError("flush_s", f"must be more than 0 s, got {flush_s}")
        if follows not in get_args(Follows):
            raise InvalidRequestError(
                "follows", f"must be one of {get_args(Follows)}, got {follows!r}"
            )
        mode = autoreset_of(autoreset)
        if mode is None and follows == "flags" and env_count > 1:
            raise InvalidRequestError(
                "autoreset",
                'must be given with follows="flags", such as envs.metadata["autoreset_mode"]',
            )
        self._client = client
        self._env_count = env_count
        self._step_count = steps_per_fragment
        self._flush_s = flush_s
        self._session_wait_s = session_wait_s
        self._after_ends = StepsAfterEnds(mode, looks=follows == "obs")
        self._looks_at_obs = follows == "obs"
        self._buffer = buffer
        self._clock = clock
        self.worker_id = worker_id or _fresh_worker_id()
        self._follows = session_id is None
        described = client.get_buffer(buffer)
        if pace:
            check_paced(described.config)
        self._is_ragged = described.config.schema in (SchemaPolicy.RAGGED, SchemaPolicy.ANY)
        state = self._current(session_wait_s)
        if session_id is not None and state.session_id != session_id:
            raise SessionEndedError(session_id, state.session_id)
        self._session_id = state.session_id
        self._model_version = _version_in(state)
        self._fragmenters = [
            Fragmenter(worker_id=f"{self.worker_id}-{index}", step_count=steps_per_fragment)
            for index in range(env_count)
        ]
        self._episode_ids = [0] * env_count
        self._first = np.ones(env_count, np.bool_)
        self._has_ended = np.zeros(env_count, np.bool_)
        """True for an environment if its last step ended an episode."""
        self._next_obs: Tree = None
        self._oldest_at = math.inf
        self._added = self._sent = self._dropped = self._seam_count = 0
        self._has_warned = False
        self._is_unanswered = False
        self._refused_count = 0
        self._stale_count = 0
        self._changed = threading.Condition()
        self._closing = False
        self._is_over = False
        """True once the steps that are too few for a fragment were dropped, at the end."""
        self._steps_sent = SentSteps()
        self._appender = Appender(
            client,
            options or AppenderOptions(flush_after_s=0.0),
            buffer=buffer,
            unwanted=self._reason_to_drop,
            ended=self._note_end,
        )
        self._pacer = Pacer(cast(TicketClient, client), buffer=buffer) if pace else None
        self._reporter = EpisodeReporter(client, steps=self._steps, every_s=REPORT_S, buffer=buffer)
        self._reporter.start()
        self._thread: threading.Thread | None = None
        if self._is_ragged and flush_s < math.inf:
            self._thread = threading.Thread(
                target=self._run, name="breadbox-step-writer", daemon=True
            )
            self._thread.start()
        _unclosed.add(self)

    @property
    def session_id(self) -> str:
        """Name of the session that steps are written for."""
        return self._session_id

    @property
    def model_version(self) -> int:
        """Version of the policy that acts, with which the next steps are labelled.

        ```python
        if (newer := client.load_model()) is not None:
            model, weights = newer
            writer.model_version = model.model_version
        ```

        At the start, and when another session begins, it is the version of the session's weights,
        or 0 while the session has none: no published policy acts then, whatever version a resumed
        learner starts at. A producer that loads newer weights sets it to their version. A buffer
        with a `staleness_max` refuses steps of versions that are too old. Setting it blocks for as
        long as an `add` in another thread does.

        Raises:
            InvalidRequestError: It was set to anything but an integer from 0 to 2**63 - 1.
        """
        return self._model_version

    @model_version.setter
    def model_version(self, version: int) -> None:
        if not isinstance(version, int | np.integer) or not 0 <= version <= _VERSION_MAX:
            raise InvalidRequestError(
                "model_version", f"must be a whole number from 0 to 2**63 - 1, got {version!r}"
            )
        self._check_process()
        with self._changed:
            self._model_version = int(version)

    @property
    def counts(self) -> StepCounts:
        """The steps added so far, by outcome."""
        self._check_process()
        with self._changed:
            return StepCounts(
                added=self._added,
                sent=self._sent,
                dropped=self._dropped,
                waiting=self._waiting(),
                seams=self._seam_count,
                fragments=self._appender.counts,
            )

    def add(
        self,
        obs: Tree,
        action: Tree,
        reward: ArrayLike,
        next_obs: Tree,
        terminated: ArrayLike,
        truncated: ArrayLike,
        *,
        extras: Mapping[str, Tree] | None = None,
        log_prob: ArrayLike | None = None,
        value: ArrayLike | None = None,
        acts: ArrayLike | None = None,
    ) -> None:
        """Add a step of each environment. All is copied; the caller may reuse its arrays.

        ```python
        next_obs, reward, terminated, truncated, infos = envs.step(action)
        led_to = breadbox.true_next_obs(next_obs, infos)
        writer.add(obs, action, reward, led_to, terminated, truncated)
        ```

        An observation that differs from the environment's last `next_obs` starts a new episode. The
        earlier one ends truncated, with that `next_obs` as its final observation, so that nothing
        is learned across a `reset` in mid-episode. A loop that reads its sensors again for each
        step needs `follows="flags"`, or all its episodes are short; a warning says so once.

        Blocks while the appender's queue is full. After the session ended, it also blocks until the
        next one begins, for at most `session_wait_s`.

        Args:
            obs: What the policy saw, leaves [n, ...]. The first call fixes dtypes and shapes. The
                observation of one environment with a Dict space is
                `{key: value[None] for key, value in obs.items()}`.
            action: What the policy did, leaves [n, ...].
            reward: float32[n], undiscounted.
            next_obs: What the action led to, leaves [n, ...]. Where the episode ended, its true
                final observation, not the first of the next episode (`true_next_obs`).
            terminated: bool[n]; the episode ended in a terminal state.
            truncated: bool[n]; the episode was cut off, as by a time limit.
            extras: Anything else by name, leaves [n, ...]; always the same names.
            log_prob: float32[n]; log-probability of `action` under the policy that acted.
            value: float32[n]; value estimate of the policy that acted.
            acts: bool[n]; environments to add a step of, or None for all. Steps that only reset
                (`autoreset`) are left out either way.

        Raises:
            InvalidRequestError: A leaf does not have n rows, a list or tuple has an entry for each
                environment where rows are wanted, `extras` has a reserved name, or the environments
                reset in another way than `autoreset` says. No step was added.
            UnsupportedArrayError: An array is masked.
            TreeMismatchError: A tree differs from the earlier ones. No step of the call was added,
                and the current episodes end truncated.
            SessionEndedError: The session ended; see the class.
            WaitElapsedError: The session ended, and no other began within `session_wait_s`.
            ClosedError: The writer was closed, or is another process's.
            ReplayBufferError: Sending failed in the background.
        """
        self._check_process()
        count = self._env_count
        rewards = _row(reward, np.float64, count, "reward")
        terminations = _row(terminated, np.bool_, count, "terminated")
        truncations = _row(truncated, np.bool_, count, "truncated")
        log_probs = None if log_prob is None else _row(log_prob, np.float64, count, "log_prob")
        values = None if value is None else _row(value, np.float64, count, "value")
        acting = np.ones(count, np.bool_) if acts is None else _row(acts, np.bool_, count, "acts")
        if extras and (taken := [name for name in EPISODE_COLUMNS if name in extras]):
            raise InvalidRequestError("extras", f"must not have {taken}: the writer adds them")
        named = {"obs": obs, "action": action, "next_obs": next_obs, "extras": extras}
        for name, tree in named.items():
            _check_rows(tree, count, name)
        if type(obs) is np.ndarray:
            _check_same_kind(obs, next_obs)
        else:
            map_tree(_check_same_kind, obs, next_obs)
        self._pace(acting)
        with self._changed:
            if self._closing:
                raise ClosedError("the writer was closed")
            self._handle_refusals()
            ended = terminations | truncations
            if self._has_ended.any():
                acting = acting & ~self._only_reset(acting, obs, next_obs, ended, rewards)
            ended = acting & ended
            indices = np.flatnonzero(acting).tolist()
            if self._looks_at_obs:
                self._end_where_obs_does_not_follow(obs, acting)
            try:
                for index in indices:
                    self._push(index, obs, action, extras, log_probs, values)
            except Exception:
                for index in indices:
                    self._end_episode(index, self._after(index))
                raise
            for index in indices:
                has_ended = bool(ended[index])
                self._fragmenters[index].answer(
                    float(rewards[index]),
                    terminated=bool(terminations[index]),
                    truncated=bool(truncations[index]),
                    final_obs=row_view(next_obs, index) if has_ended else None,
                )
                self._first[index] = has_ended
                self._episode_ids[index] += has_ended
            self._added += len(indices)
            self._has_ended = ended
            self._remember(next_obs, acting)
            if self._oldest_at == math.inf:
                self._oldest_at = self._clock()
                self._changed.notify_all()
            self._cut(lambda fragmenter: fragmenter.answered_count == self._step_count)
        self._pace(acting)

    def _pace(self, acting: NDArray[np.bool_]) -> None:
        """Block until the environments have tickets, or another session is current."""
        if self._pacer is None:
            return
        workers = [self._fragmenters[index].worker_id for index in np.flatnonzero(acting)]
        while not self._pacer.wait(workers, self._session_id, ASK_S):
            state = self._client.watch_model(None, buffer=self._buffer)
            if state is None or state.session_id != self._session_id:
                return

    def _note_end(self, fragment: Fragment, end: FragmentEnd) -> None:
        self._steps_sent.end(fragment, end)
        if self._pacer is not None:
            self._pacer.ended(fragment)

    def flush(self, *, max_wait_s: float | None = None) -> None:
        """Send all steps added so far, and block until the server has answered.

        ```python
        writer.flush(max_wait_s=30)
        print(writer.counts.fragments.admitted)
        ```

        Blocks for at most `max_wait_s`, or without a limit if None. Where the buffer takes
        fragments of one length only, steps that fill no fragment stay.

        Raises:
            ReplayBufferError: Sending failed in the background.
            TimeoutError: Answers were missing after `max_wait_s`. Sending continues.
        """
        self._check_process()
        with self._changed:
            self._cut_all()
        self._appender.flush(max_wait_s=max_wait_s)

    def close(self, *, max_wait_s: float | None = None) -> None:
        """Send the waiting steps, then stop. Idempotent; blocks as `Appender.close` does.

        ```python
        writer.close(max_wait_s=30)
        ```

        Where the buffer takes fragments of one length only, steps that fill no fragment are dropped
        and counted, and a warning says so.

        Raises:
            ReplayBufferError: Sending failed in the background. Only the first close raises it.
            TimeoutError: Answers were missing after `max_wait_s`. Sending continues.
        """
        if not self._is_here:
            return
        try:
            with self._changed:
                was_closing, self._closing = self._closing, True
                self._changed.notify_all()
                if not was_closing:
                    self._cut_all()
        except ReplayBufferError:
            pass  # The appender raises it again.
        finally:
            self._drop_rest()
            if self._thread is not None:
                self._thread.join(max_wait_s)
            try:
                self._appender.close(max_wait_s=max_wait_s)
            finally:
                if not self._appender.counts.pending:  # Otherwise sending continues.
                    self._reporter.close(0.0)
                if self._pacer is not None:
                    self._pacer.close()
            _unclosed.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        close_at_exit(self.close, error, lambda: "steps were not sent")

    def _push(
        self,
        index: int,
        obs: Tree,
        action: Tree,
        extras: Mapping[str, Tree] | None,
        log_probs: NDArray[Any] | None,
        values: NDArray[Any] | None,
    ) -> None:
        self._fragmenters[index].push(
            Step(
                session_id=self._session_id,
                model_version=self._model_version,
                obs=row_view(obs, index),
                action=row_view(action, index),
                first=bool(self._first[index]),
                episode_id=self._episode_ids[index],
                log_prob=None if log_probs is None else float(log_probs[index]),
                value=None if values is None else float(values[index]),
                extras={name: row_view(tree, index) for name, tree in (extras or {}).items()},
            )
        )

    def _only_reset(
        self,
        acting: NDArray[np.bool_],
        obs: Tree,
        next_obs: Tree,
        ended: NDArray[np.bool_],
        rewards: NDArray[Any],
    ) -> NDArray[np.bool_]:
        """Return bool[n]: environments that this step only resets."""
        follows = _same_rows(self._next_obs, obs, self._env_count)
        moves = ~ended & ~_same_rows(obs, next_obs, self._env_count)
        return self._after_ends.left_out(acting & self._has_ended, follows, moves, rewards == 0)

    def _end_episode(self, index: int, next_obs: Tree) -> None:
        self._fragmenters[index].abort(next_obs)
        if not self._first[index]:
            self._first[index] = True
            self._episode_ids[index] += 1

    def _end_where_obs_does_not_follow(self, obs: Tree, acting: NDArray[np.bool_]) -> None:
        if self._next_obs is None or _is_same(self._next_obs, obs):
            return
        same = _same_rows(self._next_obs, obs, self._env_count)
        seams = np.flatnonzero(acting & ~self._first & ~same).tolist()
        for index in seams:
            self._end_episode(index, self._after(index))
        self._seam_count += len(seams)
        is_frequent = SEAMS_TO_WARN <= self._seam_count >= self._added / SEAM_STEPS_MAX
        if is_frequent and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%d of %d steps of %s had another observation than the next_obs of the step "
                "before, and began an episode each: if the loop reads sensors again for each step "
                'instead of resetting so often, the writer needs follows="flags"',
                self._seam_count,
                self._added,
                self.worker_id,
            )

    def _after(self, index: int) -> Tree:
        return None if self._next_obs is None else row_view(self._next_obs, index)

    def _remember(self, next_obs: Tree, acting: NDArray[np.bool_]) -> None:
        if self._next_obs is None or acting.all():
            self._next_obs = copied(next_obs)
            return

        def write(kept: NDArray[Any], new: Any) -> None:
            kept[acting] = np.asarray(new)[acting]

        map_tree(write, self._next_obs, next_obs)

    def _cut(self, is_due: Callable[[Fragmenter], bool]) -> None:
        for index, fragmenter in enumerate(self._fragmenters):
            if fragmenter.answered_count == 0 or not is_due(fragmenter):
                continue
            fragment = fragmenter.cut(row_view(self._next_obs, index))
            assert fragment is not None
            self._steps_sent.expect([fragment])
            if self._pacer is not None:
                self._pacer.sent(fragment)
            try:
                self._appender.append(fragment)
            except BaseException:
                self._steps_sent.end(fragment, "undelivered")
                self._dropped += fragment.step_count
                raise
            self._is_unanswered = True
            self._sent += fragment.step_count
        if self._waiting() == 0:
            self._oldest_at = math.inf

    def _cut_all(self) -> None:
        self._cut(lambda each: self._is_ragged or each.answered_count == self._step_count)

    def _steps(self) -> list[WorkerSteps]:
        with self._changed:
            steps = [worker_steps(each, self._steps_sent) for each in self._fragmenters]
            return [each.ended() for each in steps] if self._is_over else steps

    def _waiting(self) -> int:
        return 0 if self._is_over else sum([each.answered_count for each in self._fragmenters])

    def _drop_rest(self) -> None:
        with self._changed:
            count, self._is_over = self._waiting(), True
            self._dropped += count
        if count and not self._is_ragged:
            _log.warning(
                "%d steps were dropped: the buffer takes fragments of %d steps only, and they "
                "fill none; one with `--schema ragged` takes every length",
                count,
                self._step_count,
            )

    def _run(self) -> None:
        with self._changed:
            while not self._closing:
                wait_s = self._oldest_at + self._flush_s - self._clock()
                if wait_s > 0:
                    self._changed.wait(None if wait_s == math.inf else wait_s)
                    continue
                try:
                    self._cut_all()
                except ReplayBufferError:
                    return  # The next `add` raises it.

    def _current(self, max_wait_s: float) -> ModelState:
        """Return the current session and version; wait for a session at most `max_wait_s`."""
        began_at = self._clock()
        state = self._client.watch_model(None, buffer=self._buffer)
        if max_wait_s > 0 and (state is None or not state.session_id):
            _log.warning(
                "no session is current; waiting up to %g s for a learner to start one, "
                "for example with client.start_session()",
                max_wait_s,
            )
            state = self._client.watch_model(None, max_wait_s=max_wait_s, buffer=self._buffer)
        if state is None or not state.session_id:
            raise WaitElapsedError(
                self._clock() - began_at,
                "none is current; a learner starts one, for example with client.start_session()",
                "a session",
            )
        return state

    def _handle_refusals(self) -> None:
        """Warn of stale steps; if the session ended, follow the next or raise SessionEndedError.

        The caller holds the lock.
        """
        if not self._is_unanswered:
            return
        counts = self._appender.counts
        self._is_unanswered = counts.pending > 0
        refused = counts.by_outcome.get(AdmissionOutcome.WRONG_SESSION, 0)
        stale = counts.by_outcome.get(AdmissionOutcome.STALE, 0)
        if stale > self._stale_count:
            if self._stale_count == 0:
                _log.warning(
                    "steps of model version %d were refused as stale: set `model_version` of the "
                    "writer to the version that acts, or raise the buffer's staleness_max. %s",
                    self._model_version,
                    OFF_POLICY_ADVICE,
                )
            self._stale_count = stale
        if refused == self._refused_count:
            return
        self._refused_count = refused
        ended = self._session_id
        if not self._follows:
            now = self._client.watch_model(None, buffer=self._buffer)
            if now is None or now.session_id != ended:
                self._forget_session()
                raise SessionEndedError(ended, now.session_id if now else "")
            return
        state = self._current(self._session_wait_s)
        if state.session_id == ended:
            return
        _log.info("session %r ended; steps go to %r from now on", ended, state.session_id)
        self._forget_session()
        self._session_id = state.session_id
        self._model_version = _version_in(state)

    def _forget_session(self) -> None:
        self._dropped += sum([each.drop_open() for each in self._fragmenters])
        for index in range(self._env_count):
            self._end_episode(index, None)
        self._oldest_at = math.inf

    def _reason_to_drop(self, fragment: Fragment) -> str | None:
        return None if fragment.session_id == self._session_id else ANOTHER_SESSION


_unclosed: weakref.WeakSet[StepWriter] = weakref.WeakSet()


def _close_all() -> None:
    for writer in list(_unclosed):
        try:
            writer.close(max_wait_s=EXIT_WAIT_S)
        except (ReplayBufferError, TimeoutError) as error:
            _log.warning(
                "steps of %s may be lost, as the process exits: %s", writer.worker_id, error
            )


atexit.register(_close_all)
# A forked process has none of the writer's threads.
os.register_at_fork(after_in_child=_unclosed.clear)


def true_next_obs(next_obs: Tree, infos: Mapping[str, Any]) -> Tree:
    """Return the observations that the actions led to, also if the environment has reset already.

    If an episode ends, a vector environment in mode SAME_STEP returns the first observation of the
    next episode, and the final one in `infos["final_obs"]`. In mode NEXT_STEP `step` returns the
    right observation already, and this function changes nothing.

    Args:
        next_obs: As returned by `step`, leaves [n, ...]; not modified.
        infos: As returned by `step`.

    Returns:
        A copy of `next_obs` with the final observations in their rows, or `next_obs` itself if no
        episode ended.
    """
    finals = infos.get("final_obs", infos.get("final_observation"))
    mask = infos.get("_final_obs", infos.get("_final_observation"))
    if finals is None or mask is None or not np.any(mask):
        return next_obs
    changed = copied(next_obs)
    for index in np.flatnonzero(mask).tolist():
        map_tree(
            lambda array, final, index=index: array.__setitem__(index, final),
            changed,
            _of_row(finals, index),
        )
    return changed


def _of_row(finals: Any, row: int) -> Tree:
    """Return a row's final observation; finals: an array of trees or a tree of arrays."""
    return tree_row(finals, row) if isinstance(finals, dict | tuple) else finals[row]


def _version_in(state: ModelState) -> int:
    return 0 if state.weights is None else state.model_version or 0


def _fresh_worker_id() -> str:
    host = re.sub(r"[^A-Za-z0-9_-]", "-", os.uname().nodename.split(".")[0])[:32]
    return f"{host}-{os.getpid()}-{uuid4().hex[:8]}"


def _row(given: ArrayLike, dtype: type[np.generic], count: int, name: str) -> NDArray[Any]:
    array = plain_array(given, name).astype(dtype, copy=False)
    if array.shape != (count,):
        raise InvalidRequestError(name, f"must be [{count}], got shape {list(array.shape)}")
    return array


def _check_rows(tree: Tree, count: int, name: str) -> None:
    if type(tree) is np.ndarray and tree.shape[:1] == (count,):  # The common case.
        return
    _check_no_list_of_envs(tree, count, name, (list, tuple))
    for path, leaf in leaves(tree, name):
        check_unmasked(leaf, path)
        shape = np.shape(leaf)
        if not shape or shape[0] != count:
            raise InvalidRequestError(
                path, f"must have {count} rows, one for each environment, got shape {list(shape)}"
            )


def _check_no_list_of_envs(node: Tree, count: int, path: str, kinds: Any = list) -> None:
    """Refuse a list with an entry for each environment: its rows would be taken for columns."""
    if isinstance(node, kinds) and len(node) == count:
        forms = [_form_of(each) for each in node]
        if forms[0][1] and forms == forms[:1] * count:
            raise InvalidRequestError(
                path,
                f"is a {type(node).__name__} of {count} alike, for {count} environments: stack "
                "observations of environments (np.stack, by key), and give parts of one "
                "observation as a dict",
            )
    if isinstance(node, dict | list | tuple):
        children = node.items() if isinstance(node, dict) else enumerate(node)
        for key, child in children:
            _check_no_list_of_envs(child, count, child_path(path, key))


def _form_of(tree: Tree) -> tuple[Structure, list[tuple[tuple[int, ...], Any]]]:
    structure, found = flatten_leaves(tree)
    return structure, [(np.shape(leaf), getattr(leaf, "dtype", type(leaf))) for leaf in found]


def _check_same_kind(obs: Any, next_obs: Any) -> None:
    one, other = np.asarray(obs), np.asarray(next_obs)
    if one.dtype != other.dtype or one.shape != other.shape:
        wanted, got = f"{one.dtype}{list(one.shape)}", f"{other.dtype}{list(other.shape)}"
        raise TreeMismatchError("next_obs", f"{wanted}, as obs", got)


def _is_same(one: Tree, other: Tree) -> bool:
    """Return True if both are single arrays and equal, the common case."""
    return type(one) is np.ndarray and type(other) is np.ndarray and np.array_equal(one, other)


def _same_rows(one: Tree, other: Tree, count: int) -> NDArray[np.bool_]:
    """Return bool[n]: rows equal in every leaf."""
    try:
        return rows_equal(one, other)
    except TreeMismatchError:
        return np.zeros(count, np.bool_)  # The fragmenter refuses the steps, and says why.
