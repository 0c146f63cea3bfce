"""TorchRL's methods over a mirror."""

import itertools
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Self
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

import breadbox.client
from breadbox.environment import connect_from_environment
from breadbox.mirror import Prioritised, ReplayMirror, StepBatch
from breadbox.model.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    SessionEndedError,
    WaitElapsedError,
)
from breadbox.model.fragment import Fragment
from breadbox.model.types import AdmissionOutcome, Device, SchemaPolicy
from breadbox.transport.prefetch import prefetched
from breadbox_adapters import extra
from breadbox_adapters.torchrl.layout import Steps, Stream, as_dict, draw_slices

with extra("torchrl"):
    from tensordict import TensorDict, TensorDictBase

ARRIVAL_S = 10.0
"""Most seconds until appended steps are in the mirror; they take milliseconds."""
_NOT_COPIED = ("self", "client", "seed")
"""Arguments that a pickled copy does not get: it connects by itself, and its draws differ."""
_REFUSED = (AdmissionOutcome.STALE, AdmissionOutcome.WRONG_SESSION)


class _FollowedMirror(ReplayMirror):
    """A mirror that reports when fragments of this process have arrived, and their handles."""

    def __init__(self, client: breadbox.client.Client, **options: Any) -> None:
        self._arrivals: dict[tuple[str, int], int | None] = {}
        """First handles of awaited fragments, by worker and index, or None until they are here."""
        super().__init__(client, **options)

    def follow(self, fragments: Sequence[Fragment]) -> None:
        with self._changed:
            self._arrivals |= {(each.worker_id, each.fragment_index): None for each in fragments}

    def extend(self, fragment: Fragment, chunk_id: int | None = None) -> int:
        handle = super().extend(fragment, chunk_id)
        key = (fragment.worker_id, fragment.fragment_index)
        if key in self._arrivals:
            with self._changed:
                self._arrivals[key] = handle
                self._changed.notify_all()
        return handle

    def wait_for(self, is_there: Callable[[], bool], what: str, timeout_s: float) -> None:
        try:
            self._wait_for(is_there, what, timeout_s)
        except WaitElapsedError as error:
            raise DeadlineExceededError(str(error)) from error

    def handles_of(self, fragments: Sequence[Fragment], timeout_s: float) -> Tensor:
        """Wait for the fragments; return their steps' handles, int64[N]."""
        keys = [(each.worker_id, each.fragment_index) for each in fragments]
        awaited = list(keys)

        def are_there() -> bool:  # Asked at each arrival, so it does not look at all again.
            while awaited and self._arrivals[awaited[-1]] is not None:
                awaited.pop()
            return not awaited

        try:
            self.wait_for(are_there, "steps of its own", timeout_s)
            starts = [self._arrivals[key] or 0 for key in keys]
        finally:
            with self._changed:
                for key in keys:
                    self._arrivals.pop(key, None)
        counts = [each.step_count for each in fragments]
        spans = [np.arange(at, at + count) for at, count in zip(starts, counts, strict=True)]
        return torch.from_numpy(np.concatenate(spans))


