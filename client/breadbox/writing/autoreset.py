"""Find out which steps after an episode's end only reset the environment."""

import logging
from enum import Enum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from breadbox.model.errors import InvalidRequestError

_log = logging.getLogger(__name__)

Autoreset = Literal["same_step", "next_step"]
"""How the environments begin the next episode.

same_step: the step after an end is the first of the next episode, as with Gymnasium's modes
SAME_STEP and DISABLED, Stable-Baselines3, or a loop that calls `reset` itself. next_step: the step
after an end only resets, as with Gymnasium's default mode NEXT_STEP; the writer leaves it out,
because its action had no effect.
"""

_NAMES: dict[object, Autoreset] = {
    "same_step": "same_step",
    "next_step": "next_step",
    "SameStep": "same_step",
    "NextStep": "next_step",
    "Disabled": "same_step",
}
"""Modes by our names, and by the values of `gymnasium.vector.AutoresetMode`."""
ENDS_TO_REFUSE = 8
"""Ends that all contradict a mode before it is refused: two observations may be equal by chance."""


def autoreset_of(given: Autoreset | Enum | None) -> Autoreset | None:
    """Return a mode by any of its names, None for None; InvalidRequestError if it is none."""
    value = given.value if isinstance(given, Enum) else given
    if value is not None and value not in _NAMES:
        raise InvalidRequestError(
            "autoreset",
            f"must be 'same_step', 'next_step' or a gymnasium.vector.AutoresetMode, got {given!r}",
        )
    return None if value is None else _NAMES[value]


class StepsAfterEnds:
    """Find the steps that only reset, by what follows the ends of episodes.

    A step that only resets sees the observation in which the episode ended, and leads to another;
    it ends nothing, and its reward is 0 unless rewards are transformed. A step that sees another
    observation begins an episode: environment or loop have reset by then.
    """

    def __init__(self, mode: Autoreset | None, *, looks: bool) -> None:
        """Find out the mode if None; without *looks*, believe it, and take None as same_step."""
        self._mode = mode
        self._looks = looks
        self._begun_count = 0
        """Steps after an end that saw another observation."""
        self._left_out_count = 0
        self._doubtful_count = 0
        """Steps that look like a reset, and are taken because of the mode or the reward."""
        self._has_warned = False

    def believe(self) -> None:
        """Look no more: the caller knows that the mode is right."""
        self._looks = False

    def left_out(
        self,
        after_end: NDArray[np.bool_],
        follows: NDArray[np.bool_],
        moves: NDArray[np.bool_],
        is_plain: NDArray[np.bool_],
    ) -> NDArray[np.bool_]:
        """Return bool[n]: environments that this step only resets. Each argument is bool[n].

        Args:
            after_end: The last step ended an episode.
            follows: The observation is that in which the episode ended.
            moves: The step leads to another observation, and ends nothing.
            is_plain: The reward is 0.

        Raises:
            InvalidRequestError: The mode is another one, or cannot be found out.
        """
        none = np.zeros_like(after_end)
        if not self._looks:
            return after_end if self._mode == "next_step" else none
        self._begun_count += int((after_end & ~follows).sum())
        if self._mode == "next_step":
            found = after_end & follows
            self._left_out_count += int(found.sum())
            self._warn_if_begun()
            return found
        alike = after_end & follows & moves
        found = alike & is_plain if self._mode is None else none
        self._doubtful_count += int((alike & ~found).sum())
        if self._doubtful_count >= max(ENDS_TO_REFUSE, 4 * self._begun_count):
            self._refuse()
        if not found.any():
            return none
        # Two observations may be equal by chance: then most steps after an end see others.
        if self._begun_count > self._left_out_count + int(found.sum()):
            self._warn_if_begun()
            return none
        if not self._left_out_count:
            _log.warning(
                "the step after an end only resets the environment, as in Gymnasium's mode "
                "NEXT_STEP, and is left out: autoreset='next_step' says so to the writer"
            )
        self._left_out_count += int(found.sum())
        return found

    def _warn_if_begun(self) -> None:
        """Warn once if the environments do not reset in the next step."""
        if self._has_warned or self._begun_count < max(ENDS_TO_REFUSE, 4 * self._left_out_count):
            return
        self._has_warned = True
        _log.warning(
            "the environments reset in the step that ends an episode, or before the next one, and "
            "not in the next step: autoreset='same_step' says so to the writer. %d steps after an "
            "end were taken, %d left out",
            self._begun_count,
            self._left_out_count,
        )

    def _refuse(self) -> None:
        said = "was not given" if self._mode is None else f"is {self._mode!r}"
        raise InvalidRequestError(
            "autoreset",
            f"{said}, but after {self._doubtful_count} ends of episodes the next step began with "
            "the final observation. Either the environments reset in the next step (Gymnasium's "
            "default, NEXT_STEP): give them autoreset_mode=AutoresetMode.SAME_STEP, or the writer "
            "autoreset='next_step'. Or next_obs of an end is the first observation of the next "
            "episode: use breadbox.true_next_obs. Or episodes begin where they end: give the "
            "writer autoreset='same_step' and follows='flags'",
        )
