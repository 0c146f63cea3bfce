"""Exchange gradients, sums and votes among ranks, with deadlines; batches need none (B12)."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

from breadbox.model.errors import ReplayBufferError
from breadbox_learner.settings import Membership

_MEETING_POLL_S = 0.05


class RankLostError(ReplayBufferError):
    """Another rank ended or did not answer in time; restart all of them, with resume."""

    def __init__(self, rank: int, limit_s: float, reason: str) -> None:
        super().__init__(
            f"rank {rank} lost touch with the other ranks (deadline {limit_s:g} s): {reason}; "
            "restart all ranks with --resume"
        )
        self.rank = rank


class Ranks:
    """Exchanges among ranks, which all call in the same order; this one is for a single rank."""

    membership = Membership()

    def sum(self, numbers: Tensor) -> Tensor:
        """Sum float64[N] over all ranks."""
        return numbers

    def largest(self, number: int) -> int:
        """Return the largest of the ranks' numbers."""
        return number

    def gathered(self, rows: Tensor) -> Tensor:
        """Concatenate the rows [N, ...] of all ranks, in order of rank; N may differ."""
        return rows

    def from_main(self, data: bytes) -> bytes:
        """Return rank 0's argument; those of other ranks are ignored."""
        return data

    def shared(self, module: nn.Module, device: torch.device) -> nn.Module:
        """Return a module with gradients averaged over all ranks, from rank 0's parameters."""
        return module

    def without_exchange(self, module: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which gradients of a shared module are only added up locally."""
        return nullcontext()


class _Distributed(Ranks):
    """The ranks that torchrun starts."""

    def __init__(self, membership: Membership, limit_s: float) -> None:
        self.membership = membership
        self._limit_s = limit_s

    def sum(self, numbers: Tensor) -> Tensor:
        summed = numbers.to(self._device(), copy=True)
        with self._talking():
            dist.all_reduce(summed)
        return summed.to(numbers.device)

    def largest(self, number: int) -> int:
        held = torch.tensor(number, device=self._device())
        with self._talking():
            dist.all_reduce(held, op=dist.ReduceOp.MAX)
        return int(held)

    def gathered(self, rows: Tensor) -> Tensor:
        size = torch.tensor(len(rows), device=self._device())
        sizes = [torch.zeros_like(size) for _ in range(self.membership.world_size)]
        with self._talking():
            dist.all_gather(sizes, size)
        # Ranks exchange only equal shapes, so each pads its rows to the longest.
        counts = [int(each) for each in sizes]
        own = rows.new_zeros((max(counts), *rows.shape[1:]), device=self._device())
        own[: len(rows)] = rows
        parts = [torch.zeros_like(own) for _ in counts]
        if own.numel():
            with self._talking():
                dist.all_gather(parts, own)
        filled = [part[:count] for part, count in zip(parts, counts, strict=True)]
        return torch.cat(filled).to(rows.device)

    def from_main(self, data: bytes) -> bytes:
        # Plain bytes, which are never executed.
        size = torch.tensor(len(data), device=self._device())
        with self._talking():
            dist.broadcast(size, src=0)
        if not int(size):
            return b""
        held = torch.zeros(int(size), dtype=torch.uint8, device=self._device())
        if self.membership.is_main:
            held.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        with self._talking():
            dist.broadcast(held, src=0)
        return held.cpu().numpy().tobytes()

    def shared(self, module: nn.Module, device: torch.device) -> nn.Module:
        devices = [device] if device.type == "cuda" else None
        with self._talking():
            return nn.parallel.DistributedDataParallel(module, device_ids=devices)

    @contextmanager
    def without_exchange(self, module: nn.Module) -> Iterator[None]:
        assert isinstance(module, nn.parallel.DistributedDataParallel)
        with module.no_sync():
            yield

    def translated(self, error: RuntimeError) -> RankLostError:
        """Return the error for a failed exchange, also one within a backward pass."""
        return RankLostError(self.membership.rank, self._limit_s, str(error).splitlines()[0])

    @contextmanager
    def _talking(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self.translated(error) from error

    def _device(self) -> torch.device:
        return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def meeting_of(store: Any, membership: Membership, limit_s: float) -> str:
    """Agree with the other ranks on a new name, or raise RankLostError after `limit_s`."""
    # torchrun's store outlives its ranks and still has names of dead ones; rank 0 answers all.
    if not membership.is_main:
        name = uuid4().hex
        store.set(f"breadbox/name/{membership.rank}", name)
        meeting: str = store.get(f"breadbox/meeting/{name}").decode()
        store.set(f"breadbox/came/{meeting}/{membership.rank}", "")
        return meeting
    meeting = uuid4().hex
    missing = set(range(1, membership.world_size))
    give_up_at = time.monotonic() + limit_s
    while True:
        missing = {r for r in missing if not store.check([f"breadbox/came/{meeting}/{r}"])}
        if not missing:
            return meeting
        if time.monotonic() > give_up_at:
            raise RankLostError(membership.rank, limit_s, f"ranks {sorted(missing)} did not come")
        for rank in missing:
            if store.check([f"breadbox/name/{rank}"]):
                name = store.get(f"breadbox/name/{rank}").decode()
                store.set(f"breadbox/meeting/{name}", meeting)
        time.sleep(_MEETING_POLL_S)


@contextmanager
def joined(membership: Membership, *, device: torch.device, limit_s: float) -> Iterator[Ranks]:
    """Meet other ranks within `limit_s`, and leave at the end; gloo for the CPU, nccl for CUDA."""
    if membership.world_size == 1:
        yield Ranks()
        return
    ranks = _Distributed(membership, limit_s)
    limit = timedelta(seconds=limit_s)
    try:
        store, _, _ = next(
            rendezvous("env://", membership.rank, membership.world_size, timeout=limit)
        )
        meeting = meeting_of(store, membership, limit_s)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore(meeting, store),  # type: ignore[attr-defined]  # It is public.
            rank=membership.rank,
            world_size=membership.world_size,
            timeout=limit,
        )
    except (RuntimeError, ValueError) as error:
        raise RankLostError(membership.rank, limit_s, str(error).splitlines()[0]) from error
    try:
        yield ranks
    except RuntimeError as error:
        # Backward passes exchange gradients, and raise only torch's own errors.
        if (
            isinstance(error, dist.DistError | dist.DistBackendError)
            or "gloo" in str(error).lower()
        ):
            raise ranks.translated(error) from error
        raise
    finally:
        dist.destroy_process_group()