class BreadboxReplayBuffer:
    """Steps of a buffer of Breadbox, with the methods of TorchRL's `TensorDictReplayBuffer`.

    ```python
    buffer = BreadboxReplayBuffer("localhost:50051", batch_size=256, n_step=3)
    buffer.extend(data)  # Collected steps; or only other processes append.
    sample = buffer.sample()  # A TensorDict, for TorchRL's losses.
    ```

    `extend` sends steps to the server, and returns once they are in the mirror that samples are
    drawn from, within milliseconds. So a restarted learner finds everything again, and other
    learners and actors share it.

    Use it as a context manager, or call `shutdown`. Sampling is thread-safe; extending is for one
    thread at a time. A pickled copy has connections, a mirror and draws of its own.
    """

    def __init__(
        self,
        client: breadbox.client.Client | str,
        *,
        capacity_steps: int = 1_000_000,
        batch_size: int | None = None,
        alpha: float | None = None,
        beta: float = 0.4,
        eps: float = 1e-8,
        priority_key: str = "td_error",
        n_step: int = 1,
        gamma: float = 0.99,
        transform: Callable[[TensorDictBase], TensorDictBase] | None = None,
        device: Device = "cpu",
        seed: int | None = None,
        steps_per_fragment: int = 256,
        buffer: str | None = None,
        session_id: str | None = None,
        frame_stack: Mapping[str, int] | None = None,
        slice_len: int | None = None,
        prefetch: int = 0,
        take_over: bool = False,
    ) -> None:
        """Begin to mirror what the buffer holds.

        Args:
            client: A client, which stays open; or an address, to connect to with the token and
                certificates of the environment.
            capacity_steps: Latest steps to keep here.
            batch_size: Steps of a sample, unless `sample` gets another number.
            alpha: Exponent of priorities, or None to draw uniformly, whatever `beta` is.
            beta: Exponent of the importance weights.
            eps: Added to every priority that is set.
            priority_key: Where `update_tensordict_priority` finds priorities.
            n_step: Steps that a sample's reward adds up; TorchRL's value estimators take the
                discount from "steps_to_next_obs". Not with a transform that does the same.
            gamma: Discount within these steps.
            transform: Applied to every sample, as one of TorchRL's transforms.
            device: Device of samples.
            seed: Seed of draws.
            steps_per_fragment: Most steps of `extend` in one fragment.
            buffer: Name of the buffer, or None for the client's.
            session_id: Session to start or to continue; by default the current one, else a new one.
            frame_stack: See `breadbox.mirror.StepMemory`.
            slice_len: Steps of a slice, or None for single steps. A slice is consecutive steps of
                one episode, the last one truncated, as TorchRL's `SliceSampler` returns them. A
                sample has slices after one another; `batch_size` is a multiple of `slice_len`.
            prefetch: Samples of `batch_size` that a thread draws ahead; they lack the steps and
                priorities that come meanwhile.
            take_over: For `session_id`, see `breadbox.Client.start_session`.

        Raises:
            InvalidRequestError: An argument is out of its range, the buffer takes only fragments of
                one length, or `slice_len` comes with an `n_step` above 1.
            SessionEndedError: `session_id` was ended before.
            SessionInUseError: Other processes use another session than `session_id`.
        """
        arguments = dict(locals())
        self._arguments = {name: arguments[name] for name in arguments if name not in _NOT_COPIED}
        if slice_len is not None and (slice_len < 1 or n_step > 1):
            raise InvalidRequestError(
                "slice_len", f"must be at least 1, without `n_step`, got {slice_len}"
            )
        self._own: breadbox.client.Client | None = None
        if isinstance(client, str):
            client = self._own = connect_from_environment(server=client, buffer=buffer)
        self._client = client
        self._buffer = buffer or self._client.buffer
        self._batch_size = batch_size
        self._how: bool | Prioritised = False if alpha is None else Prioritised(alpha, beta)
        self._eps = eps
        self._priority_key = priority_key
        self._n_step, self._gamma = n_step, gamma
        self._transforms = [] if transform is None else [transform]
        self._device = device
        self._steps_per_fragment = steps_per_fragment
        self._worker_id = f"torchrl-{uuid4().hex}"
        self._streams: dict[int, Stream] = {}
        self._slice_len = slice_len
        self._prefetch = prefetch
        self._ahead: Generator[TensorDictBase, None, None] | None = None
        self._drawing = threading.Lock()
        self._extending = threading.Lock()
        self._write_count = 0
        try:
            self._check_lengths()
            self._started_id, self._takes_over = session_id, take_over
            self._session()
            self._mirror = _FollowedMirror(
                self._client,
                buffer=self._buffer,
                capacity_steps=capacity_steps,
                seed=seed,
                frame_stack=frame_stack,
            )
        except BaseException:
            if self._own is not None:
                self._own.close()
            raise

    # Lifecycle ---------------------------------------------------------------------------------

    @property
    def mirror(self) -> ReplayMirror:
        """The mirror that samples are drawn from, for sequences, episodes and its lag."""
        return self._mirror

    @property
    def session_id(self) -> str:
        """Session that steps are appended in."""
        return self._session()[0]

    def shutdown(self) -> None:
        """End the mirror, and close the buffer's own connection. Idempotent."""
        with self._drawing:
            if self._ahead is not None:
                self._ahead.close()
        self._mirror.close()
        if self._own is not None:
            self._own.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        return (
            f"BreadboxReplayBuffer({len(self)} steps of buffer {self._buffer!r} at "
            f"{self._client.address}, batch_size={self._batch_size})"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {
            "address": self._client.address,
            "arguments": {**self._arguments, "buffer": self._buffer},
            "transforms": self._transforms,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        BreadboxReplayBuffer.__init__(self, state["address"], **state["arguments"])
        self._transforms = list(state["transforms"])

    # Steps in ----------------------------------------------------------------------------------

    def add(self, data: TensorDictBase) -> int:
        """Append one step; returns its index. See `extend`."""
        return int(self.extend(data.unsqueeze(0))[0])

    def extend(self, data: TensorDictBase, *, update_priority: bool | None = None) -> Tensor:
        """Append steps, wait until they can be sampled, and return their indexes in data's shape.

        Data is as collectors return it: [N], in the order of play, or [E, T] for E environments.
        Observations show where a step does not follow the one before. Priorities are taken from
        `priority_key`, if present; with `update_priority` they must be.

        Raises:
            InvalidRequestError: Data is not of that form.
            SessionEndedError: The session ended, and the buffer was made for that one.
            DeadlineExceededError: The steps did not come back within 10 s; the server has them.
            ReplayBufferError: See `breadbox.Client.append_many`.
        """
        shape = data.batch_size
        if not 1 <= len(shape) <= 2:
            raise InvalidRequestError("data", f"must be [N] or [E, T], got {list(shape)}")
        if not data.numel():
            return torch.zeros(shape, dtype=torch.int64)
        rows = [data] if len(shape) == 1 else list(data.unbind(0))
        with self._extending:
            fragments = [
                fragment
                for number, row in enumerate(rows)
                for fragment in self._fragments_of(number, row)
            ]
            self._mirror.follow(fragments)
            self._append(fragments)
            index = self._mirror.handles_of(fragments, ARRIVAL_S).view(shape)
            self._write_count += data.numel()
        priority = data.get(self._priority_key, None)
        if update_priority or (update_priority is None and priority is not None):
            if priority is None:
                raise InvalidRequestError("data", f"has no priorities at {self._priority_key!r}")
            self.update_priority(index, priority)
        return index

    def _fragments_of(self, number: int, row: TensorDictBase) -> list[Fragment]:
        session_id, version = self._session()
        stream = self._streams.get(number)
        if stream is None or stream.session_id != session_id:
            worker_id = f"{self._worker_id}-{number}"
            stream = self._streams[number] = Stream(worker_id, session_id, version)
        stream.model_version = version
        return list(stream.fragments(Steps.of(row.to_dict()), self._steps_per_fragment))

    def _append(self, fragments: Sequence[Fragment]) -> None:
        results = self._client.append_many(fragments, buffer=self._buffer)
        for fragment, result in zip(fragments, results, strict=True):
            if result.outcome in _REFUSED:
                raise SessionEndedError(fragment.session_id, self._session()[0])

    def _session(self) -> tuple[str, int]:
        state = self._client.watch_model(buffer=self._buffer)
        wanted = self._started_id
        if state is None or not state.session_id or (wanted and state.session_id != wanted):
            state = self._client.start_session(
                wanted, buffer=self._buffer, take_over=self._takes_over
            )
        return state.session_id, state.model_version or 0

    def _check_lengths(self) -> None:
        if self._client.get_buffer(self._buffer).config.schema is SchemaPolicy.ONE:
            raise InvalidRequestError(
                "buffer",
                f"{self._buffer!r} takes only fragments of one length, and `extend` makes others: "
                "give it the schema `ragged`, as `breadbox serve --preset off-policy` does",
            )

    # Steps out ---------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return how many steps can be sampled."""
        return len(self._mirror)

    @property
    def batch_size(self) -> int | None:
        """Steps of a sample, unless `sample` gets another number."""
        return self._batch_size

    @property
    def write_count(self) -> int:
        """Number of steps that were extended here; the mirror also has those of other producers."""
        return self._write_count

    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        *,
        wait: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Draw steps, with replacement; `batch_size` None: as many as the buffer's.

        With `wait` or `timeout` it waits for as many steps, at most `timeout` seconds if not None;
        otherwise one step is enough.

        Returns:
            A TensorDict [B], slices after one another: observation, "action", flags that are False
                and extras at its root; observation, "reward" and flags [B, 1] under "next";
                "index", "priority_weight" (1 where draws are uniform), and of n-step samples
                "steps_to_next_obs". With `return_info` also a dict with "index" and
                "priority_weight".

        Raises:
            InvalidRequestError: No batch size was given, or there is nothing to sample.
            DeadlineExceededError: The steps did not come within `timeout`.
        """
        count = self._count(batch_size)
        if wait or timeout is not None:
            self.wait_until_sampleable(count, timeout)
        is_ahead = self._prefetch and count == self._batch_size
        data = self._next_drawn() if is_ahead else self._drawn(count)
        if not return_info:
            return data
        return data, {name: data[name] for name in ("index", "priority_weight")}

    def _next_drawn(self) -> TensorDictBase:
        with self._drawing:
            if self._ahead is None:
                counts = itertools.repeat(self._count(None))
                self._ahead = prefetched(
                    counts, self._drawn, at_once=1, depth=self._prefetch, in_order=True
                )
            try:
                return next(self._ahead)
            except BaseException:
                self._ahead = None  # It ended with the error.
                raise

    def _drawn(self, count: int) -> TensorDictBase:
        if self._slice_len is None:
            batch = self._mirror.sample(
                count,
                n_step=self._n_step,
                gamma=self._gamma,
                prioritised=self._how,
                device=self._device,
            )
            return self._packed(batch)
        if count % self._slice_len:
            raise InvalidRequestError(
                "batch_size", f"must be a multiple of slice_len ({self._slice_len}), got {count}"
            )
        slices = draw_slices(
            self._mirror, count // self._slice_len, self._slice_len, prioritised=self._how
        )
        return self._packed(slices.to_torch(self._device))

    def _packed(self, batch: StepBatch) -> TensorDictBase:
        content = as_dict(batch)
        data: TensorDictBase = TensorDict(content, batch_size=[len(batch)], device=self._device)
        for transform in self._transforms:
            data = transform(data)
        return data

    def __iter__(self) -> Iterator[Any]:
        """Yield samples without end."""
        self._count(None)
        while True:
            yield self.sample()

    def __getitem__(self, index: Any) -> TensorDictBase:
        """Return steps by index, in the index's shape: single ones, not windows of `n_step`.

        An index is a handle, as `extend` and samples return it. An index that is no kept handle, a
        slice or a mask means positions, 0 being the oldest step that is kept.
        """
        if isinstance(index, list | Tensor):
            index = torch.as_tensor(index).cpu().numpy()
        wanted = np.asarray(index) if isinstance(index, np.ndarray | int | np.integer) else None
        is_whole = wanted is not None and wanted.dtype.kind in "iu"
        if is_whole and wanted is not None and self._mirror.holds(wanted).all():
            places, batch = wanted, self._mirror.steps(wanted, device=self._device)
        else:
            places = np.arange(self._mirror.step_count)[index]
            batch = self._mirror.at(np.atleast_1d(places), device=self._device)
        content = as_dict(batch)
        data: TensorDictBase = TensorDict(content, batch_size=[len(batch)], device=self._device)
        return data.reshape(places.shape)

    def append_transform(
        self, transform: Callable[[TensorDictBase], TensorDictBase]
    ) -> "BreadboxReplayBuffer":
        """Apply a transform to every sample, after those before; return this buffer."""
        self._transforms.append(transform)
        return self

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Return True if there are as many steps as a sample has."""
        return len(self) >= self._count(batch_size)

    def wait_until_sampleable(
        self, min_items: int | None = None, timeout: float | None = None
    ) -> None:
        """Block until there are as many steps, by default as many as a sample has.

        Raises:
            DeadlineExceededError: There were fewer after `timeout` seconds.
            InvalidRequestError: The buffer never holds as many.
        """
        try:
            self._mirror.wait_until(self._count(min_items), timeout)
        except WaitElapsedError as error:
            raise DeadlineExceededError(str(error)) from error

    def _count(self, count: int | None) -> int:
        count = self._batch_size if count is None else count
        if count is None:
            raise InvalidRequestError("batch_size", "must be given, to the buffer or to the call")
        return count

    # Priorities --------------------------------------------------------------------------------

    def update_priority(self, index: Any, priority: Any) -> None:
        """Set priorities, one for each step or one for all, at least 0; ignore steps not kept."""
        indexes = torch.as_tensor(index).reshape(-1).cpu()
        priorities = torch.as_tensor(priority).detach().cpu().double()
        if priorities.numel() == 1:
            priorities = priorities.expand(len(indexes))
        elif priorities.numel() != len(indexes):
            # TorchRL's reduction of several errors of a step, such as those of two critics.
            priorities = priorities.reshape(len(indexes), -1).amax(1)
        self._mirror.update_priorities(indexes.numpy(), priorities.reshape(-1).numpy() + self._eps)

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Set the priorities of a sample's steps to those that a loss has set at `priority_key`."""
        for name in ("index", self._priority_key):
            if name not in data.keys(include_nested=True):
                raise InvalidRequestError("data", f"must have {name!r}")
        self.update_priority(data["index"], data[self._priority_key])

    # Checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the session, and the priorities of all steps; the server has the steps."""
        handles = self._mirror.handles()
        return {
            "session_id": self._mirror.session_id,
            "index": torch.from_numpy(handles),
            "priority": torch.from_numpy(self._mirror.priorities(handles)),
            "write_count": self._write_count,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, timeout: float = 60.0) -> None:
        """Restore priorities, once the mirror has the newest of these steps.

        Raises:
            SessionEndedError: The session is no longer current, so its steps are gone.
            DeadlineExceededError: The mirror did not catch up within `timeout` seconds.
        """
        current = self._session()[0]
        if state["session_id"] != current:
            raise SessionEndedError(state["session_id"], current)
        index, priority = state["index"].numpy(), state["priority"].numpy()
        if len(index):
            newest = int(index.max())
            self._mirror.wait_for(
                lambda: bool(self._mirror.handles().max(initial=-1) >= newest),
                "the steps of a checkpoint",
                timeout,
            )
        known = ~np.isnan(priority)
        self._mirror.update_priorities(index[known], priority[known])
        self._write_count = int(state["write_count"])

    def empty(self) -> None:
        """Remove all steps, for all users, by starting a session; not if `session_id` was given."""
        if self._started_id:
            raise InvalidRequestError("session_id", "was given: start another session instead")
        state = self._client.start_session(buffer=self._buffer, take_over=True)
        session_id = state.session_id
        self._mirror.wait_for(
            lambda: self._mirror.session_id == session_id, "a new session", ARRIVAL_S
        )
