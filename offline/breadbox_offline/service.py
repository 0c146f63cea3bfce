"""Write episodes into a buffer as fragments, and read them back.

F1 Fragments have exactly `step_count` steps; in index order nothing is lost. The last one is
shorter, or left out where a buffer takes one length only. F2 Final observations of ended episodes
are kept. F3 So is the recurrent state before a fragment's first step; all fragments of a cutter
have one, or none. F4 Fragments have the columns that workers and writers fill in (F7 there).
"""

import uuid
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from breadbox.client import Client
from breadbox.model import trees
from breadbox.model.errors import BufferNotFoundError, InvalidRequestError, SessionInUseError
from breadbox.model.fragment import Fragment, fragment_of
from breadbox.model.trees import Tree
from breadbox.model.types import (
    AdmissionOutcome,
    BufferConfig,
    BufferDescription,
    FragmentReference,
    FullPolicy,
    ReleaseMode,
    SchemaPolicy,
)
from breadbox.payload.dtypes import as_numpy
from breadbox.writing.fragmenter import EPISODE_COLUMNS, EpisodeTotals
from breadbox_offline.episodes.episode import Episode
from breadbox_offline.errors import EpisodeShapeError, OfflineDataError
from breadbox_offline.training.stages import STATE_IN, STATE_OUT, recorded_state

LOG_PROB = "log_prob"
VALUE = "value"

_LOG_PROB_NAMES = (LOG_PROB, "action_logp")
_VALUE_NAMES = (VALUE, "vf_preds")


@dataclass(slots=True, kw_only=True)
class FragmentCutter:
    """Cut episodes into fragments of one worker; its counts are those of `ImportCounts`."""

    step_count: int
    """Steps of a fragment, T."""
    worker_id: str
    session_id: str
    model_version: int = 0
    keeps_tail: bool = False
    """True to have a shorter last fragment."""
    next_index: int = 0
    """Index of the next fragment, above those that the worker has already."""
    dropped_step_count: int = 0
    assumed_state_count: int = 0
    _zero_state: Tree = None
    """State for an unknown one, or None if the first episode had no states."""
    _episode_count: int = 0
    _waiting: deque["_Stretch"] = field(default_factory=deque)
    _waiting_step_count: int = 0
    _totals: EpisodeTotals = field(default_factory=EpisodeTotals)

    def __post_init__(self) -> None:
        if self.step_count < 1:
            raise ValueError(f"step_count must be at least 1, got {self.step_count}")

    def add(self, episode: Episode) -> Iterator[Fragment]:
        """Yield fragments that this episode fills; an unfinished episode counts as truncated."""
        if not self._episode_count:
            self._zero_state = _zeros_like_states_of(episode)
        is_whole = episode.is_done and episode.t_started == 0
        steps = episode.as_truncated()
        self._waiting.append(_Stretch(self._episode_count, steps, is_start=True, is_whole=is_whole))
        self._waiting_step_count += len(episode)
        self._episode_count += 1
        # A fragment has the observation that follows it, so at least one step must be left over.
        while self._waiting_step_count > self.step_count:
            yield self._cut(self.step_count)

    def finish(self) -> Iterator[Fragment]:
        """Yield the last fragment; drop and count steps that fill none and may not be shorter."""
        count = self._waiting_step_count
        if count == self.step_count or (count and self.keeps_tail):
            yield self._cut(count)
        self.dropped_step_count += self._waiting_step_count
        self._waiting.clear()
        self._waiting_step_count = 0

    def _cut(self, step_count: int) -> Fragment:
        taken: list[_Stretch] = []
        missing = step_count
        while missing:
            stretch = self._waiting.popleft()
            size = min(missing, len(stretch.steps))
            front, rest = stretch.split(size)
            taken.append(front)
            if rest is not None:
                self._waiting.appendleft(rest)
            missing -= size
        self._waiting_step_count -= step_count
        # At the very end no step follows: take the observation that the last step led to.
        follower = self._waiting[0].steps if self._waiting else taken[-1].steps
        place = follower.lookback if self._waiting else -1
        return self._make_fragment(taken, trees.row_view(follower.observations, place))

    def _make_fragment(self, taken: list["_Stretch"], following: Tree) -> Fragment:
        parts = [stretch.steps for stretch in taken]
        lengths = np.array([len(part) for part in parts])
        ends = np.cumsum(lengths) - 1
        ended = [(int(end), part) for end, part in zip(ends, parts, strict=True) if part.is_done]
        extras = _join_extras(parts)
        count = int(lengths.sum())
        is_known = [stretch.steps.is_done and stretch.is_whole for stretch in taken]
        fragment = fragment_of(
            *(self.session_id, self.worker_id, self.next_index),
            obs=_joined("obs", [trees.rows(part.own_observations(), 0, -1) for part in parts]),
            action=_joined("actions", [part.own_actions() for part in parts]),
            reward=np.concatenate([part.own_rewards() for part in parts]),
            next_obs=following,
            terminated=_flags(count, ends, [part.terminated for part in parts]),
            truncated=_flags(count, ends, [part.truncated for part in parts]),
            starts_episode=taken[0].is_start,
            episode_id=taken[0].number,
            model_version=self.model_version,
            in_state=self._state_before(taken[0]),
            log_prob=_take_floats(extras, _LOG_PROB_NAMES),
            value=_take_floats(extras, _VALUE_NAMES),
        )
        is_counted = _flags(count, ends, is_known)
        totals = self._totals.columns(fragment.reward, fragment.first, is_counted)
        fragment.extras = extras | totals
        if ended:
            fragment.final_obs_step = np.array([end for end, _ in ended], dtype=np.int32)
            fragment.final_obs = _joined(
                "obs", [trees.rows(part.observations, -1, None) for _, part in ended]
            )
        self.next_index += 1
        return fragment

    def _state_before(self, stretch: "_Stretch") -> Tree:
        if self._zero_state is None:
            return None
        state = recorded_state(stretch.steps, 0)
        if state is None:
            # Policies start an episode from their initial state, whatever the fragment has.
            self.assumed_state_count += not stretch.is_start
            return self._zero_state
        if _types(self._zero_state) != _types(state):
            raise OfflineDataError(
                f"{stretch.steps!r} has recurrent states of other shapes than the first episode"
            )
        return state


