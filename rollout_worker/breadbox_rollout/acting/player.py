"""A policy at work: its model, its rows of the environments, and where their fragments go.

A worker has one, but where agents of an environment have policies of their own: then each has the
rows of its agents, and a buffer with a session and a learner of its own.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from breadbox.model.errors import InvalidRequestError
from breadbox.model.fragment import Fragment, Tree
from breadbox.model.trees import row as tree_row
from breadbox.model.types import EpisodeEnd, EpisodeReport
from breadbox.writing.fragmenter import Fragmenter, Step
from breadbox_policies import PolicyModule, State, WeightsMismatchError, set_policy_weights
from breadbox_rollout.acting.inference import Inference, Round, play_round, state_arrays
from breadbox_rollout.environments.arrays import GroupArrays
from breadbox_rollout.processes.pool import Part
from breadbox_rollout.sending.models import NO_MODEL, Model, ModelWatcher
from breadbox_rollout.sending.sender import EpisodeReporter, EpisodeTracker, Sender


@dataclass(slots=True)
class Slot:
    """One row: its fragments, its episode, its memory."""

    fragmenter: Fragmenter
    tracker: EpisodeTracker
    state: State
    """Recurrent state before the next step: after the last one, or the initial one where an episode
    starts; None for a policy without memory."""
    initial_state: State = None
    episode_id: int = 0
    awaits_answer: bool = False
    """An action is on its way, and its step was pushed."""
    answer_count: int = 0
    abort_count: int = 0
    obs_count: int = 0
    next_task: str | None = field(default=None)
    """Task of the episode that begins, where the environment named it."""

    def restart(self) -> None:
        """Forget the counts of a process that is gone."""
        self.answer_count = self.abort_count = self.obs_count = 0


class Reader:
    """Turns what a group's arrays say into answers, aborts and episode reports. Pure."""

    def __init__(self, slots: list[Slot]) -> None:
        self._slots = slots
        self.step_count = 0
        """Steps answered, over the whole life."""

    def read(self, arrays: GroupArrays) -> list[EpisodeReport]:
        """Take in what the group answered to its last step; nothing if it has just been started."""
        reports: list[EpisodeReport] = []
        answers, aborts = arrays.answer_count.tolist(), arrays.abort_count.tolist()
        for index, slot in enumerate(self._slots):
            if answers[index] != slot.answer_count:
                slot.answer_count = answers[index]
                self._answer(slot, arrays, index, reports)
            elif aborts[index] != slot.abort_count:
                self._abort(slot, None, reports)
            slot.abort_count = aborts[index]
            slot.obs_count = int(arrays.obs_count[index])
        return reports

    def read_failed(self, arrays: GroupArrays | None) -> list[EpisodeReport]:
        """Save what a process that is gone had answered, and give up the episodes it was in."""
        reports: list[EpisodeReport] = []
        for index, slot in enumerate(self._slots):
            ended, next_obs = False, None
            if arrays is not None and int(arrays.answer_count[index]) != slot.answer_count:
                ended = bool(arrays.terminated[index] or arrays.truncated[index])
                self._answer(slot, arrays, index, reports)
                if not ended and int(arrays.obs_count[index]) != slot.obs_count:
                    next_obs = tree_row(arrays.obs, index)
            if not ended:
                self._abort(slot, next_obs, reports)
            slot.restart()
        return reports

    def _answer(
        self, slot: Slot, arrays: GroupArrays, index: int, reports: list[EpisodeReport]
    ) -> None:
        if not slot.awaits_answer:
            return
        slot.awaits_answer = False
        reward = float(arrays.reward[index])
        terminated, truncated = bool(arrays.terminated[index]), bool(arrays.truncated[index])
        ended = terminated or truncated
        slot.fragmenter.answer(
            reward,
            terminated=terminated,
            truncated=truncated,
            final_obs=tree_row(arrays.final_obs, index) if ended else None,
        )
        slot.tracker.reward(reward)
        self.step_count += 1
        if ended:
            end = EpisodeEnd.TERMINATED if terminated else EpisodeEnd.TRUNCATED
            self._end(slot, end, reports)

    def _abort(self, slot: Slot, next_obs: Tree, reports: list[EpisodeReport]) -> None:
        slot.awaits_answer = False
        slot.fragmenter.abort(next_obs)
        self._end(slot, EpisodeEnd.ABORTED, reports)

    def _end(self, slot: Slot, end: EpisodeEnd, reports: list[EpisodeReport]) -> None:
        report = slot.tracker.end(end, slot.next_task)
        slot.next_task = None
        slot.episode_id += 1
        slot.state = slot.initial_state
        if report is not None:
            reports.append(report)


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayerOptions:
    """How a player labels and cuts what its rows do."""

    fragment_steps: int
    worker_prefix: str
    """Begins the ids of its rows; no two running workers may share it."""
    task: str = "default"
    discount: float = 0.99
    strict_weights: bool = True


