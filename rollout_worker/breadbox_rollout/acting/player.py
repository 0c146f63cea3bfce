"""Players: a policy with its model and its rows of the environments, and a sender of fragments."""

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from breadbox.model.errors import InvalidRequestError
from breadbox.model.fragment import Fragment, Tree
from breadbox.model.trees import row as tree_row
from breadbox.model.types import EpisodeEnd, WorkerSteps
from breadbox.shared.step_ends import slow_advice
from breadbox.writing.fragmenter import Fragmenter, Step
from breadbox.writing.reporting import EpisodeReporter, worker_steps
from breadbox_policies import (
    NotRepeatableError,
    PolicyModule,
    State,
    WeightsMismatchError,
    set_policy_weights,
)
from breadbox_rollout.acting.inference import Inference, Round, play_round, state_arrays
from breadbox_rollout.environments.arrays import GroupArrays
from breadbox_rollout.environments.origin import policy_text, spaces_text
from breadbox_rollout.processes.pool import AgentRows
from breadbox_rollout.sending.models import NO_MODEL, Model, ModelWatcher
from breadbox_rollout.sending.sender import EpisodeTracker, Sender
from breadbox_rollout.settings import RolloutSettings

logger = logging.getLogger(__name__)

SLOW_FRAGMENTS = 2
"""Fragments in a row that become stale while they are filled before a row is called slow."""

MakePolicy = Callable[[Any, Any], PolicyModule]
MakeInference = Callable[[PolicyModule], Inference]


class Participant(ABC):
    """Base of players and opponents, which act for the rows of some agents."""

    sender: Sender | None = None
    """Sender of fragments, or None if nothing is learned from these rows."""
    step_count = 0
    fragment_count = 0

    def __init__(
        self, make_policy: MakePolicy, make_inference: MakeInference, watcher: ModelWatcher
    ) -> None:
        """Act with the model that *watcher* follows; the caller starts and closes it."""
        self.watcher = watcher
        self.model: Model = NO_MODEL
        """The model that acts; replaced only between two rounds."""
        self.part: AgentRows | None = None
        """The rows, or None until an environment has reported its spaces."""
        self._make_policy = make_policy
        self._make_inference = make_inference
        self._shunned_id = ""
        """An older session of another policy, which must end first."""

    @property
    def waits_for(self) -> str:
        """What a learner must do before it can act, or empty if nothing."""
        latest = self.watcher.latest
        if not latest.in_session:
            return latest.waits_for
        if latest.session_id == self._shunned_id:
            return f"another session than {latest.session_id!r} of buffer {latest.buffer!r}"
        return ""

    @property
    def in_session(self) -> bool:
        """True if it may act; the worker acts only if all its policies may."""
        return self.model.in_session

    @abstractmethod
    def sit(self, part: AgentRows, groups: Sequence[range]) -> None:
        """Start to act for a part of the rows; *groups* are indices of environments."""

    def take_model(self) -> None:
        """Adopt new session, version and weights atomically; InvalidRequestError if they misfit.

        If they are of an older session of another policy, it waits for another session instead.
        """
        model = self.watcher.take()
        if model is None:
            return
        shunned, self._shunned_id = self._shunned_id, ""
        try:
            self._adopt(model)
        except WeightsMismatchError as error:
            where = f"session {model.session_id!r} of buffer {model.buffer!r}"
            remedy = "a worker needs --policy, --policy-options and --env of its learner"
            if not model.is_older:
                raise InvalidRequestError(
                    "policy", f"is not that of {where}: {error}; {remedy}"
                ) from error
            if model.session_id != shunned:
                logger.warning(
                    "waiting for another session: %s, which is older than this worker, has another "
                    "policy (%s). If it is left over from another run, end it with `breadbox "
                    "buffers end-session %s`; otherwise %s",
                    where,
                    error,
                    model.buffer,
                    remedy,
                )
            self._shunned_id = model.session_id
            model = NO_MODEL
        before, self.model = self.model, model
        self._changed(before)

    @abstractmethod
    def _adopt(self, model: Model) -> None:
        """Adopt the weights of a model; `model` is still the one before."""

    def _changed(self, before: Model) -> None:
        return

    @abstractmethod
    def act(self, groups: list[int], arrays: list[GroupArrays]) -> Callable[[], list[Fragment]]:
        """Choose and write the rows' actions; return the function to cut fragments with, once."""

    def finish(self, group: int, arrays: GroupArrays) -> list[Fragment]:
        """Cut the fragments of a group's rows, all of which must be full."""
        return []

    def read(self, group: int, arrays: GroupArrays) -> list[float]:
        """Read a group's answers; return the returns of episodes that ended."""
        return []

    def cut_full(self, group: int, arrays: GroupArrays) -> list[Fragment]:
        """Cut the full fragments of a group's rows, if each needs a ticket."""
        return []

    def may_act(self, group: int) -> bool:
        """Return whether each row of a group has a ticket, if it needs one; ask for those."""
        return True

    def read_failed(self, group: int, arrays: GroupArrays | None) -> list[float]:
        """Read the last answers of a process that is gone, if it had arrays; see `read`."""
        return []

    def steps(self) -> list[WorkerSteps]:
        """Return where the steps of each row went, if they are learned from."""
        return []

    def fragments(self) -> Counter[str]:
        """Return the number of its fragments by outcome, with those that were never sent."""
        return Counter()

    def slow_steps(self) -> list[WorkerSteps]:
        """Return the rows of which one fragment after the other became stale before it was full."""
        return []

    def report_steps(self) -> None:
        """Report where the steps of each row went."""
        return

    def name_task(self, group: int, row: int, task: str) -> None:
        """Label the episode that begins in a row, if its episodes are reported."""
        return