@dataclass(frozen=True, slots=True)
class _Stretch:
    number: int
    steps: Episode
    is_start: bool
    is_whole: bool
    """True if the environment ended the episode, and its first step is there."""

    def split(self, size: int) -> tuple["_Stretch", "_Stretch | None"]:
        if size == len(self.steps):
            return self, None
        return (
            replace(self, steps=self.steps.slice(0, size)),
            replace(self, steps=self.steps.slice(size, len(self.steps)), is_start=False),
        )


def _zeros_like_states_of(episode: Episode) -> Tree:
    known = (recorded_state(episode, 0), *episode.in_states.values())
    state = next((each for each in known if each is not None), None)
    return None if state is None else trees.map_tree(np.zeros_like, state)


def _flags(count: int, ends: NDArray[np.int64], values: list[bool]) -> NDArray[np.bool_]:
    flags = np.zeros(count, dtype=np.bool_)
    flags[ends] = values
    return flags


def _join_extras(parts: list[Episode]) -> dict[str, Tree]:
    """Join the parts' extra outputs, without recurrent states and what every fragment gets."""
    own = (STATE_IN, STATE_OUT, *EPISODE_COLUMNS)
    names = [name for name in parts[0].extra_model_outputs if name not in own]
    for part in parts:
        missing = [name for name in names if name not in part.extra_model_outputs]
        if missing:
            raise OfflineDataError(f"{part!r} has no column {missing[0]!r}, episodes before it do")
    return {
        name: _joined(name, [part.own_extra_model_outputs()[name] for part in parts])
        for name in names
    }


def _joined(name: str, parts: list[Tree]) -> Tree:
    try:
        return trees.concat(parts)
    except ValueError as error:
        raise OfflineDataError(f"differs between its episodes: {error}", column=name) from error


