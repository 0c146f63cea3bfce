"""The processes of one learner: who they are, and the few words they exchange.

Batches need none: ranks ask the server with the same request ids and get their shares (B12). What
is exchanged over `torch.distributed` are gradients, a handful of sums, and once per update whether
to go on. Every exchange has a deadline, so that a rank that dies ends the others with an error.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from breadbox.errors import InvalidRequestError, ReplayBufferError


class RankLostError(ReplayBufferError):
    """Another rank died or stayed silent past the deadline; restart all of them, with resume."""

    def __init__(self, rank: int, limit_s: float, reason: str) -> None:
        super().__init__(
            f"rank {rank} lost touch with the other ranks (deadline {limit_s:g} s): {reason}; "
            "restart all ranks with --resume"
        )
        self.rank = rank


@dataclass(frozen=True, slots=True)
class Place:
    """This process among its peers."""

    rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process talks for all: session, versions, checkpoints, records."""
        return self.rank == 0


def place_from_environment(environment: Mapping[str, str] = os.environ) -> Place:
    """Read RANK and WORLD_SIZE as torchrun sets them; without them the process is alone.

    Raises:
        InvalidRequestError: They are no numbers, or contradict each other.
    """
    try:
        place = Place(int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1")))
    except ValueError as error:
        raise InvalidRequestError(
            "RANK and WORLD_SIZE", f"must be whole numbers: {error}"
        ) from error
    if not 0 <= place.rank < place.world_size:
        raise InvalidRequestError(
            "RANK", f"must be from 0 to WORLD_SIZE - 1, got {place.rank} of {place.world_size}"
        )
    return place


class Ranks(Protocol):
    """What a learner says to its peers. Calls are made by all ranks, in the same order."""

    @property
    def place(self) -> Place:
        """This process."""

    def sum(self, numbers: Tensor) -> Tensor:
        """Float64[N] summed over all ranks."""

    def largest(self, number: int) -> int:
        """The largest of the ranks' numbers."""

    def from_main(self, data: bytes) -> bytes:
        """What rank 0 passes; other ranks' argument is ignored."""

    def shared(self, module: nn.Module, device: torch.device) -> nn.Module:
        """The module with gradients averaged over all ranks, and rank 0's parameters."""

    def without_exchange(self, module: nn.Module) -> AbstractContextManager[None]:
        """Within it, gradients of a shared module are only added up locally."""


class Alone:
    """The `Ranks` of a learner that is one process."""

    place = Place()

    def sum(self, numbers: Tensor) -> Tensor:
        """See `Ranks.sum`."""
        return numbers

    def largest(self, number: int) -> int:
        """See `Ranks.largest`."""
        return number

    def from_main(self, data: bytes) -> bytes:
        """See `Ranks.from_main`."""
        return data

    def shared(self, module: nn.Module, device: torch.device) -> nn.Module:
        """See `Ranks.shared`."""
        return module

    def without_exchange(self, module: nn.Module) -> AbstractContextManager[None]:
        """See `Ranks.without_exchange`."""
        return nullcontext()


class Distributed:
    """The `Ranks` of a process started by torchrun."""

    def __init__(self, place: Place, limit_s: float) -> None:
        """Use `joined` instead."""
        self.place = place
        self._limit_s = limit_s

    def sum(self, numbers: Tensor) -> Tensor:
        """See `Ranks.sum`."""
        summed = numbers.clone()
        with self._talking():
            dist.all_reduce(summed)
        return summed

    def largest(self, number: int) -> int:
        """See `Ranks.largest`."""
        held = torch.tensor(number, device=self._device())
        with self._talking():
            dist.all_reduce(held, op=dist.ReduceOp.MAX)
        return int(held)

    def from_main(self, data: bytes) -> bytes:
        """See `Ranks.from_main`. Plain bytes: nothing that travels is ever executed."""
        size = torch.tensor(len(data), device=self._device())
        with self._talking():
            dist.broadcast(size, src=0)
        if not int(size):
            return b""
        held = torch.zeros(int(size), dtype=torch.uint8, device=self._device())
        if self.place.is_main:
            held.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        with self._talking():
            dist.broadcast(held, src=0)
        return held.cpu().numpy().tobytes()

    def shared(self, module: nn.Module, device: torch.device) -> nn.Module:
        """See `Ranks.shared`."""
        devices = [device] if device.type == "cuda" else None
        with self._talking():
            return nn.parallel.DistributedDataParallel(module, device_ids=devices)

    @contextmanager
    def without_exchange(self, module: nn.Module) -> Iterator[None]:
        """See `Ranks.without_exchange`."""
        assert isinstance(module, nn.parallel.DistributedDataParallel)
        with module.no_sync():
            yield

    def translated(self, error: RuntimeError) -> RankLostError:
        """What a failed exchange means, such as one within a backward pass."""
        return RankLostError(self.place.rank, self._limit_s, str(error).splitlines()[0])

    @contextmanager
    def _talking(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self.translated(error) from error

    def _device(self) -> torch.device:
        return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


@contextmanager
def joined(place: Place, *, device: torch.device, limit_s: float) -> Iterator[Ranks]:
    """Meet the other ranks, and part from them at the end.

    Args:
        place: This process. Alone, nothing is set up.
        device: gloo talks for CPU tensors, nccl for CUDA ones.
        limit_s: Deadline of meeting and of every exchange.

    Raises:
        RankLostError: The others did not come, or one got lost.
    """
    if place.world_size == 1:
        yield Alone()
        return
    ranks = Distributed(place, limit_s)
    try:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=limit_s),
        )
    except (RuntimeError, ValueError) as error:
        raise RankLostError(place.rank, limit_s, str(error).splitlines()[0]) from error
    try:
        yield ranks
    except RuntimeError as error:
        # Gradients are exchanged within backward passes, where only torch's own error is raised.
        if (
            isinstance(error, dist.DistError | dist.DistBackendError)
            or "gloo" in str(error).lower()
        ):
            raise ranks.translated(error) from error
        raise
    finally:
        dist.destroy_process_group()
