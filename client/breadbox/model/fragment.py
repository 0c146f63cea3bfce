"""A fragment: T consecutive steps of one worker, as arrays.

Step t is the policy's observation and action at time t, and the environment's answer to them:
`reward[t]`, `terminated[t]` and `truncated[t]` answer `action[t]`.

A sequence is a member of a group: T tokens of one completion, and nothing that only steps have.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, ClassVar, Final, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from breadbox.model.errors import InvalidRequestError, TreeMismatchError
from breadbox.model.summaries import Summarized
from breadbox.model.types import FragmentMetadata, Number, checked_numbers

Tree = Any
"""Nested dicts (string keys), lists and tuples of numpy arrays, or None."""


def tree_size_bytes(tree: Tree) -> int:
    """Return the bytes of all arrays of a tree, before any codec; 0 for None."""
    match tree:
        case None:
            return 0
        case dict():
            return sum(tree_size_bytes(child) for child in tree.values())
        case list() | tuple():
            return sum(tree_size_bytes(child) for child in tree)
        case _:
            return int(getattr(tree, "nbytes", 0))


@dataclass(slots=True, kw_only=True, repr=False)
class Fragment(Summarized):
    """T steps of one worker. Leaves of trees are `[T, ...]` unless said otherwise.

    Attributes:
        worker_id: The worker that played it.
        fragment_index: Position in the worker's sequence within the session, contiguous from 0.
        session_id: The session it was played for.
        model_version_min: Version that produced the oldest step.
        model_version_max: Version that produced the newest step.
        obs: Observations of the policy; any dtypes, [T, ...].
        action: Actions of the policy; any dtypes, [T, ...].
        reward: float32[T], undiscounted.
        terminated: bool[T]; the episode ended in a terminal state with this step.
        truncated: bool[T]; the episode was cut off after this step (time limit, aborted
            environment).
        first: bool[T]; this step starts an episode; first[t] == ended[t-1] within a fragment.
        episode_id: int64[T]; the same number for all steps of an episode.
        next_obs: Observation after the last step, leaves [...]. If that step ended an episode, the
            first of the next one or, from a `StepWriter`, the final observation.
        in_state: Recurrent state before step 0, leaves [...] without a batch axis, or None. If step
            0 starts an episode, rollout workers store the policy's initial state.
        final_obs_step: int32[K]; ascending steps at which an episode ended with a true final
            observation is known.
        final_obs: Final observations of those K episodes, leaves [K, ...], or None if K is 0.
        log_prob: float32[T]; log-probability of `action` under the policy that acted.
        value: float32[T]; value estimate of the policy that acted, in reward units.
        model_version: int64[T]; version that produced each step, or None if min equals max.
        extras: Anything else, leaves [T, ...]. Rollout workers, `StepWriter` and `breadbox import`
            add `episode_return`, float32[T], and `episode_length`, int64[T]: return and steps of
            the episode that ended with this step, counted from its start even if earlier fragments
            were dropped; NaN and 0 if no episode ended, or it was aborted.
        discontinuity: True if step 0 does not follow the last step of the previous fragment,
            because steps between them were dropped.
        priority: Priority for samplers that use it, from 0 to 1e30; a chunk has the largest of its
            fragments', until `Client.update_priorities` sets it.
    """

    worker_id: str
    fragment_index: int
    session_id: str
    model_version_min: int
    model_version_max: int
    obs: Tree
    action: Tree
    reward: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    first: NDArray[np.bool_]
    episode_id: NDArray[np.int64]
    next_obs: Tree
    in_state: Tree = None
    final_obs_step: NDArray[np.int32] | None = None
    final_obs: Tree = None
    log_prob: NDArray[np.float32] | None = None
    value: NDArray[np.float32] | None = None
    model_version: NDArray[np.int64] | None = None
    extras: dict[str, Tree] = field(default_factory=dict)
    discontinuity: bool = False
    priority: float = 1.0

    def _facts(self) -> list[str]:
        low, high = self.model_version_min, self.model_version_max
        return [
            *(f"{name}={getattr(self, name)!r}" for name in ("worker_id", "fragment_index")),
            f"session_id={self.session_id!r}",
            f"model version {low}" if low == high else f"model versions {low} to {high}",
            *(["discontinuity"] if self.discontinuity else []),
            *([f"priority={self.priority:g}"] if self.priority != 1.0 else []),
        ]

    def _arrays(self) -> dict[str, Tree]:
        return {name: getattr(self, name) for name in ARRAY_FIELDS}

    @property
    def step_count(self) -> int:
        """T, the number of steps."""
        return len(self.reward)

    @property
    def size_bytes(self) -> int:
        """Bytes of all arrays, before any codec: its size in memory."""
        total = 0
        # Called for every appended fragment, so arrays are not walked as trees.
        for value in _arrays_of(self):
            if type(value) is np.ndarray:
                total += value.nbytes
            elif value is not None:
                total += tree_size_bytes(value)
        return total

    @property
    def ended(self) -> NDArray[np.bool_]:
        """bool[T]; terminated or truncated."""
        # Flags may be integers of two types, of which numpy takes no bits together.
        ended: NDArray[np.bool_] = np.logical_or(self.terminated, self.truncated)
        return ended


METADATA_FIELDS: Final = tuple(
    each.name for each in fields(FragmentMetadata) if each.name in Fragment.__dataclass_fields__
)
"""Fields that a fragment shares with its metadata; the others are arrays."""
ARRAY_FIELDS: Final = tuple(
    each.name for each in fields(Fragment) if each.name not in METADATA_FIELDS
)
_arrays_of = attrgetter(*ARRAY_FIELDS)


class _OfMember(Summarized):
    """What belongs to a member of a group, under the names of its metadata."""

    __slots__ = ()
    group: str
    member: int
    discontinuity: ClassVar[bool] = False
    priority: ClassVar[float] = 1.0

    @property
    def worker_id(self) -> str:
        """`group`, under its name in the metadata."""
        return self.group

    @property
    def fragment_index(self) -> int:
        """`member`, under its name in the metadata."""
        return self.member

    @property
    def size_bytes(self) -> int:
        """Bytes of all arrays, before any codec: its size in memory."""
        return tree_size_bytes(self._arrays())


@dataclass(slots=True, kw_only=True, repr=False)
class Sequence(_OfMember):
    """One member of a group, such as a completion of T tokens. Arrays are not copied.

    ```python
    sequence = breadbox.Sequence(
        group="prompt-7",
        member=0,
        tokens={"ids": np.array([11, 12, 13]), "log_prob": np.zeros(3, np.float32)},
        context={"prompt": np.array([4, 5])},
        numbers={"reward": 1.0},
        model_version_min=3,
        model_version_max=3,
    )
    ```

    Attributes:
        group: Name of the group, such as the id of the prompt.
        member: Number of the member in its group, from 0.
        tokens: Arrays [T, ...] by name, at least one, all of the same T of at least 1.
        context: Arrays of any shape by name, for the sequence as a whole.
        numbers: At most 16 numbers, flags and texts by name, which the server lists and learners
            see without loading a payload. An integer has 64 bits; a name and a text have at most 64
            bytes.
        model_version_min: Version that produced the oldest token.
        model_version_max: Version that produced the newest token.
        session_id: The session it was made for. If it is empty, an append asks for the current
            session, and sets it.

    Raises:
        InvalidRequestError: A name or number is not as above.
        TreeMismatchError: An array of `tokens` has no rows, or not as many as the first.
    """

    group: str
    member: int
    tokens: Mapping[str, NDArray[Any]]
    context: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    numbers: Mapping[str, Number] = field(default_factory=dict)
    model_version_min: int
    model_version_max: int
    session_id: str = ""

    def __post_init__(self) -> None:
        self.numbers = checked_numbers(self.numbers)
        self.tokens = _arrays_by_name("tokens", self.tokens)
        self.context = _arrays_by_name("context", self.context)
        if both := self.tokens.keys() & self.context.keys():
            raise InvalidRequestError("context", f"has {min(both)!r}, which tokens has as well")
        if not self.tokens:
            raise InvalidRequestError("tokens", "must hold at least one array")
        wanted: int | None = None
        for name, array in self.tokens.items():
            shape = tuple(getattr(array, "shape", ()))
            if not shape or not shape[0] or shape[0] != (wanted or shape[0]):
                raise TreeMismatchError(f"tokens.{name}", f"[{wanted or 'T'}, ...]", str([*shape]))
            wanted = shape[0]

    @classmethod
    def read(cls, metadata: FragmentMetadata, tokens: Tree, context: Tree) -> Self:
        """Return the sequence of a metadata, with those arrays that were read; the library's own.

        Raises nothing, since the arrays were checked as they were read.
        """
        made = object.__new__(cls)
        made.group, made.member = metadata.worker_id, metadata.fragment_index
        made.tokens, made.context = (
            {name: leaf for name, leaf in (named or {}).items() if leaf is not None}
            for named in (tokens, context)
        )
        made.numbers, made.session_id = metadata.numbers, metadata.session_id
        made.model_version_min = metadata.model_version_min
        made.model_version_max = metadata.model_version_max
        return made

    def _facts(self) -> list[str]:
        low, high = self.model_version_min, self.model_version_max
        return [
            *(f"{name}={getattr(self, name)!r}" for name in ("group", "member")),
            f"model version {low}" if low == high else f"model versions {low} to {high}",
            *(f"{name}={value!r}" for name, value in self.numbers.items()),
        ]

    def _arrays(self) -> dict[str, Tree]:
        return {"tokens": self.tokens, "context": self.context}

    @property
    def step_count(self) -> int:
        """T, the number of tokens, or 0 if no array of them was read."""
        return len(next(iter(self.tokens.values()), ()))


@dataclass(slots=True, repr=False)
class Part(_OfMember):
    """Arrays and numbers that are attached to a member of an open group, or to a row.

    ```python
    part = breadbox.Part("prompt-7", 0, "reward", {"scores": np.ones(3)}, {"reward": 1.0})
    ```

    Attributes:
        group: Name of the group, or row.
        member: Number of the member in its group, from 0 to 1023.
        name: Name of the part: 1 to 64 bytes of printable text, and not "tokens", which is the name
            of a member's sequence. Empty for numbers that are no part: they can be set again.
        arrays: Arrays of any shape by name; bytes become uint8[N]. A part may have numbers alone.
        numbers: Numbers that are merged into those of the member; as in `Sequence.numbers`, and
            at most 16 once they are merged.
        tokens: Arrays [T, ...] by name that join the tokens of the member's sequence, such as a
            reward for each of its T tokens; those of `arrays` join its context.
        session_id: The session that it is for, or empty for the current one.

    Raises:
        InvalidRequestError: A name or number is not as above; there are arrays without a name, or
            nothing at all.
    """

    group: str
    member: int = 0
    name: str = ""
    arrays: Mapping[str, Any] = field(default_factory=dict)
    numbers: Mapping[str, Number] = field(default_factory=dict)
    tokens: Mapping[str, Any] = field(default_factory=dict)
    session_id: str = ""
    model_version_min: ClassVar[int] = 0
    model_version_max: ClassVar[int] = 0
    step_count: ClassVar[int] = 1

    def __post_init__(self) -> None:
        self.numbers = checked_numbers(self.numbers or {})
        bytes_of = (bytes, bytearray, memoryview)
        self.arrays = {
            name: np.frombuffer(value, np.uint8) if isinstance(value, bytes_of) else value
            for name, value in _arrays_by_name("arrays", self.arrays or {}).items()
        }
        self.tokens = _arrays_by_name("tokens", self.tokens or {})
        if self.has_arrays and not self.name:
            raise InvalidRequestError("name", "must be given with arrays")
        if not self.has_arrays and not self.numbers:
            raise InvalidRequestError(
                "arrays", "must hold at least one array, or numbers one value"
            )

    def _facts(self) -> list[str]:
        return [
            *(f"{name}={getattr(self, name)!r}" for name in ("group", "member", "name")),
            *(f"{name}={value!r}" for name, value in self.numbers.items()),
        ]

    def _arrays(self) -> dict[str, Tree]:
        return {"arrays": self.arrays, "tokens": self.tokens}

    @property
    def has_arrays(self) -> bool:
        """Whether it is more than numbers."""
        return bool(self.arrays or self.tokens)


Appendable = Fragment | Sequence
"""What a client appends: a buffer takes either kind, by the schema of its session."""
Sendable = Appendable | Part
"""What a client announces to the server, under the name of a fragment."""


def checked_sequence(loaded: object) -> Sequence:
    """Return a sequence as it is; raise InvalidRequestError for a fragment of steps."""
    if not isinstance(loaded, Sequence):
        raise InvalidRequestError("lease", "holds fragments of steps: take them by fragments()")
    return loaded


def _arrays_by_name(field_name: str, named: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(named, Mapping):
        raise InvalidRequestError(field_name, f"must be a mapping of arrays, got {named!r:.200}")
    if wrong := [name for name in named if not isinstance(name, str) or not name]:
        raise InvalidRequestError(field_name, f"has a name that is no text: {wrong[0]!r:.200}")
    scalars = (np.generic, bool, int, float, complex, list, tuple)
    return {
        name: np.asarray(value) if isinstance(value, scalars) else value
        for name, value in named.items()
    }


def fragment_of(
    session_id: str,
    worker_id: str,
    fragment_index: int,
    *,
    obs: Tree,
    action: Tree,
    reward: ArrayLike,
    next_obs: Tree,
    terminated: ArrayLike | None = None,
    truncated: ArrayLike | None = None,
    starts_episode: bool | None = None,
    episode_id: int = 0,
    model_version: int = 0,
    **optional: Any,
) -> Fragment:
    """Make a fragment of the arrays of T steps, and fill in the rest.

    ```python
    fragment = breadbox.fragment_of(
        session.session_id, "my-worker", 0, obs=np.zeros((8, 4), np.float32),
        action=np.zeros(8, np.int64), reward=np.ones(8), next_obs=np.zeros(4, np.float32),
    )
    ```

    `breadbox.StepWriter` makes fragments of single steps instead.

    Args:
        session_id: The current session, see `Client.start_session`.
        worker_id: The worker that played it; one for each environment.
        fragment_index: Position in the worker's sequence within the session, contiguous from 0.
        obs: Observations, leaves [T, ...].
        action: Actions, leaves [T, ...].
        reward: [T], undiscounted; stored as float32.
        next_obs: Observation after the last step, leaves [...].
        terminated: bool[T], or None if no step ended in a terminal state.
        truncated: bool[T], or None if no episode was cut off.
        starts_episode: True if step 0 starts an episode, or None for True in fragment 0 alone.
        episode_id: Number of the episode of step 0; episodes that follow in the fragment get the
            numbers after it.
        model_version: Version of the policy that acted.
        optional: Further fields of `breadbox.Fragment` by name, such as `log_prob` or `extras`.

    Raises:
        TreeMismatchError: `terminated` or `truncated` has another shape than `reward`.
        TypeError: A name in `optional` is no field of `Fragment`.
    """
    rewards = np.asarray(reward, np.float32)
    flags = []
    for name, given in (("terminated", terminated), ("truncated", truncated)):
        made = np.zeros(rewards.shape, np.bool_) if given is None else np.asarray(given, np.bool_)
        if made.shape != rewards.shape:
            raise TreeMismatchError(
                name, f"shape {rewards.shape}, that of reward", f"shape {made.shape}"
            )
        flags.append(made)
    first = np.zeros(rewards.shape, np.bool_)
    first[1:] = (flags[0] | flags[1])[:-1]
    numbers = episode_id + np.cumsum(first, dtype=np.int64)
    first[0] = fragment_index == 0 if starts_episode is None else starts_episode
    return Fragment(
        worker_id=worker_id,
        fragment_index=fragment_index,
        session_id=session_id,
        model_version_min=model_version,
        model_version_max=model_version,
        obs=obs,
        action=action,
        reward=rewards,
        terminated=flags[0],
        truncated=flags[1],
        first=first,
        episode_id=numbers,
        next_obs=next_obs,
        **optional,
    )
