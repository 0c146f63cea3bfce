"""TorchRL's replay buffer on Breadbox: `pip install "breadbox[torchrl]"`.

`BreadboxReplayBuffer` takes the place of TorchRL's `TensorDictReplayBuffer` and
`TensorDictPrioritizedReplayBuffer`: collectors extend it, losses take its samples, and steps may
come from actors anywhere. docs/adapters.md lists what is different. At a sample's root flags are
False: no step begins where an episode has ended.
"""

from breadbox_adapters.torchrl.buffer import BreadboxReplayBuffer
from breadbox_adapters.torchrl.layout import Steps, Stream, as_dict

__all__ = ["BreadboxReplayBuffer", "Steps", "Stream", "as_dict"]
