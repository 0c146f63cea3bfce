"""TorchRL's replay buffer on Breadbox: `pip install "breadbox[torchrl]"`.

`BreadboxReplayBuffer` is for TorchRL's `TensorDictReplayBuffer` and
`TensorDictPrioritizedReplayBuffer`; docs/adapters.md lists what is different. Root flags of a
sample are False: no step begins where an episode has ended.
"""

from breadbox_adapters.torchrl.buffer import BreadboxReplayBuffer
from breadbox_adapters.torchrl.layout import Steps, Stream, as_dict

__all__ = ["BreadboxReplayBuffer", "Steps", "Stream", "as_dict"]
