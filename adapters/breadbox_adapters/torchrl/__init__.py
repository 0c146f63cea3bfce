"""TorchRL's replay buffer on Breadbox: `pip install "breadbox[torchrl]"`.

`BreadboxReplayBuffer` takes the place of TorchRL's `TensorDictReplayBuffer` and
`TensorDictPrioritizedReplayBuffer`: collectors extend it, losses take its samples, and steps may
come from actors anywhere.

What is different, and why:

- Samples are drawn from a mirror, with replacement; `slice_len` in place of a `SliceSampler` gives
  consecutive steps. There are no other storages, samplers and writers to choose: the server keeps
  steps, and which ones is the buffer's limits' business.
- Indexes are handles that are never used again: a late priority can hit no other step.
- The reward is one number for each step, and comes back as float32 [B, 1].
- At a sample's root flags are False: no step begins where an episode has ended.
- `state_dict` holds priorities, and not the steps: these are in the service.
"""

from breadbox_adapters.torchrl.buffer import BreadboxReplayBuffer
from breadbox_adapters.torchrl.layout import Steps, Stream, as_dict

__all__ = ["BreadboxReplayBuffer", "Steps", "Stream", "as_dict"]