class Seated(ABC):
    """Whoever acts for the rows of a part."""

    def __init__(self, watcher: ModelWatcher) -> None:
        self.watcher = watcher
        self.model: Model = NO_MODEL
        """What it acts with; adopted between two rounds."""
        self._shunned_id = ""
        """Session of another policy that was current before this worker, and is waited out."""

    @property
    def waits_for(self) -> str:
        """What keeps it from acting, as far as a learner can fix it; empty if nothing does."""
        latest = self.watcher.latest
        if not latest.in_session:
            return latest.waits_for
        if latest.session_id == self._shunned_id:
            return f"another session than {latest.session_id!r} of buffer {latest.buffer!r}"
        return ""

    @property
    @abstractmethod
    def is_seated(self) -> bool:
        """Whether it knows its rows, and has a policy."""

    @property
    def in_session(self) -> bool:
        """Whether it may act; else nobody of the worker does."""
        return self.model.in_session

    @property
    def step_count(self) -> int:
        """Steps answered so far that are learned from."""
        return 0

    @property
    def fragment_count(self) -> int:
        """Fragments cut so far."""
        return 0

    @property
    def waiting_fragment_count(self) -> int:
        """Fragments that wait to be sent."""
        return 0

    def fragment_counts(self) -> dict[str, int]:
        """Return fragments by what became of them, see `Sender.counts`."""
        return {}

    @abstractmethod
    def sit(self, part: Part, groups: Sequence[range]) -> None:
        """Take the rows of a part of the environments; *groups* are indices of environments."""

    @abstractmethod
    def take_model(self) -> None:
        """Make session, version and weights current in one step, if there are new ones.

        A session of another policy's weights is not entered if it was current before this worker
        came: it may be left over from another run, or the next one may be this worker's. That is
        said once, and waited out.
        """

    def _joined(self, model: Model, adopt: Callable[[], None]) -> Model:
        """Have weights adopted; return the model, or none where its session is waited out."""
        try:
            adopt()
        except WeightsMismatchError as error:
            where = f"session {model.session_id!r} of buffer {model.buffer!r}"
            remedy = "a worker needs --policy, --policy-options and --env of its learner"
            if not model.is_older:
                raise InvalidRequestError(
                    "policy", f"is not that of {where}: {error}; {remedy}"
                ) from error
            if model.session_id != self._shunned_id:
                logger.warning(
                    "waiting for another session: %s, which was there before this worker, is of "
                    "another policy (%s). Is it left over from another run, `breadbox buffers "
                    "end-session %s` ends it; else %s",
                    where,
                    error,
                    model.buffer,
                    remedy,
                )
            self._shunned_id = model.session_id
            return NO_MODEL
        self._shunned_id = ""
        return model

    @abstractmethod
    def read(self, group: int, arrays: GroupArrays) -> list[float]:
        """Take in what a group answered; the returns of episodes that ended."""

    @abstractmethod
    def read_failed(self, group: int, arrays: GroupArrays | None) -> list[float]:
        """Take in what a process that is gone had answered; the returns of episodes that ended."""

    @abstractmethod
    def act(self, groups: list[int], arrays: list[GroupArrays]) -> Callable[[], list[Fragment]]:
        """Choose and write the actions of the groups' rows."""

    def name_task(self, group: int, row: int, task: str) -> None:
        """Label the episode that begins in a row, if its episodes are reported."""
        return

    def put(self, fragment: Fragment, wait_s: float) -> bool:
        """Hand over a fragment that `act` led to, see `Sender.put`."""
        raise NotImplementedError

    def count_undelivered(self) -> None:
        """Count a fragment that there was no room for when the worker ended."""
        raise NotImplementedError