def _take_floats(extras: dict[str, Tree], names: tuple[str, ...]) -> NDArray[np.float32] | None:
    for name in names:
        held = extras.get(name)
        if isinstance(held, np.ndarray) and held.ndim == 1 and held.dtype.kind == "f":
            del extras[name]
            return held.astype(np.float32)
    return None


class FragmentReader:
    """Join fragments, each worker's in index order, to episodes; a gap ends an episode.

    So does a seam, where a fragment starts from another observation than the one before ended with,
    as those of a `StepWriter(follows="flags")` do: the rest is an episode of another id. With
    `yields_parts` each fragment's part of an episode is yielded alone, so that no more than two are
    in memory.
    """

    def __init__(self, *, yields_parts: bool = False) -> None:
        self._yields_parts = yields_parts
        self._open: dict[tuple[str, str], tuple[int, list[Episode]]] = {}
        """By session and worker: the latest fragment's index, and parts of the open episode."""

    def add(self, fragment: Fragment) -> Iterator[Episode]:
        """Yield episodes that end in this fragment, or that a gap before it ends."""
        worker = fragment.session_id, fragment.worker_id
        index, pending = self._open.pop(worker, (None, []))
        if fragment.discontinuity or index is None or fragment.fragment_index != index + 1:
            yield from self._joined(pending)
            pending = []
        for part in _parts_of(fragment):
            if pending and pending[-1].has_seam(part):
                yield from self._joined(pending)
                pending = []
                part = replace(part, id=f"{part.id}@{part.t_started}")
            if pending:
                part = _continuing(pending[-1], part)
                pending[-1].check_follows(part)
            if self._yields_parts:
                yield part
                pending.clear()
            pending.append(part)
            if part.is_done:
                yield from self._joined(pending)
                pending = []
        self._open[worker] = fragment.fragment_index, pending

    def finish(self) -> Iterator[Episode]:
        """Yield the unfinished episodes."""
        for _, pending in self._open.values():
            yield from self._joined(pending)
        self._open.clear()

    def _joined(self, parts: list[Episode]) -> Iterator[Episode]:
        """Yield the episode of some parts, unless these were yielded.

        Neighbours are joined, and then those, so that a step is copied only a few times.
        """
        while len(parts) > 1:
            pairs = [parts[at : at + 2] for at in range(0, len(parts), 2)]
            parts = [pair[0].join(pair[1]) if len(pair) > 1 else pair[0] for pair in pairs]
        if not self._yields_parts:
            yield from parts


def _continuing(pending: Episode, part: Episode) -> Episode:
    shift = pending.t - part.t_started
    in_states = {t + shift: state for t, state in part.in_states.items()}
    return replace(part, id=pending.id, t_started=pending.t, in_states=in_states)


def _parts_of(fragment: Fragment) -> Iterator[Episode]:
    count = fragment.step_count
    stops = [*(np.flatnonzero(fragment.ended[:-1]) + 1).tolist(), count]
    start = 0
    for stop in stops:
        yield _part(fragment, start, stop)
        start = stop


def _part(fragment: Fragment, start: int, stop: int) -> Episode:
    extras = {
        name: trees.rows(as_containers(tree), start, stop) for name, tree in fragment.extras.items()
    }
    for name, column in ((LOG_PROB, fragment.log_prob), (VALUE, fragment.value)):
        if column is not None:
            extras[name] = as_numpy(column)[start:stop]
    # If fragments before it are missing, a part's place in its episode is unknown. Its place in the
    # worker's sequence still distinguishes parts of one episode.
    position = fragment.fragment_index * fragment.step_count + start
    t_started = 0 if fragment.first[start] else position
    has_state = start == 0 and fragment.in_state is not None
    in_states = {t_started: as_containers(fragment.in_state)} if has_state else {}
    return Episode(
        id=f"{fragment.session_id}/{fragment.worker_id}/{int(fragment.episode_id[start])}",
        observations=trees.concat(
            [
                trees.rows(as_containers(fragment.obs), start, stop),
                _observation_after(fragment, stop),
            ]
        ),
        actions=trees.rows(as_containers(fragment.action), start, stop),
        rewards=as_numpy(fragment.reward)[start:stop],
        terminated=bool(fragment.terminated[stop - 1]),
        truncated=bool(fragment.truncated[stop - 1]),
        t_started=t_started,
        extra_model_outputs=extras,
        in_states=in_states,
    )


