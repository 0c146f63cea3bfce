"""MineStudio's replay-buffer interface, data types and data functions, on top of Breadbox.

Code written against MineStudio's `ReplayBufferInterface` (online.rollout.replay_buffer), its types
(online.utils.rollout.datatypes) and its data functions (online.utils, online.utils.train.data) runs
unchanged but for the import. Neither Ray nor MineStudio is needed.

What is different, and why:

- The server is named by `BREADBOX_SERVER` (default localhost:50051) instead of by Ray.
- A fetched batch stays readable until the next fetch *of the same interface*, under a lease that is
  renewed in the background, instead of until the next fetch by anybody.
- MineStudio does not tell a terminal state from a time limit. `next_done` is stored as terminated.
- Fragments from before the first model version (session "", version -1), which MineStudio stores
  and deletes at the first version, are not sent; `dropped_count` counts them with those that the
  server refused as stale or of another session.
- A model version that moves back is refused; MineStudio accepts it.
"""

import hashlib
import json
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import breadbox
from breadbox import errors, types
from breadbox.fragment import Fragment, Tree
from breadbox.loader import data_iter as load_ahead
from breadbox.options import WAIT_S_MAX_PER_CALL

DEFAULT_SERVER = "localhost:50051"
_EPISODE_UUIDS = "episode_uuids"
"""Name among a fragment's extras: MineStudio names episodes by text, Breadbox by number."""


# Data types --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FragmentIndex:
    """Which fragment of which worker."""

    worker_uuid: str
    fid_in_worker: int
    """From 0, contiguous."""


@dataclass(frozen=True)
class FragmentMetadata:
    """What the buffer is told of a fragment."""

    model_version: int
    """Of the fragment's oldest step."""
    session_id: str
    worker_uuid: str
    fid_in_worker: int


@dataclass
class SampleFragment:
    """T consecutive steps of one worker."""

    obs: dict[str, Any]
    """Leaves [T, ...]."""
    action: dict[str, Any]
    """Leaves [T, ...]."""
    next_done: NDArray[np.bool_]
    """bool[T]; the episode ended with this step."""
    reward: NDArray[np.float32]
    """float32[T]."""
    first: NDArray[np.bool_]
    """bool[T]; the step starts an episode."""
    in_state: Any
    """Recurrent state before step 0: arrays with a leading batch axis of 1; None for none."""
    worker_uuid: str
    fid_in_worker: int
    next_obs: dict[str, Any]
    """The observation after the last step."""
    episode_uuids: list[str]
    """One per step."""


@dataclass
class StepRecord:
    """One step as a rollout worker reports it; reward and flags are those of the step before."""

    worker_uuid: str
    obs: dict[str, Any]
    state: Any
    action: dict[str, Any]
    last_reward: float
    last_terminated: bool
    last_truncated: bool
    model_version: int
    episode_uuid: str
    session_id: str


# Conversions -------------------------------------------------------------------------------------


def to_fragment(sample: SampleFragment, metadata: FragmentMetadata) -> Fragment:
    """Make a Breadbox fragment.

    Raises:
        TreeMismatchError: The recurrent state has no leading axis of 1.
    """
    next_done = np.asarray(sample.next_done, np.bool_)
    return Fragment(
        worker_id=metadata.worker_uuid,
        fragment_index=metadata.fid_in_worker,
        session_id=metadata.session_id,
        model_version_min=metadata.model_version,
        # The newest step's version is not told; the oldest is the one that the buffer judges by.
        model_version_max=metadata.model_version,
        obs=_storable(sample.obs),
        action=_storable(sample.action),
        reward=np.asarray(sample.reward, np.float32),
        terminated=next_done,
        truncated=np.zeros_like(next_done),
        first=np.asarray(sample.first, np.bool_),
        episode_id=np.array([_episode_number(name) for name in sample.episode_uuids], np.int64),
        next_obs=_storable(sample.next_obs),
        in_state=_map_leaves(_without_batch_axis, sample.in_state),
        extras={_EPISODE_UUIDS: np.array(sample.episode_uuids, np.str_)},
    )


