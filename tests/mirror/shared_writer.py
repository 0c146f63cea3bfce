"""Another process that fills a mirror's memory as fast as it can, for some seconds.

`python -m mirror.shared_writer DESCRIPTOR CAPACITY FRAMES SECONDS`
"""

import sys
import time
from types import SimpleNamespace
from typing import Any, cast

from breadbox.mirror.sharing.shared_memory import Publisher, SharedMemory
from breadbox.mirror.storage.step_storage import FilledStepStorage
from mirror.told_steps import told_fragment

FRAMES_PERIOD = 400
"""Fragments after which all is forgotten."""


def filled(
    descriptor: int, capacity: int, frame_stack: dict[str, int]
) -> tuple[FilledStepStorage, Any]:
    """A memory to fill, and who is said to fill it."""
    memory = SharedMemory(descriptor)
    held = FilledStepStorage(capacity, frame_stack, memory)
    follower: Any = SimpleNamespace(
        session_id="s",
        cursor=-1,
        begun_count=0,
        skipped_chunk_count=0,
        failure=None,
        behind_since=0.0,
    )
    held.on_change = Publisher(memory, held, cast("Any", follower)).publish
    return held, follower


def main() -> None:
    descriptor, capacity, has_frames = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "True"
    held, follower = filled(descriptor, capacity, {"obs": 0} if has_frames else {})
    over_at, index = time.monotonic() + float(sys.argv[4]), 0
    while time.monotonic() < over_at:
        if index % FRAMES_PERIOD == FRAMES_PERIOD - 1:
            held.clear()
        held.extend(told_fragment(index, has_frames=has_frames), index)
        index += 1
    follower.session_id = "over"
    with held.changed:
        held.notify()


if __name__ == "__main__":
    main()