def _observation_after(fragment: Fragment, stop: int) -> Tree:
    """Return the observation after step `stop - 1`, [1, ...], or the last one if it is unknown."""
    last = stop - 1
    if fragment.final_obs_step is not None:
        found = np.flatnonzero(fragment.final_obs_step == last)
        if found.size:
            return trees.take(as_containers(fragment.final_obs), found)
    if fragment.ended[last]:
        return trees.rows(as_containers(fragment.obs), last, stop)
    if stop == fragment.step_count:
        return trees.map_tree(lambda leaf: np.asarray(leaf)[None], as_containers(fragment.next_obs))
    raise EpisodeShapeError(f"fragment {fragment.fragment_index}: step {last} ends nothing")


def as_containers(tree: Any) -> Tree:
    """Return a fragment's tree as episodes have it: tuples for its lists, float32 for bfloat16."""
    if isinstance(tree, dict):
        return {key: as_containers(branch) for key, branch in tree.items()}
    if isinstance(tree, list | tuple):
        return tuple(as_containers(branch) for branch in tree)
    return None if tree is None else as_numpy(tree)


def _types(tree: Tree) -> dict[str, tuple[Any, Any]]:
    return {path: (leaf.shape, leaf.dtype) for path, leaf in trees.leaves(tree)}


_FRAGMENTS_PER_APPEND = 64
_FRAGMENTS_PER_READ = 64
_BYTES_PER_READ = 64 * 2**20
"""Bytes of payloads that are loaded together, unless one is larger."""
_USES_UNLIMITED = 2**40
_VERSIONS_UNLIMITED = 2**40


@dataclass(frozen=True, slots=True)
class ImportCounts:
    """Numbers of an import."""

    episode_count: int
    step_count: int
    fragment_count: int
    dropped_step_count: int
    """Steps at the end that did not fill a fragment, where the buffer takes one length only."""
    assumed_state_count: int
    """Fragments with zeros, because no recurrent state was recorded at their first step."""


@dataclass(frozen=True, slots=True)
class Destination:
    """The buffer, session and worker to append as."""

    buffer: str
    session_id: str
    model_version: int
    worker_id: str
    keeps_tail: bool = False
    """True if the buffer takes a shorter last fragment."""


def ensure_demo_buffer(client: Client, buffer: str, *, capacity_chunks: int) -> BufferDescription:
    """Return the buffer, created if needed: no limit of uses or age; appends wait when full.

    It takes fragments of any length: the last one may be shorter, and other producers may add.
    """
    try:
        return client.get_buffer(buffer)
    except BufferNotFoundError:
        config = BufferConfig(
            capacity_chunks=capacity_chunks,
            staleness_max=_VERSIONS_UNLIMITED,
            uses_max=_USES_UNLIMITED,
            full_policy=FullPolicy.BLOCK,
            schema=SchemaPolicy.RAGGED,
        )
        return client.create_buffer(buffer, config)


def join_session(
    client: Client, description: BufferDescription, *, take_over: bool = False
) -> Destination:
    """Return the buffer's session as a destination; start a session if there is none.

    SessionInUseError: other processes use it, and `take_over` is False.
    """
    buffer = description.name
    session_id, model_version = description.session_id, description.model_version
    users = description.state.session_users
    if users and not take_over:
        raise SessionInUseError(session_id, users)
    if not session_id:
        session_id = f"import-{uuid.uuid4().hex[:12]}"
        model_version = client.start_session(session_id, buffer=buffer).model_version
    return Destination(
        buffer,
        session_id,
        model_version or 0,
        f"import-{uuid.uuid4().hex[:12]}",
        keeps_tail=description.config.schema is not SchemaPolicy.ONE,
    )


