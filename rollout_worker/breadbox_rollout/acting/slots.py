"""What the worker knows of one row (an agent of an environment) between two of its rounds."""

from dataclasses import dataclass, field

from breadbox.model.fragment import Tree
from breadbox.model.trees import row as tree_row
from breadbox.model.types import EpisodeEnd, EpisodeReport
from breadbox.writing.fragmenter import Fragmenter
from breadbox_policies import State
from breadbox_rollout.environments.arrays import GroupArrays
from breadbox_rollout.sending.episodes import EpisodeTracker


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
