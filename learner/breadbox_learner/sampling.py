"""A buffer in the shape of TorchRL's replay buffers, for code that is written against those."""

import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from breadbox import Client
from breadbox.batches import Batch
from breadbox.fragment import Fragment
from breadbox.trees import Tree, map_tree


class SampledBuffer:
    """`sample`, `add`, `extend`, `len` and iteration as TorchRL's `ReplayBuffer` has them.

    What it holds lives in the service: `sample` waits for fragments, and each sample counts as a
    use of its chunks. Priorities are the server's business: it has samplers.

    Args:
        client: Connected to the buffer.
        batch_size: Fragments of a sample, unless `sample` is told another number.
        max_wait_s: Seconds a sample waits.
        device: Where samples should be.
        as_tensordict: Give `tensordict.TensorDict`; False: nested dicts of tensors. None: the
            former where tensordict is installed.
    """

    def __init__(
        self,
        client: Client,
        *,
        batch_size: int,
        max_wait_s: float = 60.0,
        device: str = "cpu",
        as_tensordict: bool | None = None,
    ) -> None:
        self._client = client
        self._batch_size = batch_size
        self._max_wait_s = max_wait_s
        self._device = device
        if as_tensordict is None:
            as_tensordict = importlib.util.find_spec("tensordict") is not None
        self._as_tensordict = as_tensordict

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """Take some fragments.

        Args:
            batch_size: Fragments; a multiple of the buffer's fragments_per_chunk.
            return_info: Also give a dict with `staleness` (versions) and `use_count`, int64[B], and
                `references`.

        Returns:
            Keys as in TorchRL's collectors, leaves [B, T, ...]: "observation", "action", "is_init",
            "sample_log_prob", "state_value" where they are known, and ("next", ...) with
            "observation", "reward", "terminated", "truncated", "done". Rewards and flags have a
            last axis of 1.

        Raises:
            WaitElapsedError: Too few fragments came in `max_wait_s`.
            InvalidRequestError: The buffer can never hold as many.
        """
        with self._client.fetch(batch_size or self._batch_size, self._max_wait_s) as lease:
            batch = self._client.load_batch(lease.references, device=self._device)
        data = self._packed(torchrl_layout(batch))
        if not return_info:
            return data
        info = {
            "staleness": torch.tensor([each.staleness for each in batch.references]),
            "use_count": torch.tensor([each.use_count for each in batch.references]),
            "references": batch.references,
        }
        return data, info

    def add(self, fragment: Fragment) -> bool:
        """Append one fragment; whether it is in the buffer now."""
        return self.extend([fragment])[0]

    def extend(self, fragments: Sequence[Fragment]) -> list[bool]:
        """Append fragments; which of them are in the buffer now."""
        results = self._client.append_many(fragments)
        return [result.outcome.name in ("ADMITTED", "DUPLICATE") for result in results]

    def __len__(self) -> int:
        """Fragments that can be sampled now."""
        state = self._client.get_buffer().state
        return state.fragment_count - state.open_fragment_count

    def __iter__(self) -> Iterator[Any]:
        """Samples without end."""
        while True:
            yield self.sample()

    def _packed(self, data: dict[str, Any]) -> Any:
        if not self._as_tensordict:
            return data
        tensordict = importlib.import_module("tensordict")
        shape = data["is_init"].shape[:2]
        return tensordict.TensorDict(data, batch_size=shape, device=self._device)


def torchrl_layout(batch: Batch) -> dict[str, Any]:
    """Name a batch's tensors as TorchRL does.

    The observation after step t is that of step t + 1, `next_obs` after the last step, and the
    episode's own final observation where one ended and it is known.
    """
    data: dict[str, Any] = {
        "observation": batch.obs,
        "action": batch.action,
        "is_init": batch.first.unsqueeze(-1),
        "next": {
            "observation": map_tree(
                lambda steps, after: torch.cat([steps[:, 1:], after.unsqueeze(1)], dim=1),
                batch.obs,
                batch.next_obs,
            ),
            "reward": batch.reward.unsqueeze(-1),
            "terminated": batch.terminated.unsqueeze(-1),
            "truncated": batch.truncated.unsqueeze(-1),
            "done": (batch.terminated | batch.truncated).unsqueeze(-1),
        },
    }
    if batch.final_obs_row is not None and batch.final_obs_step is not None:
        ends = (batch.final_obs_row, batch.final_obs_step)
        _put_final(data["next"]["observation"], *ends, batch.final_obs)
    for name, column in {"sample_log_prob": batch.log_prob, "state_value": batch.value}.items():
        if column is not None:
            data[name] = column if name == "sample_log_prob" else column.unsqueeze(-1)
    return data


def _put_final(following: Tree, row: Tensor, step: Tensor, final_obs: Tree) -> None:
    """Write known final observations over the first ones of the next episodes."""
    row = torch.as_tensor(np.asarray(row.cpu()))
    step = torch.as_tensor(np.asarray(step.cpu()))

    def put(steps: Tensor, final: Tensor) -> Tensor:
        steps[row, step] = final
        return steps

    map_tree(put, following, final_obs)
