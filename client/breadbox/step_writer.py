"""Steps in, fragments out: for producers that have environments and no rollout worker.

Invariants:
    W1  Steps of an environment are sent in the order in which they were added, each once.
    W2  A step waits at most about `flush_s` for company before its fragment is on its way, where
        the buffer takes fragments of any length.
    W3  Every step added is counted: as sent, as dropped, or as still waiting. What became of sent
        fragments is counted by the appender.
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
from types import TracebackType
from typing import Any, Literal, Protocol, Self, get_args
from uuid import uuid4

import numpy as np
from numpy.typing import ArrayLike, NDArray

from breadbox.appender import (
    AppendClient,
    Appender,
    AppenderCounts,
    AppenderOptions,
    close_behind,
)
from breadbox.errors import (
    ClosedError,
    InvalidRequestError,
    ReplayBufferError,
    SessionEndedError,
    TreeMismatchError,
    WaitElapsedError,
)
from breadbox.fragment import Fragment, Tree
from breadbox.fragmenter import Fragmenter, Step
from breadbox.presets import OFF_POLICY_ADVICE
from breadbox.trees import leaves, map_tree
from breadbox.trees import row as tree_row
from breadbox.types import AdmissionOutcome, BufferDescription, ModelState, SchemaPolicy

_log = logging.getLogger(__name__)

EXIT_WAIT_S = 10.0
"""Seconds that the process waits, when it ends, for steps of a writer that nobody closed."""
ANOTHER_SESSION = "another session"
"""Why a fragment was dropped before it was sent."""
RESERVED = ("episode_return", "episode_length")
"""Names in `extras` that the writer fills in itself."""
_VERSION_MAX = 2**63 - 1

Autoreset = Literal["same_step", "next_step"]
"""How the environments begin the next episode.