def from_fragment(fragment: Fragment) -> SampleFragment:
    """Make a MineStudio fragment; also of one that was written without this module."""
    names = fragment.extras.get(_EPISODE_UUIDS)
    episode_uuids = fragment.episode_id if names is None else names
    return SampleFragment(
        obs=_as_sampled(fragment.obs),
        action=_as_sampled(fragment.action),
        next_done=fragment.ended,
        reward=fragment.reward,
        first=fragment.first,
        in_state=_map_leaves(lambda leaf: np.asarray(leaf)[np.newaxis], fragment.in_state),
        worker_uuid=fragment.worker_id,
        fid_in_worker=fragment.fragment_index,
        next_obs=_as_sampled(fragment.next_obs),
        episode_uuids=[str(name) for name in episode_uuids],
    )


def _episode_number(name: str) -> int:
    """The same number for the same name, in every process; not negative."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _without_batch_axis(leaf: Any) -> NDArray[Any]:
    array = np.asarray(leaf)
    if array.shape[:1] != (1,):
        raise errors.TreeMismatchError("in_state", "[1, ...]", str(list(array.shape)))
    row: NDArray[Any] = array[0]
    return row


def _map_leaves(change: Any, tree: Tree) -> Tree:
    match tree:
        case None:
            return None
        case Mapping():
            return {key: _map_leaves(change, child) for key, child in tree.items()}
        case list():
            return [_map_leaves(change, child) for child in tree]
        case tuple():
            return tuple(_map_leaves(change, child) for child in tree)
        case _:
            return change(tree)


def _storable(tree: Tree) -> Tree:
    """Arrays for what MineStudio keeps as lists of text or as bare numbers."""
    match tree:
        case list() if tree and all(isinstance(item, str) for item in tree):
            return np.array(tree, np.str_)
        case Mapping():
            return {key: _storable(child) for key, child in tree.items()}
        case list():
            return [_storable(child) for child in tree]
        case tuple():
            return tuple(_storable(child) for child in tree)
        case str() | bool() | int() | float():
            return np.array(tree)
        case _:
            return tree


def _as_sampled(tree: Tree) -> Tree:
    """Undo `_storable` for text; bare numbers stay arrays of no axis."""

    def restore(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind == "U":
            return leaf.tolist()
        return leaf

    return _map_leaves(restore, tree)


# Names of stored fragments -----------------------------------------------------------------------


def fragment_id_of(reference: types.FragmentReference) -> str:
    """A text that names a stored fragment and is enough to load it, in any process."""
    return json.dumps(asdict(reference), separators=(",", ":"))


def reference_of(fragment_id: str) -> types.FragmentReference:
    """Read the text that `fragment_id_of` made.

    Raises:
        InvalidRequestError: It is another text.
    """
    try:
        fields = json.loads(fragment_id)
        metadata = fields.pop("metadata")
        payload = types.PayloadReference(**metadata.pop("payload"))
        return types.FragmentReference(
            types.FragmentMetadata(**metadata, payload=payload), **fields
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise errors.InvalidRequestError(
            "fragment_id", "is not one that fetch_fragments returned"
        ) from error


# The interface -----------------------------------------------------------------------------------


class ReplayBufferInterface:
    """MineStudio's interface to the replay buffer. Thread-safe but for `fetch_fragments`.

    With a configuration it creates the buffer, or sets the limits of the one that exists; without
    one it uses the buffer as it is. `close` it, or let the process end.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        *,
        server: str | None = None,
        buffer: str = "default",
        client: breadbox.Client | None = None,
    ) -> None:
        """Connect.

        Args:
            config: MineStudio's replay-buffer configuration: max_chunks, max_staleness, max_reuse,
                fragments_per_chunk; what is about its store or its reports is ignored.
            server: HOST:PORT; None: `BREADBOX_SERVER`, else localhost:50051.
            buffer: Name of the buffer.
            client: Use this one, and leave it open at the end.

        Raises:
            InvalidRequestError: A limit is out of its range, or fragments_per_chunk is another than
                that of the existing buffer.
        """
        address = server or os.environ.get("BREADBOX_SERVER", DEFAULT_SERVER)
        self._owns_client = client is None
        self._client = client or breadbox.connect(address, buffer=buffer)
        self._buffer = buffer
        self._lease: breadbox.Lease | None = None
        self._session_id = ""
        self.dropped_count = 0
        """Fragments given to `add_fragment` that are not in the buffer."""
        if config is not None:
            self._configure(limits_of(config))

    def _configure(self, limits: types.BufferConfig) -> None:
        try:
            self._client.create_buffer(self._buffer, limits)
        except errors.BufferExistsError:
            self._client.update_buffer(self._buffer, limits)

    def add_fragment(self, fragment: SampleFragment, metadata: FragmentMetadata) -> None:
        """Store a fragment; blocks while a buffer that lets producers wait is full.

        A fragment that is stale, of another session, or from before the first model version is
        dropped, and counted.

        Raises:
            As `breadbox.Client.append_many`.
        """
        if not metadata.session_id or metadata.model_version < 0:
            self.dropped_count += 1
            return
        result = self._client.append(to_fragment(fragment, metadata), buffer=self._buffer)
        if result.outcome in (types.AdmissionOutcome.STALE, types.AdmissionOutcome.WRONG_SESSION):
            self.dropped_count += 1

    def load_fragment(self, fragment_id: str) -> SampleFragment:
        """Load a fragment that `fetch_fragments` or `prepared_fragments` named, in any process.

        Raises:
            KeyError: It is gone: another batch was fetched since.
        """
        try:
            (fragment,) = self._client.read_fragments([reference_of(fragment_id)])
        except errors.PayloadMissingError as error:
            raise KeyError(fragment_id) from error
        return from_fragment(fragment)

    def fetch_fragments(self, num_fragments: int) -> list[tuple[FragmentIndex, str]]:
        """Take a batch, waiting for as long as it takes; the batch before it is given up.

        Raises:
            InvalidRequestError: Not a multiple of fragments_per_chunk, or more than the buffer can
                ever hold.
        """
        self._release()
        while True:
            try:
                lease = self._client.fetch(num_fragments, WAIT_S_MAX_PER_CALL, buffer=self._buffer)
            except errors.WaitElapsedError:
                continue
            break
        self._lease = lease.__enter__()  # Left by the next fetch, or by close().
        return _named(lease.references)

    def prepared_fragments(self) -> list[tuple[FragmentIndex, str]]:
        """Name the batch that was fetched last, by anyone; empty when there is none."""
        try:
            return _named(self._client.get_prepared_fragments(buffer=self._buffer))
        except errors.RequestNotFoundError:
            return []

    def update_model_version(self, session_id: str, model_version: int) -> None:
        """Make a session and a model version current; what that makes stale goes.

        Raises:
            VersionRegressedError: The version is lower than the current one of the session.
            SessionEndedError: The session was current before, and another one followed.
        """
        if session_id != self._session_id:
            self._client.start_session(session_id, model_version=model_version, buffer=self._buffer)
            self._session_id = session_id
        self._client.publish_model(session_id, model_version, buffer=self._buffer)

    def update_training_session(self) -> None:
        """Do nothing, as in MineStudio."""

    def close(self) -> None:
        """Give up the fetched batch and close the connection. Idempotent."""
        if not self._client.closed:
            self._release()
            if self._owns_client:
                self._client.close()

    def _release(self) -> None:
        lease, self._lease = self._lease, None
        if lease is None:
            return
        try:
            lease.release()
        except errors.LeaseExpiredError:
            return  # MineStudio knows no leases, so there is nobody to tell.

    def __enter__(self) -> "ReplayBufferInterface":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to be sent to another process, where neither connection nor lease would work."""
        raise TypeError("make a ReplayBufferInterface in each process instead of sending one")


def _named(references: Sequence[types.FragmentReference]) -> list[tuple[FragmentIndex, str]]:
    return [
        (
            FragmentIndex(reference.metadata.worker_id, reference.metadata.fragment_index),
            fragment_id_of(reference),
        )
        for reference in references
    ]


def limits_of(config: Mapping[str, Any]) -> types.BufferConfig:
    """MineStudio's replay-buffer configuration as Breadbox's limits."""

    def whole(name: str) -> int | None:
        return None if config.get(name) is None else int(config[name])

    uses_max = whole("max_reuse")
    return types.BufferConfig(
        fragments_per_chunk=whole("fragments_per_chunk"),
        capacity_chunks=whole("max_chunks"),
        staleness_max=whole("max_staleness"),
        # MineStudio delivers a chunk once even with a max_reuse below 1.
        uses_max=None if uses_max is None else max(1, uses_max),
    )


# Data functions ----------------------------------------------------------------------------------


class LoaderPool:
    """Loads fragments in threads: receiving releases the interpreter lock."""

    def __init__(self, num_readers: int, interface: ReplayBufferInterface) -> None:
        """Use `create_loader_pool` instead."""
        self.num_readers = num_readers
        self._interface = interface

    def load(self, record: tuple[FragmentIndex, str]) -> tuple[FragmentIndex, SampleFragment]:
        """Load one record."""
        index, fragment_id = record
        return index, self._interface.load_fragment(fragment_id)


def create_loader_pool(
    num_readers: int,
    num_cpus_per_reader: int = 1,
    *,
    interface: ReplayBufferInterface | None = None,
) -> LoaderPool:
    """Make a pool for `data_iter`.

    Args:
        num_readers: Loads at a time.
        num_cpus_per_reader: Ignored; threads are not scheduled on resources.
        interface: Where to load from; None: a new one, without configuration.
    """
    del num_cpus_per_reader
    return LoaderPool(num_readers, interface or ReplayBufferInterface())


def data_iter(
    loader_pool: LoaderPool,
    records: Sequence[tuple[FragmentIndex, str]],
    batch_size: int,
    prefetch_batches: int,
) -> Iterator[dict[str, list[Any]]]:
    """Load records in a random order, and yield them in groups as they arrive.

    Every record comes exactly once; the last group may be shorter. Leaving the iteration early, or
    an error in it, leaves nothing behind that the next one could receive.

    Yields:
        `{"index": [FragmentIndex, ...], "fragment": [SampleFragment, ...]}`.
    """
    return load_ahead(
        loader_pool.load,
        records,
        batch_size,
        prefetch_batches,
        threads=loader_pool.num_readers,
        # From the module's generator, so that random.seed() decides, as it does in MineStudio.
        seed=random.getrandbits(64),
    )


def auto_stack(items: Sequence[Any]) -> Any:
    """Stack alike values by the kind of the first: arrays, tensors, numbers, trees; else a list.

    Raises:
        IndexError: There are no items.
        KeyError: A dict lacks a key of the first.
    """
    first = items[0]
    match first:
        case np.ndarray():
            return np.stack(items)
        case str():
            return list(items)
        case Mapping():
            return {key: auto_stack([item[key] for item in items]) for key in first}
        case list():
            return [auto_stack(children) for children in zip(*items, strict=True)]
        case bool() | int() | float() | np.generic():
            return np.array(items)
        case _ if hasattr(first, "new_tensor"):
            import torch

            return torch.stack(list(items))
        case _:
            return list(items)


def auto_to_torch(tree: Any, device: Any) -> Any:
    """Arrays and tensors of a tree as tensors on a device; text and the like stay as they are."""
    import torch

    match tree:
        case np.ndarray() if tree.dtype.kind != "U":
            return torch.from_numpy(np.ascontiguousarray(tree)).to(device)
        case torch.Tensor():
            return tree.to(device)
        case Mapping():
            return {key: auto_to_torch(child, device) for key, child in tree.items()}
        case list():
            return [auto_to_torch(child, device) for child in tree]
        case tuple():
            return tuple(auto_to_torch(child, device) for child in tree)
        case _:
            return tree


def prepare_batch(model: Any, batch_fragments: Sequence[SampleFragment]) -> dict[str, Any]:
    """What a model's forward pass takes, on its device: obs, state, action, first.

    Args:
        model: Has `device` and `merge_state(states)`.
        batch_fragments: B fragments of equal length.

    Returns:
        Trees of tensors [B, T, ...]; `state` is whatever `merge_state` makes of the B states.
    """
    device = model.device

    def stacked(name: str) -> Any:
        leaves = [getattr(fragment, name) for fragment in batch_fragments]
        return auto_to_torch(auto_stack(leaves), device)

    states = [auto_to_torch(fragment.in_state, device) for fragment in batch_fragments]
    return {
        "obs": stacked("obs"),
        "state": model.merge_state(states),
        "action": stacked("action"),
        "first": stacked("first"),
    }


def batchify_next_obs(next_obs: Mapping[str, Any], device: Any) -> Any:
    """One observation as tensors with leading axes of batch and time, both 1."""
    return auto_to_torch(auto_stack([auto_stack([next_obs])]), device)


def get_last_fragment_indexes(indexes: Sequence[FragmentIndex]) -> list[FragmentIndex]:
    """Those of the indexes whose successor, the same worker's next fragment, is not among them."""
    present = set(indexes)
    return [
        index
        for index in indexes
        if FragmentIndex(index.worker_uuid, index.fid_in_worker + 1) not in present
    ]