class Player(Seated):
    """Acts with the current model for its rows, and cuts what they do into fragments."""

    def __init__(
        self,
        make_policy: Callable[[Any, Any], PolicyModule],
        make_inference: Callable[[PolicyModule], Inference],
        watcher: ModelWatcher,
        sender: Sender,
        reporter: EpisodeReporter,
        options: PlayerOptions,
    ) -> None:
        super().__init__(watcher)
        self._make_policy = make_policy
        self._make_inference = make_inference
        self.sender = sender
        self._reporter = reporter
        self._options = options
        self._inference: Inference | None = None
        self._slots: list[list[Slot]] = []
        self._readers: list[Reader] = []
        self._fragment_count = 0

    @property
    def policy(self) -> PolicyModule | None:
        """The policy, or None until the spaces of an environment are known."""
        return None if self._inference is None else self._inference.policy

    @property
    def is_seated(self) -> bool:
        """Whether it knows its rows, and has a policy."""
        return self._inference is not None

    @property
    def fragment_count(self) -> int:
        """See `Seated.fragment_count`."""
        return self._fragment_count

    def put(self, fragment: Fragment, wait_s: float) -> bool:
        """See `Seated.put`."""
        return self.sender.put(fragment, wait_s)

    def count_undelivered(self) -> None:
        """See `Seated.count_undelivered`."""
        self.sender.count_undelivered()

    @property
    def waiting_fragment_count(self) -> int:
        """Fragments that wait to be sent."""
        return self.sender.waiting_count

    def fragment_counts(self) -> dict[str, int]:
        """Return fragments by what became of them, see `Sender.counts`."""
        return self.sender.counts()

    @property
    def step_count(self) -> int:
        """Steps answered so far, of all its rows."""
        return sum(reader.step_count for reader in self._readers)

    def sit(self, part: Part, groups: Sequence[range]) -> None:
        """Take the rows of a part of the environments; *groups* are indices of environments."""
        self._inference = self._make_inference(
            self._make_policy(part.observation_space, part.action_space)
        )
        self._slots = [
            [self._make_slot(index, label) for index in env_indices for label in part.labels]
            for env_indices in groups
        ]
        self._readers = [Reader(slots) for slots in self._slots]

    def _make_slot(self, env_index: int, label: str) -> Slot:
        assert self._inference is not None
        options = self._options
        worker_id = f"{options.worker_prefix}-{env_index}"
        if label:
            worker_id += f"-{label}"
        state = self._inference.initial_state
        return Slot(
            Fragmenter(worker_id=worker_id, step_count=options.fragment_steps),
            EpisodeTracker(worker_id, options.task, options.discount),
            state,
            state,
        )

    def take_model(self) -> None:
        """See `Seated.take_model`."""
        taken = self.watcher.take()
        if taken is None:
            return
        model = self._joined(taken, lambda: self._adopt(taken))
        if model.session_id != self.model.session_id:
            what = f"session {model.session_id!r}" if model.in_session else "no session"
            logger.info("now in %s at model version %d", what, model.model_version)
        self.model = model
        for slots in self._slots:
            for slot in slots:
                slot.fragmenter.staleness_max = model.staleness_max

    def _adopt(self, model: Model) -> None:
        assert self._inference is not None
        if model.weights is not None:
            set_policy_weights(
                self._inference.policy, model.weights, strict=self._options.strict_weights
            )

    # What environments say ----------------------------------------------------------------------

    def read(self, group: int, arrays: GroupArrays) -> list[float]:
        """Take in what a group answered; the returns of episodes that ended."""
        return self._report(self._readers[group].read(arrays))

    def read_failed(self, group: int, arrays: GroupArrays | None) -> list[float]:
        """Take in what a process that is gone had answered; the returns of episodes that ended."""
        if not self._readers:
            return []  # It failed before the rows of any environment were known.
        return self._report(self._readers[group].read_failed(arrays))

    def name_task(self, group: int, row: int, task: str) -> None:
        """Label the episode that begins in a row."""
        slot = self._slots[group][row]
        slot.next_task = task
        if slot.tracker.is_empty and not slot.awaits_answer:
            slot.tracker.task = task

    def _report(self, reports: list[EpisodeReport]) -> list[float]:
        for report in reports:
            self._reporter.put(report)
        return [report.return_sum for report in reports]

    # Turns -------------------------------------------------------------------------------------

    def act(self, groups: list[int], arrays: list[GroupArrays]) -> Callable[[], list[Fragment]]:
        """Choose and write the actions of the groups' rows."""
        assert self._inference is not None
        slots = [slot for group in groups for slot in self._slots[group]]
        states_before = [slot.state for slot in slots]
        played = play_round(arrays, self._inference, states_before, self.model.model_version)
        return lambda: self._cut(slots, states_before, played)

    def _cut(self, slots: list[Slot], states_before: list[State], played: Round) -> list[Fragment]:
        fragments = []
        for index, slot in enumerate(slots):
            if not played.acts[index]:
                continue
            slot.state = played.decision.states[index]
            fragment = self._push(slot, index, played, states_before[index])
            if fragment is not None:
                fragments.append(fragment)
        self._fragment_count += len(fragments)
        return fragments

    def _push(self, slot: Slot, index: int, played: Round, state_before: State) -> Fragment | None:
        model = self.model
        wants_state = state_before is not None and slot.fragmenter.wants_state(
            model.session_id, model.model_version
        )
        slot.awaits_answer = True
        return slot.fragmenter.push(
            Step(
                session_id=model.session_id,
                model_version=model.model_version,
                obs=tree_row(played.obs, index),
                action=tree_row(played.decision.action, index),
                first=bool(played.first[index]),
                episode_id=slot.episode_id,
                state=state_arrays(state_before) if wants_state else None,
                log_prob=float(played.decision.log_prob[index]),
                value=float(played.decision.value[index]),
            )
        )