def append_episodes(
    client: Client, episodes: Iterable[Episode], destination: Destination, *, step_count: int
) -> ImportCounts:
    """Append episodes as fragments of `step_count` steps of one new worker.

    Raises:
        InvalidRequestError: The buffer refused a fragment, because another session started.
        BackpressureError: The buffer is full and no chunk leaves it.
        ReplayBufferError: See `Client.append_many`.
    """
    cutter = FragmentCutter(
        step_count=step_count,
        worker_id=destination.worker_id,
        session_id=destination.session_id,
        model_version=destination.model_version,
        keeps_tail=destination.keeps_tail,
    )
    episode_count = total_steps = 0
    waiting: list[Fragment] = []
    for episode in episodes:
        episode_count += 1
        total_steps += len(episode)
        waiting.extend(cutter.add(episode))
        while len(waiting) >= _FRAGMENTS_PER_APPEND:
            _append(client, waiting[:_FRAGMENTS_PER_APPEND], destination)
            del waiting[:_FRAGMENTS_PER_APPEND]
    waiting.extend(cutter.finish())
    _append(client, waiting, destination)
    return ImportCounts(
        episode_count=episode_count,
        step_count=total_steps,
        fragment_count=cutter.next_index,
        dropped_step_count=cutter.dropped_step_count,
        assumed_state_count=cutter.assumed_state_count,
    )


def _append(client: Client, fragments: list[Fragment], destination: Destination) -> None:
    if not fragments:
        return
    results = client.append_many(fragments, buffer=destination.buffer)
    for fragment, result in zip(fragments, results, strict=True):
        if result.outcome not in (AdmissionOutcome.ADMITTED, AdmissionOutcome.DUPLICATE):
            raise InvalidRequestError(
                f"fragment {fragment.fragment_index}",
                f"was refused by buffer {destination.buffer!r}: {result.outcome.value}",
            )


def read_buffer(
    client: Client, buffer: str, *, max_wait_s: float = 10.0, yields_parts: bool = False
) -> Generator[Episode, None, None]:
    """Yield every episode that a buffer holds, without using anything up.

    With `yields_parts` each fragment's part of an episode is yielded alone, in order.

    It leases all chunks in one fetch, and returns them at its end or when it is closed; close it
    before the client. Payloads are loaded a few at a time. If fragments are missing, parts of
    episodes come out unfinished.

    Raises:
        BufferNotFoundError: There is no such buffer.
        OfflineDataError: It holds sequences, such as completions.
        WaitElapsedError: Learners leased the chunks for all of `max_wait_s`.
        ReplayBufferError: See `Client.fetch` and `Client.load_fragments`.
    """
    description = client.get_buffer(buffer)
    per_chunk = description.config.fragments_per_chunk or 1
    fragment_count = description.state.chunk_count * per_chunk
    if not fragment_count:
        return
    lease = client.fetch(fragment_count, max_wait_s, buffer=buffer)
    try:
        reader = FragmentReader(yields_parts=yields_parts)
        ordered = sorted(lease.references, key=_place_of)
        for place, some in enumerate(_read_together(ordered)):
            if place:
                lease.renew()  # Writing a file may take longer than a lease lives.
            for fragment in client.load_fragments(some):
                if not isinstance(fragment, Fragment):
                    problem = f"buffer {buffer!r} holds sequences: these have no steps to write"
                    raise OfflineDataError(problem)
                yield from reader.add(fragment)
        yield from reader.finish()
    finally:
        lease.release(ReleaseMode.RETURNED)


def _read_together(ordered: list[FragmentReference]) -> Iterator[list[FragmentReference]]:
    some: list[FragmentReference] = []
    size_bytes = 0
    for each in ordered:
        size_bytes += each.metadata.payload.size_bytes
        if some and (len(some) == _FRAGMENTS_PER_READ or size_bytes > _BYTES_PER_READ):
            yield some
            some, size_bytes = [], each.metadata.payload.size_bytes
        some.append(each)
    if some:
        yield some


def _place_of(reference: FragmentReference) -> tuple[str, str, int]:
    metadata = reference.metadata
    return metadata.session_id, metadata.worker_id, metadata.fragment_index