@dataclass(slots=True)
class _Slot:
    fragmenter: Fragmenter
    tracker: EpisodeTracker
    state: State
    """Recurrent state before the next step, or None without memory."""
    episode_id: int = 0
    awaits_answer: bool = False
    """True if an action was written and its step pushed, but not yet answered."""
    answer_count: int = 0
    abort_count: int = 0
    obs_count: int = 0
    next_task: str | None = None
    """Task of the episode that begins, if the environment named it."""


class Player(Participant):
    """Act with the current model for its rows, and cut their steps into fragments."""

    def __init__(
        self,
        make_policy: MakePolicy,
        make_inference: MakeInference,
        watcher: ModelWatcher,
        sender: Sender,
        reporter: EpisodeReporter,
        settings: RolloutSettings,
        policy_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Use *sender* and *reporter*, which the caller starts and closes.

        Declares the policy with these options, spaces and wrappers; None to declare nothing.
        """
        super().__init__(make_policy, make_inference, watcher)
        self.sender: Sender = sender
        self._reporter = reporter
        self._settings = settings
        self._policy_options = policy_options
        self._inference: Inference | None = None
        self._slots: list[list[_Slot]] = []
        self._has_warned = False

    @property
    def policy(self) -> PolicyModule | None:
        """The policy, or None until an environment has reported its spaces."""
        return None if self._inference is None else self._inference.policy

    def sit(self, part: AgentRows, groups: Sequence[range]) -> None:
        self.part = part
        policy = self._make_policy(part.observation_space, part.action_space)
        self._inference = self._make_inference(policy)
        if self._policy_options is not None:
            said = spaces_text(part.observation_space, part.action_space)
            said |= policy_text(policy, self._policy_options)
            self.sender.declare_origin({**part.wrappers, **said})
        self._slots = [
            [self._make_slot(index, label) for index in env_indices for label in part.labels]
            for env_indices in groups
        ]

    def _make_slot(self, env_index: int, label: str) -> _Slot:
        assert self._inference is not None
        settings = self._settings
        worker_id = f"{settings.worker_name}-{env_index}" + (f"-{label}" if label else "")
        return _Slot(
            Fragmenter(worker_id=worker_id, step_count=settings.fragment_steps),
            EpisodeTracker(worker_id, settings.task, settings.discount),
            self._inference.initial_state,
        )

    def _adopt(self, model: Model) -> None:
        assert self._inference is not None
        if model.weights is not None:
            strict = self._settings.weights == "strict"
            set_policy_weights(self._inference.policy, model.weights, strict=strict)

    def _changed(self, before: Model) -> None:
        model = self.model
        if model.session_id != before.session_id:
            what = f"session {model.session_id!r}" if model.in_session else "no session"
            logger.info("now in %s at model version %d", what, model.model_version)
        for slots in self._slots:
            for slot in slots:
                slot.fragmenter.staleness_max = model.staleness_max
                slot.fragmenter.is_ragged = model.is_ragged

    def read(self, group: int, arrays: GroupArrays) -> list[float]:
        returns: list[float] = []
        answers, aborts = arrays.answer_count.tolist(), arrays.abort_count.tolist()
        for index, slot in enumerate(self._slots[group]):
            if answers[index] != slot.answer_count:
                slot.answer_count = answers[index]
                self._answer(slot, arrays, index, returns)
            elif aborts[index] != slot.abort_count:
                self._abort(slot, None, returns)
            slot.abort_count = aborts[index]
            slot.obs_count = int(arrays.obs_count[index])
        return returns

    def cut_full(self, group: int, arrays: GroupArrays) -> list[Fragment]:
        if self.sender.pacer is None:
            return []
        fragments = []
        for index, slot in enumerate(self._slots[group]):
            if slot.fragmenter.answered_count == self._settings.fragment_steps:
                fragment = slot.fragmenter.cut(tree_row(arrays.obs, index))
                assert fragment is not None
                fragments.append(fragment)
        return self._counted(fragments)

    def may_act(self, group: int) -> bool:
        pacer, model = self.sender.pacer, self.model
        workers = [slot.fragmenter.worker_id for slot in self._slots[group]]
        return pacer is None or (
            self.in_session
            and pacer.wait(workers, model.session_id, model_version=model.model_version)
        )

    def read_failed(self, group: int, arrays: GroupArrays | None) -> list[float]:
        """See `Participant.read_failed`. Aborts the episodes of the process."""
        returns: list[float] = []
        # There are no slots if it failed before any environment had reported its rows.
        for index, slot in enumerate(self._slots[group] if self._slots else ()):
            ended, next_obs = False, None
            if arrays is not None and int(arrays.answer_count[index]) != slot.answer_count:
                ended = bool(arrays.terminated[index] or arrays.truncated[index])
                self._answer(slot, arrays, index, returns)
                if not ended and int(arrays.obs_count[index]) != slot.obs_count:
                    next_obs = tree_row(arrays.obs, index)
            if not ended:
                self._abort(slot, next_obs, returns)
            slot.answer_count = slot.abort_count = slot.obs_count = 0
        return returns

    def _answer(self, slot: _Slot, arrays: GroupArrays, index: int, returns: list[float]) -> None:
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
            self._end(slot, EpisodeEnd.TERMINATED if terminated else EpisodeEnd.TRUNCATED, returns)

    def _abort(self, slot: _Slot, next_obs: Tree, returns: list[float]) -> None:
        slot.awaits_answer = False
        slot.fragmenter.abort(next_obs)
        self._end(slot, EpisodeEnd.ABORTED, returns)

    def _end(self, slot: _Slot, end: EpisodeEnd, returns: list[float]) -> None:
        assert self._inference is not None
        report = slot.tracker.end(end, slot.next_task)
        slot.next_task = None
        slot.episode_id += 1
        slot.state = self._inference.initial_state
        if report is not None:
            self._reporter.put(report)
            returns.append(report.return_sum)

    def steps(self) -> list[WorkerSteps]:
        return [self._steps(slot) for slots in self._slots for slot in slots]

    def _steps(self, slot: _Slot) -> WorkerSteps:
        return worker_steps(slot.fragmenter, self.sender.steps, task=slot.tracker.task)

    def fragments(self) -> Counter[str]:
        counts = Counter(self.sender.counts())
        counts["stale_while_filled"] = sum(
            slot.fragmenter.stale_count for slots in self._slots for slot in slots
        )
        return counts

    def slow_steps(self) -> list[WorkerSteps]:
        return [
            self._steps(slot)
            for slots in self._slots
            for slot in slots
            if slot.fragmenter.stale_in_a_row >= SLOW_FRAGMENTS
        ]

    def report_steps(self) -> None:
        """See `Participant.report_steps`. Warns once of rows that are too slow, with the remedy."""
        self._reporter.put_steps(self.steps())
        slow = self.slow_steps()
        if slow and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%d of %d environments are too slow to be trained on: each of their fragments "
                "became stale while it was filled, and was dropped. %s",
                len(slow),
                sum(map(len, self._slots)),
                slow_advice(slow, self.model.staleness_max),
            )

    def name_task(self, group: int, row: int, task: str) -> None:
        slot = self._slots[group][row]
        slot.next_task = task
        if slot.tracker.is_empty and not slot.awaits_answer:
            slot.tracker.task = task

    def act(self, groups: list[int], arrays: list[GroupArrays]) -> Callable[[], list[Fragment]]:
        assert self._inference is not None
        slots = [slot for group in groups for slot in self._slots[group]]
        states_before = [slot.state for slot in slots]
        played = play_round(arrays, self._inference, states_before, self.model.model_version)
        return lambda: self._cut(slots, states_before, played)

    def finish(self, group: int, arrays: GroupArrays) -> list[Fragment]:
        """See `Participant.finish`. Raises NotRepeatableError for a row with fewer steps."""
        fragments = []
        for index, slot in enumerate(self._slots[group]):
            count, wanted = slot.fragmenter.answered_count, self._settings.fragment_steps
            fragment = slot.fragmenter.cut(tree_row(arrays.obs, index))
            if fragment is None or count != wanted:
                raise NotRepeatableError(
                    f"environment {slot.fragmenter.worker_id} answered {count} steps of {wanted}: "
                    "none may fail, or spend a step on its reset, and the batch must divide by "
                    "the agents of all environments"
                )
            fragments.append(fragment)
        return self._counted(fragments)

    def _counted(self, fragments: list[Fragment]) -> list[Fragment]:
        self.fragment_count += len(fragments)
        self.sender.steps.expect(fragments)
        if self.sender.pacer is not None:
            for fragment in fragments:
                self.sender.pacer.sent(fragment)
        return fragments

    def _cut(self, slots: list[_Slot], states_before: list[State], played: Round) -> list[Fragment]:
        fragments = []
        for index, slot in enumerate(slots):
            if not played.acts[index]:
                continue
            slot.state = played.decision.states[index]
            fragment = self._push(slot, index, played, states_before[index])
            if fragment is not None:
                fragments.append(fragment)
        return self._counted(fragments)

    def _push(self, slot: _Slot, index: int, played: Round, state_before: State) -> Fragment | None:
        model = self.model
        wants_state = state_before is not None and slot.fragmenter.wants_state(
            model.session_id, model.model_version
        )
        slot.awaits_answer = True
        stale_count = slot.fragmenter.stale_count
        fragment = slot.fragmenter.push(
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
        if self.sender.pacer is not None and slot.fragmenter.stale_count > stale_count:
            self.sender.pacer.dropped(slot.fragmenter.worker_id)
        return fragment
