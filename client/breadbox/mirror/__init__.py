"""A mirror of a buffer beside the learner: sample steps, sequences and episodes at memory speed.

```python
from breadbox.mirror import ReplayMirror

with ReplayMirror("localhost:50051", capacity_steps=1_000_000) as mirror:
    mirror.wait_until(steps=1_000, timeout_s=60)
    batch = mirror.sample(256, n_step=3, device="cuda")
```

`StepMemory` does the same without a server: the program passes it fragments.
"""

from breadbox.mirror.batches import Prioritised, SequenceBatch, StepBatch
from breadbox.mirror.drawing import GoalStrategy, Relabel
from breadbox.mirror.memory import StepMemory
from breadbox.mirror.replay import ReplayMirror

__all__ = [
    "GoalStrategy",
    "Prioritised",
    "Relabel",
    "ReplayMirror",
    "SequenceBatch",
    "StepBatch",
    "StepMemory",
]
