"""Episodes into a buffer of the service, and out of one."""

import uuid
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass

from breadbox.client import Client
from breadbox.model.errors import BufferNotFoundError, InvalidRequestError
from breadbox.model.fragment import Fragment
from breadbox.model.types import (
    AdmissionOutcome,
    BufferConfig,
    BufferDescription,
    FragmentReference,
    FullPolicy,
    ReleaseMode,
)
from breadbox_offline.episodes.episode import Episode
from breadbox_offline.service.fragments import FragmentCutter, FragmentReader

_FRAGMENTS_PER_APPEND = 64
_FRAGMENTS_PER_READ = 64
_USES_UNLIMITED = 2**40
_VERSIONS_UNLIMITED = 2**40


@dataclass(frozen=True, slots=True)
class ImportCounts:
    """What an import did."""

    episode_count: int
    step_count: int
    fragment_count: int
    """Fragments that are in the buffer now."""
    dropped_step_count: int
    """Steps at the end that did not fill a fragment."""
    assumed_state_count: int
    """Fragments with zeros for a recurrent state that was not recorded at their first step."""


@dataclass(frozen=True, slots=True)
class Destination:
    """A buffer that takes episodes."""

    buffer: str
    session_id: str
    model_version: int
    worker_id: str


def ensure_demo_buffer(client: Client, buffer: str, *, capacity_chunks: int) -> BufferDescription:
    """The buffer, made if need be for data that never gets stale or used up.

    It has no limit of uses or staleness; when it is full, appends wait instead of pushing out what
    was imported before.
    """
    try:
        return client.get_buffer(buffer)
    except BufferNotFoundError:
        config = BufferConfig(
            capacity_chunks=capacity_chunks,
            staleness_max=_VERSIONS_UNLIMITED,
            uses_max=_USES_UNLIMITED,
            full_policy=FullPolicy.BLOCK,
        )
        return client.create_buffer(buffer, config)


def join_session(client: Client, description: BufferDescription) -> Destination:
    """Take part in the buffer's session, or start one where there is none."""
    buffer = description.name
    session_id, model_version = description.session_id, description.model_version
    if not session_id:
        session_id = f"import-{uuid.uuid4().hex[:12]}"
        model_version = client.start_session(session_id, buffer=buffer).model_version
    return Destination(buffer, session_id, model_version or 0, f"import-{uuid.uuid4().hex[:12]}")


def append_episodes(
    client: Client, episodes: Iterable[Episode], destination: Destination, *, step_count: int
) -> ImportCounts:
    """Append episodes as fragments of `step_count` steps of one new worker.

    Raises:
        InvalidRequestError: the buffer refused a fragment: another session started meanwhile.
        BackpressureError: the buffer is full and nothing leaves it.
        ReplayBufferError: as `Client.append_many`.
    """
    cutter = FragmentCutter(
        step_count=step_count,
        worker_id=destination.worker_id,
        session_id=destination.session_id,
        model_version=destination.model_version,
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
    client: Client, buffer: str, *, max_wait_s: float = 10.0
) -> Generator[Episode, None, None]:
    """Every episode that a buffer holds, without using anything up.

    All chunks are leased at once, and given back when the iterator is closed or at its end; one
    that is left early has to be closed before the client. Payloads are loaded a few at a time.
    Where fragments are missing, parts of episodes come out unfinished.

    Raises:
        BufferNotFoundError: there is no such buffer.
        WaitElapsedError: the chunks were leased by others for all of `max_wait_s`.
        ReplayBufferError: as `Client.fetch` and `Client.load_fragments`.
    """
    description = client.get_buffer(buffer)
    per_chunk = description.config.fragments_per_chunk or 1
    fragment_count = description.state.chunk_count * per_chunk
    if not fragment_count:
        return
    lease = client.fetch(fragment_count, max_wait_s, buffer=buffer)
    try:
        reader = FragmentReader()
        for group in _groups(lease.references):
            for fragment in client.load_fragments(group):
                yield from reader.add(fragment)
        yield from reader.finish()
    finally:
        lease.release(ReleaseMode.RETURNED)


def _groups(references: tuple[FragmentReference, ...]) -> Iterator[list[FragmentReference]]:
    def place(reference: FragmentReference) -> tuple[str, str, int]:
        metadata = reference.metadata
        return metadata.session_id, metadata.worker_id, metadata.fragment_index

    ordered = sorted(references, key=place)
    for start in range(0, len(ordered), _FRAGMENTS_PER_READ):
        yield ordered[start : start + _FRAGMENTS_PER_READ]
