"""Workers' steps as a naive list, and the fragments that they come in."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from breadbox.model.fragment import Fragment


@dataclass(slots=True)
class NaiveStep:
    """A step with everything that can be asked of it, kept the simplest way."""

    obs: float
    next_obs: float
    reward: float
    terminated: bool
    truncated: bool
    first: bool
    episode_id: int
    is_usable: bool
    handle: int
    follower: "NaiveStep | None" = None
    """The next step of its worker, if it follows without a gap."""


@dataclass
class NaiveWorker:
    """Plays a random process whose observations are all different numbers."""

    worker_id: str
    rng: np.random.Generator
    depth: int = 0
    """Frames of an observation; 0: a vector."""
    session_id: str = "s"
    fragment_index: int = 0
    episode_id: int = 0
    now: float = 0.0
    is_first: bool = True
    latest: NaiveStep | None = None
    stack: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._begin()

    def fragment(
        self, count: int, handle: int, *, drop: int = 0
    ) -> tuple[Fragment, list[NaiveStep]]:
        """Play *count* steps, after *drop* of which nobody hears."""
        if drop:
            self._play(drop)
        steps, seen, finals, final_steps = self._play(count)
        fragment = Fragment(
            worker_id=self.worker_id,
            fragment_index=self.fragment_index,
            session_id=self.session_id,
            model_version_min=self.fragment_index,
            model_version_max=self.fragment_index,
            obs=np.stack(seen),
            action=np.array([step.obs for step in steps], np.int64),
            reward=np.array([step.reward for step in steps], np.float32),
            terminated=np.array([step.terminated for step in steps]),
            truncated=np.array([step.truncated for step in steps]),
            first=np.array([step.first for step in steps]),
            episode_id=np.array([step.episode_id for step in steps]),
            next_obs=self._seen(),
            in_state=None,
            final_obs=np.stack(finals) if finals else None,
            final_obs_step=np.array(final_steps, np.int32) if finals else None,
            extras={"twice": np.array([2 * step.obs for step in steps], np.float32)},
            discontinuity=drop > 0,
        )
        self.fragment_index += 1
        if self.latest is not None and not drop:
            self.latest.follower = steps[0]
        for offset, step in enumerate(steps):
            step.handle = handle + offset
            if offset + 1 < count:
                step.follower = steps[offset + 1]
        self.latest = steps[-1]
        return fragment, steps

    def _play(self, count: int) -> tuple[list[NaiveStep], list[Any], list[Any], list[int]]:
        steps, seen, finals, final_steps = [], [], [], []
        for number in range(count):
            if self.is_first:
                self._begin()
            before, first = self.now, self.is_first
            seen.append(self._seen())
            self._move()
            kind = self.rng.choice(
                ["on", "on", "on", "on", "terminated", "truncated", "lost", "blind"]
            )
            if self.rng.random() < 0.5:
                kind = "on"
            terminated, truncated = kind in ("terminated", "blind"), kind in ("truncated", "lost")
            if kind in ("terminated", "truncated"):
                finals.append(self._seen())
                final_steps.append(number)
            steps.append(
                NaiveStep(
                    obs=before,
                    next_obs=before if kind in ("lost", "blind") else self.now,
                    reward=float(np.float32(self.rng.random())),
                    terminated=terminated,
                    truncated=truncated,
                    first=first,
                    episode_id=self.episode_id,
                    is_usable=kind != "lost",
                    handle=-1,
                )
            )
            self.is_first = terminated or truncated
            if self.is_first:
                self.episode_id += 1
                self._begin()
        return steps, seen, finals, final_steps

    def _begin(self) -> None:
        self.now += 1.0
        self.stack = [self.now] * self.depth

    def _move(self) -> None:
        self.now += 1.0
        self.stack = [*self.stack[1:], self.now][: self.depth]

    def _seen(self) -> Any:
        if self.depth:
            return np.stack([np.full((3, 5), value, np.int32) for value in self.stack], axis=-1)
        return np.full(3, self.now, np.float32)