same_step: the step after an end is the first of the next episode, as with `SyncVectorEnv` in mode
SAME_STEP, Stable-Baselines3, or a loop that calls `reset` itself. next_step: it only resets, as
with Gymnasium's default mode NEXT_STEP; it is left out, since nothing was done in it.
"""


class StepClient(AppendClient, Protocol):
    """What a writer needs of a client; `breadbox.connect` makes one."""

    def watch_model(
        self,
        known: ModelState | None = None,
        *,
        max_wait_s: float = 0.0,
        buffer: str | None = None,
    ) -> ModelState | None:
        """Wait until another session or version is current than the known one."""

    def get_buffer(self, name: str | None = None) -> BufferDescription:
        """Describe a buffer."""


@dataclass(frozen=True, slots=True)
class StepCounts:
    """What became of the steps added; `sent`, `dropped` and `waiting` add up to `added`."""

    added: int
    sent: int
    """In fragments that were handed to the appender; `fragments` says what became of these."""
    dropped: int
    """Of a session that ended, after an error that ended the sending, or too few for a fragment
    when the writer was closed."""
    waiting: int
    """In fragments that are being filled."""
    fragments: AppenderCounts


class StepWriter:
    """Cuts steps of one or several environments into fragments, and appends them. Thread-safe.

    ```python
    with breadbox.connect("localhost:50051") as client, breadbox.StepWriter(client) as writer:
        writer.add(obs[None], action[None], [reward], next_obs[None], [terminated], [truncated])
    ```

    Each environment is a worker of the service, named `WORKER_ID-0`, `WORKER_ID-1`, ...

    Sending goes on in the background. A server that is away for a while is waited for there, and
    nobody notices; an error that ends it is raised by the next call. A clean exit of the context
    sends what waits. So does the end of the process where the writer was not closed: for at most
    about 10 s, and a warning says what may be lost.

    When the session ends, as it does where a learner starts its own or a server comes back without
    a journal, what was not sent of it is dropped and counted. A writer that was given no session
    goes on in the next one; one that was given its session raises SessionEndedError.
    """

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
        autoreset: Autoreset = "same_step",
        buffer: str | None = None,
        options: AppenderOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Look up buffer and session, and start two threads.

        Blocks for at most `session_wait_s` beside what the client's calls take.

        Args:
            client: Sends; stays the caller's to close, after the writer.
            worker_id: Begins the names of its workers, which no two running writers of a session
                may share, nor one that comes back to it; None: made of host, process and chance.
            env_count: n, environments of which each `add` brings a step.
            steps_per_fragment: T; a fragment has as many steps, or fewer after `flush_s`.
            flush_s: Seconds after which steps are sent although a fragment is not full. `math.inf`:
                never. Only in a buffer that takes fragments of any length (`schema` "ragged" or
                "any"); in others steps wait until T are there.
            session_id: Session to write for, which is current; None: whichever is.
            session_wait_s: Seconds to wait for a session where none is current.
            autoreset: How the environments begin the next episode.
            buffer: Where steps go; None: the client's.
            options: Bounds of what waits, and what happens on errors; None: as `AppenderOptions`
                says, but that nothing waits for company.
            clock: Monotonic seconds.

        Raises:
            InvalidRequestError: An argument is out of its range.
            BufferNotFoundError: There is no such buffer.
            SessionEndedError: `session_id` is not current.
            WaitElapsedError: No session was current within `session_wait_s`.
        """
        if env_count < 1:
            raise InvalidRequestError("env_count", f"must be at least 1, got {env_count}")
        if steps_per_fragment < 1:
            raise InvalidRequestError(
                "steps_per_fragment", f"must be at least 1, got {steps_per_fragment}"
            )
        if not flush_s > 0:
            raise InvalidRequestError("flush_s", f"must be more than 0 s, got {flush_s}")
        if autoreset not in get_args(Autoreset):
            raise InvalidRequestError(
                "autoreset", f"must be one of {get_args(Autoreset)}, got {autoreset!r}"
            )
        self._client = client
        self._env_count = env_count
        self._step_count = steps_per_fragment
        self._flush_s = flush_s
        self._session_wait_s = session_wait_s
        self._skips_reset = autoreset == "next_step"
        self._buffer = buffer
        self._clock = clock
        self.worker_id = worker_id or _fresh_worker_id()
        """Begins the names of its workers."""
        self._follows = session_id is None
        described = client.get_buffer(buffer)
        self._is_ragged = described.config.schema in (SchemaPolicy.RAGGED, SchemaPolicy.ANY)
        state = self._current(session_wait_s)
        if session_id is not None and state.session_id != session_id:
            raise SessionEndedError(session_id, state.session_id)
        self._session_id = state.session_id
        self._model_version = state.model_version or 0
        self._fragmenters = [
            Fragmenter(worker_id=f"{self.worker_id}-{index}", step_count=steps_per_fragment)
            for index in range(env_count)
        ]
        self._episode_ids = [0] * env_count
        self._first = np.ones(env_count, np.bool_)
        """Environments whose next step starts an episode."""
        self._resets = np.zeros(env_count, np.bool_)
        """Environments whose next step only resets."""
        self._next_obs: Tree = None
        """What followed the last steps, [n, ...]."""
        self._oldest_at = math.inf
        """When the oldest step that waits was added."""
        self._added = self._sent = self._dropped = 0
        self._is_unanswered = False
        """Whether there may be news of fragments that were sent."""
        self._refused_count = 0
        self._stale_count = 0
        self._changed = threading.Condition()
        self._closing = False
        self._appender = Appender(
            client,
            options or AppenderOptions(flush_after_s=0.0),
            buffer=buffer,
            unwanted=self._reason_to_drop,
        )
        self._thread: threading.Thread | None = None
        if self._is_ragged and flush_s < math.inf:
            self._thread = threading.Thread(
                target=self._run, name="breadbox-step-writer", daemon=True
            )
            self._thread.start()
        _unclosed.add(self)

    @property
    def session_id(self) -> str:
        """The session that steps are written for."""
        return self._session_id

    @property
    def model_version(self) -> int:
        """Version of the policy that acts: the next steps are labelled with it.

        At first, and where another session begins, the session's. Whoever takes over newer weights
        sets it to their version; a buffer with a `staleness_max` refuses steps of versions that are
        too old. Setting it blocks no longer than an `add` under way.

        Raises:
            InvalidRequestError: It was set to what is no whole number from 0 to 2**63 - 1.
        """
        return self._model_version

    @model_version.setter
    def model_version(self, version: int) -> None:
        if not isinstance(version, int | np.integer) or not 0 <= version <= _VERSION_MAX:
            raise InvalidRequestError(
                "model_version", f"must be a whole number from 0 to 2**63 - 1, got {version!r}"
            )
        with self._changed:
            self._model_version = int(version)

    @property
    def counts(self) -> StepCounts:
        """What became of the steps so far."""
        with self._changed:
            return StepCounts(
                added=self._added,
                sent=self._sent,
                dropped=self._dropped,
                waiting=self._waiting(),
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

        An observation that is not what followed the environment's last step starts a new episode:
        the earlier one ends truncated, with what followed it as its final observation. So nothing
        is learned across a `reset` in mid-episode.

        Blocks while as much waits to be sent as may, and, where the session ended, for at most
        `session_wait_s` until the next one begins.

        Args:
            obs: What the policy saw, leaves [n, ...]; dtypes and shapes stay as they are first.
            action: What it did, leaves [n, ...].
            reward: float32[n], undiscounted.
            next_obs: What the action led to, leaves [n, ...]; where the episode ended its true
                final observation, not the first of the next episode (`true_next_obs`).
            terminated: bool[n]; the episode ended in a terminal state.
            truncated: bool[n]; the episode was cut off, as by a time limit.
            extras: Anything else by name, leaves [n, ...]; always the same names.
            log_prob: float32[n]; log-probability of `action` under the policy that acted.
            value: float32[n]; value estimate of the policy that acted.
            acts: bool[n]; of the others nothing is added. None: all act, but those whose reset
                `autoreset` leaves out.

        Raises:
            InvalidRequestError: A leaf has not n rows, or `extras` a name that is taken.
            TreeMismatchError: A tree differs from those before; no step of the call was added, and
                the episodes under way are given up.
            SessionEndedError: The session ended; see the class.
            WaitElapsedError: It ended, and no other began within `session_wait_s`.
            ClosedError: The writer was closed.
            ReplayBufferError: What ended the sending.
        """
        count = self._env_count
        rewards = _row(reward, np.float64, count, "reward")
        terminations = _row(terminated, np.bool_, count, "terminated")
        truncations = _row(truncated, np.bool_, count, "truncated")
        log_probs = None if log_prob is None else _row(log_prob, np.float64, count, "log_prob")
        values = None if value is None else _row(value, np.float64, count, "value")
        acting = np.ones(count, np.bool_) if acts is None else _row(acts, np.bool_, count, "acts")
        if extras and (taken := [name for name in RESERVED if name in extras]):
            raise InvalidRequestError("extras", f"must not have {taken}: the writer says them")
        for name, tree in (
            ("obs", obs),
            ("action", action),
            ("next_obs", next_obs),
            ("extras", extras),
        ):
            _require_rows(tree, count, name)
        if type(obs) is np.ndarray:
            _require_same_kind(obs, next_obs)
        else:
            map_tree(_require_same_kind, obs, next_obs)
        with self._changed:
            if self._closing:
                raise ClosedError("the writer was closed")
            self._look_at_session()
            acting = acting & ~self._resets
            ended = acting & (terminations | truncations)
            indices = np.flatnonzero(acting).tolist()
            if self._next_obs is not None and not _is_same(self._next_obs, obs):
                same = _same_rows(self._next_obs, obs, count)
                for index in np.flatnonzero(acting & ~self._first & ~same).tolist():
                    self._end_episode(index, self._after(index))
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
                    final_obs=tree_row(next_obs, index) if has_ended else None,
                )
                self._first[index] = has_ended
                self._episode_ids[index] += has_ended
            self._added += len(indices)
            self._resets[:] = ended if self._skips_reset else False
            self._remember(next_obs, acting)
            if self._oldest_at == math.inf:
                self._oldest_at = self._clock()
                self._changed.notify_all()
            self._cut(lambda fragmenter: fragmenter.answered_count == self._step_count)

    def flush(self, *, max_wait_s: float | None = None) -> None:
        """Send all steps added so far, and wait until they are answered.

        Where the buffer takes fragments of one length only, steps stay that fill none.

        Raises:
            ReplayBufferError: What ended the sending.
            TimeoutError: It took longer than `max_wait_s`; sending goes on.
        """
        with self._changed:
            self._cut_all()
        self._appender.flush(max_wait_s=max_wait_s)

    def close(self, *, max_wait_s: float | None = None) -> None:
        """Send what waits, then stop. Idempotent; blocks as `Appender.close` does.

        Where the buffer takes fragments of one length only, steps that fill none are dropped: they
        are counted, and a warning says so.

        Raises:
            ReplayBufferError: What ended the sending, raised by the first close only.
            TimeoutError: It took longer than `max_wait_s`; sending goes on.
        """
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
            self._appender.close(max_wait_s=max_wait_s)
            _unclosed.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        close_behind(self.close, error, lambda: "steps were not sent")

    # Cutting -----------------------------------------------------------------------------------

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
                obs=tree_row(obs, index),
                action=tree_row(action, index),
                first=bool(self._first[index]),
                episode_id=self._episode_ids[index],
                log_prob=None if log_probs is None else float(log_probs[index]),
                value=None if values is None else float(values[index]),
                extras={name: tree_row(tree, index) for name, tree in (extras or {}).items()},
            )
        )

    def _end_episode(self, index: int, next_obs: Tree) -> None:
        """Give up the episode of an environment; its last step becomes truncated."""
        self._fragmenters[index].abort(next_obs)
        if not self._first[index]:
            self._first[index] = True
            self._episode_ids[index] += 1

    def _after(self, index: int) -> Tree:
        """What followed the last step of an environment."""
        return None if self._next_obs is None else tree_row(self._next_obs, index)

    def _remember(self, next_obs: Tree, acting: NDArray[np.bool_]) -> None:
        """Keep what followed, where it belongs to a step that was added."""
        if self._next_obs is None or acting.all():
            self._next_obs = map_tree(np.array, next_obs)
            return

        def write(kept: NDArray[Any], new: Any) -> None:
            kept[acting] = np.asarray(new)[acting]

        map_tree(write, self._next_obs, next_obs)

    def _cut(self, is_due: Callable[[Fragmenter], bool]) -> None:
        """Send what is due; the lock is held."""
        for index, fragmenter in enumerate(self._fragmenters):
            if fragmenter.answered_count == 0 or not is_due(fragmenter):
                continue
            fragment = fragmenter.cut(tree_row(self._next_obs, index))
            assert fragment is not None
            try:
                self._appender.append(fragment)
            except BaseException:
                self._dropped += fragment.step_count
                raise
            self._is_unanswered = True
            self._sent += fragment.step_count
        if self._waiting() == 0:
            self._oldest_at = math.inf

    def _cut_all(self) -> None:
        """Send all that may be sent; the lock is held."""
        self._cut(lambda each: self._is_ragged or each.answered_count == self._step_count)

    def _waiting(self) -> int:
        return sum([each.answered_count for each in self._fragmenters])

    def _drop_rest(self) -> None:
        with self._changed:
            count = sum([each.drop_open() for each in self._fragmenters])
            self._dropped += count
        if count and not self._is_ragged:
            _log.warning(
                "%d steps were dropped: the buffer takes fragments of %d steps only, and they "
                "fill none; one with `--schema ragged` takes every length",
                count,
                self._step_count,
            )

    def _run(self) -> None:
        """Send what has waited for too long."""
        with self._changed:
            while not self._closing:
                wait_s = self._oldest_at + self._flush_s - self._clock()
                if wait_s > 0:
                    self._changed.wait(None if wait_s == math.inf else wait_s)
                    continue
                try:
                    self._cut_all()
                except ReplayBufferError:
                    return  # Whoever adds the next step is told.

    # Sessions ----------------------------------------------------------------------------------

    def _current(self, max_wait_s: float) -> ModelState:
        """What is current, waiting for a session.

        Raises:
            WaitElapsedError: There was none all the time.
        """
        began_at = self._clock()
        state = self._client.watch_model(None, buffer=self._buffer)
        if max_wait_s > 0 and (state is None or not state.session_id):
            _log.warning(
                "no session is current; for up to %g s one is waited for, which a learner starts, "
                "as by client.start_session()",
                max_wait_s,
            )
            state = self._client.watch_model(None, max_wait_s=max_wait_s, buffer=self._buffer)
        if state is None or not state.session_id:
            raise WaitElapsedError(
                self._clock() - began_at,
                "none is current; a learner starts one, as by client.start_session()",
                "a session",
            )
        return state

    def _look_at_session(self) -> None:
        """Notice that the session ended, by what became of fragments; the lock is held."""
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
        _log.info("session %r ended; steps go to %r from here", ended, state.session_id)
        self._forget_session()
        self._session_id = state.session_id
        self._model_version = state.model_version or 0

    def _forget_session(self) -> None:
        self._dropped += sum([each.drop_open() for each in self._fragmenters])
        for index in range(self._env_count):
            self._end_episode(index, None)
        self._oldest_at = math.inf

    def _reason_to_drop(self, fragment: Fragment) -> str | None:
        return None if fragment.session_id == self._session_id else ANOTHER_SESSION


_unclosed: weakref.WeakSet[StepWriter] = weakref.WeakSet()


def _close_all() -> None:
    """Send what waits as the process ends, or say that it may be lost."""
    for writer in list(_unclosed):
        _close_at_exit(writer)


def _close_at_exit(writer: StepWriter) -> None:
    try:
        writer.close(max_wait_s=EXIT_WAIT_S)
    except (ReplayBufferError, TimeoutError) as error:
        _log.warning("steps of %s may be lost, as the process ends: %s", writer.worker_id, error)


atexit.register(_close_all)
# The threads of a writer are not in a process that was forked from its own.
os.register_at_fork(after_in_child=_unclosed.clear)


def true_next_obs(next_obs: Tree, infos: Mapping[str, Any]) -> Tree:
    """What the actions led to, where a vector environment resets in the same step.

    In that mode a step returns the first observation of the next episode where one ended, and the
    final one in `infos["final_obs"]`. In mode NEXT_STEP it returns what the action led to, and
    nothing is to be done.

    Args:
        next_obs: As returned by `step`, leaves [n, ...]; stays as it is.
        infos: As returned by `step`.

    Returns:
        A copy of `next_obs` with final observations in their rows, or itself where there are none.
    """
    finals = infos.get("final_obs", infos.get("final_observation"))
    mask = infos.get("_final_obs", infos.get("_final_observation"))
    if finals is None or mask is None or not np.any(mask):
        return next_obs
    changed = map_tree(np.array, next_obs)
    for index in np.flatnonzero(mask).tolist():
        map_tree(
            lambda array, final, index=index: array.__setitem__(index, final),
            changed,
            _of_row(finals, index),
        )
    return changed


def _of_row(finals: Any, row: int) -> Tree:
    """Final observation of a row: finals are an array of trees, or a tree of arrays."""
    if isinstance(finals, dict):
        return {key: _of_row(part, row) for key, part in finals.items()}
    if isinstance(finals, tuple):
        return tuple(_of_row(part, row) for part in finals)
    return finals[row]


def _fresh_worker_id() -> str:
    host = re.sub(r"[^A-Za-z0-9_-]", "-", os.uname().nodename.split(".")[0])[:32]
    return f"{host}-{os.getpid()}-{uuid4().hex[:8]}"


def _row(given: ArrayLike, dtype: type[np.generic], count: int, name: str) -> NDArray[Any]:
    array = np.asarray(given, dtype)
    if array.shape != (count,):
        raise InvalidRequestError(name, f"must be [{count}], got shape {list(array.shape)}")
    return array


def _require_rows(tree: Tree, count: int, name: str) -> None:
    if type(tree) is np.ndarray and tree.shape[:1] == (count,):  # First, because most are.
        return
    for path, leaf in leaves(tree, name):
        shape = np.shape(leaf)
        if not shape or shape[0] != count:
            raise InvalidRequestError(
                path, f"must have {count} rows, one for each environment, got shape {list(shape)}"
            )


def _require_same_kind(obs: Any, next_obs: Any) -> None:
    one, other = np.asarray(obs), np.asarray(next_obs)
    if one.dtype != other.dtype or one.shape != other.shape:
        wanted, got = f"{one.dtype}{list(one.shape)}", f"{other.dtype}{list(other.shape)}"
        raise TreeMismatchError("next_obs", f"{wanted}, as obs", got)


def _is_same(one: Tree, other: Tree) -> bool:
    """Whether two observations are one array each, and equal throughout: what is so mostly."""
    return type(one) is np.ndarray and type(other) is np.ndarray and np.array_equal(one, other)


def _same_rows(one: Tree, other: Tree, count: int) -> NDArray[np.bool_]:
    """Which rows are equal in every leaf, bit for bit or as numbers; NaN equals NaN."""
    same = np.ones(count, np.bool_)

    def compare(left: Any, right: Any) -> None:
        left, right = np.asarray(left), np.asarray(right)
        if left.shape != right.shape:
            same[:] = False
        elif not (left is right or np.array_equal(left, right)):
            equal = (left == right) | ((left != left) & (right != right))
            same[:] &= equal.reshape(count, -1).all(axis=1)

    try:
        map_tree(compare, one, other)
    except TreeMismatchError:
        same[:] = False  # The steps will be refused, and say why.
    return same
