"""Cut the steps of one worker into fragments. Pure: no clock, no I/O, no torch.

Time runs as push, answer, push, answer, ...: the policy sees an observation and acts (push), the
environment answers (answer). With T steps a fragment:

    push    0   1   2  ...  T-1   T              step T completes the fragment and is
    answer    0   1   2  ...  T-1                element 0 of the next one
            |<---- fragment ---->|

A producer that has the next observation as soon as a step is answered need not wait for the next
push: it calls `cut`, after T steps or earlier.

Invariants:

F1  A fragment has exactly T answered steps, or fewer where it was cut; `next_obs` is the
    observation of the step after them.
F2  `first[t]` is `ended[t-1]` within a fragment, and across fragments without a discontinuity.
F3  Only the environment makes a step `terminated`. An environment that failed leaves `truncated`.
F4  An unanswered action is never part of a fragment.
F5  A fragment is marked `discontinuity` if and only if its first step does not follow the last
    one of the previous fragment of the same session: steps were dropped between the two, or the
    episode was aborted right after a cut. If an environment fails inside a fragment, the steps
    before the failure are kept and end truncated, so there is no discontinuity.
F6  Indices of a session are contiguous from 0.
F7  If the environment ended an episode, `extras` have its return and length, over all its steps,
    even those in no fragment. An aborted episode has neither.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from breadbox.model.fragment import Fragment, Tree
from breadbox.model.trees import copied
from breadbox.shared.step_ends import SPARE
from breadbox.writing.columns import Columns

EPISODE_COLUMNS = ("episode_return", "episode_length")
"""Names in `extras` that every producer of steps fills in (F7), so that their fragments stack."""


def blank_episode_columns(step_count: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return both columns for steps that end nothing."""
    return np.full(step_count, np.nan, np.float32), np.zeros(step_count, np.int64)


class EpisodeTotals:
    """Return and length of one worker's current episode, for producers that have many steps."""

    def __init__(self) -> None:
        self._return = 0.0
        self._length: int | None = None
        """None if steps of the episode are missing."""

    def lose(self) -> None:
        """Note that steps are missing before the next one."""
        self._length = None

    def columns(
        self, reward: NDArray[Any], first: NDArray[np.bool_], ended: NDArray[np.bool_]
    ) -> dict[str, Tree]:
        """Return the columns of consecutive steps, by name; each argument is [T]."""
        returns, lengths = blank_episode_columns(len(reward))
        starts = np.flatnonzero(first).tolist()
        for start, stop in pairwise(sorted({0, *starts, len(reward)})):
            if first[start]:
                self._return, self._length = 0.0, 0
            if self._length is None:
                continue
            self._return += float(reward[start:stop].sum(dtype=np.float64))
            self._length += stop - start
            if ended[stop - 1]:
                returns[stop - 1], lengths[stop - 1] = self._return, self._length
        return dict(zip(EPISODE_COLUMNS, (returns, lengths), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One observation and action of the policy. Arrays are copied; the caller may reuse them."""

    session_id: str
    model_version: int
    obs: Tree
    """Leaves [...]."""
    action: Tree
    """Leaves [...]."""
    first: bool
    """True if this observation starts an episode."""
    episode_id: int
    state: Tree = None
    """Recurrent state before this step, leaves [...]; read only if `wants_state` returns True."""
    log_prob: float | None = None
    value: float | None = None
    extras: Mapping[str, Tree] | None = None
    """Leaves [...], under other names than the two of F7."""


class _OpenFragment:
    """The fragment being filled: T + 1 rows; the last may be unanswered."""

    def __init__(self, step_count: int, where: str) -> None:
        row_count = step_count + 1
        self.obs = Columns(row_count, where)
        self.action = Columns(row_count, where)
        self.extras = Columns(row_count, where)
        self.in_state: Tree = None
        self.reward = np.zeros(row_count, np.float32)
        self.terminated = np.zeros(row_count, np.bool_)
        self.truncated = np.zeros(row_count, np.bool_)
        self.first = np.zeros(row_count, np.bool_)
        self.episode_id = np.zeros(row_count, np.int64)
        self.model_version = np.zeros(row_count, np.int64)
        self.log_prob: NDArray[np.float32] | None = None
        self.value: NDArray[np.float32] | None = None
        self.final_steps: list[int] = []
        self.final_obs = Columns(row_count, where)
        self.episode_return, self.episode_length = blank_episode_columns(row_count)
        self.count = 0
        self.answered_count = 0

    def write(self, step: Step) -> None:
        """Append a step; after an error no half-written step is kept."""
        row = self.count
        self.obs.write(row, step.obs)
        self.action.write(row, step.action)
        self.extras.write(row, step.extras and dict(step.extras))
        if row == 0:
            self.in_state = copied(step.state)
            self.log_prob = _column_for(step.log_prob, len(self.reward))
            self.value = _column_for(step.value, len(self.reward))
        self.first[row] = step.first
        self.episode_id[row] = step.episode_id
        self.model_version[row] = step.model_version
        if self.log_prob is not None:
            self.log_prob[row] = step.log_prob
        if self.value is not None:
            self.value[row] = step.value
        # Rows are reused after an abort.
        self.terminated[row] = self.truncated[row] = False
        self.episode_return[row], self.episode_length[row] = np.nan, 0
        self.count += 1

    def end_with(self, row: int, final_obs: Tree) -> None:
        self.final_obs.write(len(self.final_steps), final_obs)
        self.final_steps.append(row)

    def ended(self, row: int) -> bool:
        return bool(self.terminated[row] or self.truncated[row])


def _column_for(value: float | None, row_count: int) -> NDArray[np.float32] | None:
    return None if value is None else np.zeros(row_count, np.float32)


class Fragmenter:
    """Cut one worker's steps into fragments of `step_count` steps, at least 1.

    With `staleness_max`, steps of a fragment that the server would refuse are dropped on a push. If
    `is_ragged`, the buffer takes shorter fragments: one is cut before it would be dropped.
    """

    def __init__(
        self, *, worker_id: str, step_count: int, staleness_max: int | None = None
    ) -> None:
        if step_count < 1:
            raise ValueError(f"step_count must be at least 1, got {step_count}")
        self.worker_id = worker_id
        self.staleness_max = staleness_max
        self.is_ragged = False
        self.acted_step_count = 0
        """Answered steps over the worker's life."""
        self.dropped_step_count = 0
        self.stale_count = 0
        """Fragments that became stale while they were filled, and were dropped."""
        self.stale_in_a_row = 0
        """Those of them since one was completed."""
        self._spanned = (0.0, 0.0)
        """Steps and versions of the latest fragments, older ones counting half as much each."""
        self.step_count = step_count
        self._session_id = ""
        self._fragment_index = 0
        self._broken = False
        self._is_mid_episode = False
        """True if the last fragment was cut within an episode, and no step of it came since."""
        self._episode_return = 0.0
        self._episode_length = 0
        self._open = self._new_open()

    def wants_state(self, session_id: str, model_version: int) -> bool:
        """Return True if a step with these labels begins a fragment, so that its state is read."""
        return (
            self._open.count in (0, self.step_count)
            or session_id != self._session_id
            or self._is_stale(model_version)
            or self._is_due(model_version)
        )

    def push(self, step: Step) -> Fragment | None:
        """Add a step while its action is sent to the environment; the step before is complete.

        Returns the fragment that this step completes, or None; the caller owns its arrays. After
        TreeMismatchError the step was not added; call `abort`.
        """
        assert self._open.count == self._open.answered_count, "the last step has no answer yet"
        assert step.session_id, "steps are only taken within a session"
        if step.session_id != self._session_id:
            self._begin_session(step.session_id)
        fragment = None
        if self._is_stale(step.model_version):
            self._note_span(step.model_version)
            self.stale_count += 1
            self.stale_in_a_row += 1
            self.drop_open()
        elif self._is_due(step.model_version):
            self._note_span(step.model_version)
            fragment = self._emit(self._open.count, copied(step.obs))
        if step.first:
            self._episode_return, self._episode_length = 0.0, 0
        self._open.write(step)
        self._is_mid_episode = False
        if self._open.count <= self.step_count:
            return fragment
        self._note_span(step.model_version)
        fragment = self._emit(self.step_count, self._open.obs.row(self.step_count))
        self._open.write(step)
        return fragment

    @property
    def steps_per_version(self) -> float:
        """Steps in the time of one model version, lately, or 0.0 if no version passed."""
        steps, versions = self._spanned
        return steps / versions if versions else 0.0

    @property
    def answered_count(self) -> int:
        """Number of answered steps in the fragment being filled."""
        return self._open.answered_count

    def cut(self, next_obs: Tree) -> Fragment | None:
        """Return the answered steps, at most T, as a fragment, or None. Copies `next_obs`."""
        open_ = self._open
        assert open_.count == open_.answered_count, "the last step has no answer yet"
        if open_.count == 0:
            return None
        self._note_span(int(open_.model_version[open_.count - 1]))
        self._is_mid_episode = not open_.ended(open_.count - 1)
        return self._emit(open_.count, copied(next_obs))

    def answer(
        self, reward: float, *, terminated: bool, truncated: bool, final_obs: Tree = None
    ) -> None:
        """Add the environment's answer to the last step; `final_obs` is None if unknown."""
        open_ = self._open
        assert open_.count == open_.answered_count + 1, "no step waits for an answer"
        row = open_.answered_count
        open_.reward[row] = reward
        open_.terminated[row] = terminated
        open_.truncated[row] = truncated
        self._episode_return += reward
        self._episode_length += 1
        if terminated or truncated:
            open_.episode_return[row] = self._episode_return
            open_.episode_length[row] = self._episode_length
        if (terminated or truncated) and final_obs is not None:
            open_.end_with(row, final_obs)
        open_.answered_count += 1
        self.acted_step_count += 1

    def abort(self, next_obs: Tree = None) -> None:
        """End the episode because the environment failed; the next pushed step starts a new one.

        An unanswered step is dropped. The last answered step becomes truncated unless it ended the
        episode; `next_obs`, or the dropped step's observation, is its final one. If the dropped
        step was the first of a fragment, that fragment is a discontinuity.
        """
        open_ = self._open
        if open_.count > open_.answered_count:
            next_obs = copied(open_.obs.row(open_.answered_count))
            open_.count = open_.answered_count
            # The fragment before this one ends with the observation of the dropped step.
            self._broken = self._broken or open_.count == 0
        self._broken = self._broken or self._is_mid_episode
        self._is_mid_episode = False
        if open_.count == 0 or open_.ended(open_.count - 1):
            return
        open_.truncated[open_.count - 1] = True
        if next_obs is not None:
            open_.end_with(open_.count - 1, next_obs)

    def drop_open(self) -> int:
        """Drop the fragment being filled and return its answered steps; a discontinuity follows."""
        dropped = self._open.answered_count
        self._broken = self._broken or self._open.count > 0
        self.dropped_step_count += dropped
        self._open = self._new_open()
        return dropped

    def _begin_session(self, session_id: str) -> None:
        self.drop_open()
        self._session_id = session_id
        self._fragment_index = 0
        self._broken = self._is_mid_episode = False
        self._open = self._new_open()

    def _is_stale(self, model_version: int) -> bool:
        if self.staleness_max is None or self._open.count == 0:
            return False
        return model_version - int(self._open.model_version[0]) > self.staleness_max

    def _is_due(self, model_version: int) -> bool:
        """Return True if a shorter fragment must go now: with more steps it would become stale."""
        if not self.is_ragged or self.staleness_max is None or self._open.count == 0:
            return False
        passed = model_version - int(self._open.model_version[0])
        return passed > 0 and passed * SPARE >= self.staleness_max

    def _note_span(self, model_version: int) -> None:
        steps, versions = self._spanned
        passed = model_version - int(self._open.model_version[0])
        self._spanned = (steps / 2 + self._open.answered_count, versions / 2 + passed)

    def _emit(self, end: int, next_obs: Tree) -> Fragment:
        done = self._open
        self.stale_in_a_row = 0
        versions = done.model_version[:end]
        final_count = len(done.final_steps)
        fragment = Fragment(
            worker_id=self.worker_id,
            fragment_index=self._fragment_index,
            session_id=self._session_id,
            model_version_min=int(versions.min()),
            model_version_max=int(versions.max()),
            obs=done.obs.rows(end),
            action=done.action.rows(end),
            reward=done.reward[:end],
            terminated=done.terminated[:end],
            truncated=done.truncated[:end],
            first=done.first[:end],
            episode_id=done.episode_id[:end],
            next_obs=next_obs,
            in_state=done.in_state,
            final_obs_step=np.array(done.final_steps, np.int32) if final_count else None,
            final_obs=done.final_obs.rows(final_count) if final_count else None,
            log_prob=None if done.log_prob is None else done.log_prob[:end],
            value=None if done.value is None else done.value[:end],
            model_version=versions if versions.min() != versions.max() else None,
            extras={
                **(done.extras.rows(end) or {}),
                "episode_return": done.episode_return[:end],
                "episode_length": done.episode_length[:end],
            },
            discontinuity=self._broken,
        )
        self._fragment_index += 1
        self._broken = False
        self._open = self._new_open()
        return fragment

    def _new_open(self) -> _OpenFragment:
        where = f"fragment {self._fragment_index} of worker {self.worker_id}"
        return _OpenFragment(self.step_count, where)
