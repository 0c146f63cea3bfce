"""Files of many frames are written a fragment at a time: memory does not grow with them."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import pytest

import breadbox
from breadbox.model.types import BufferConfig, FullPolicy
from support.console import played
from support.server_process import ServerProcess, plain_environment

pytestmark = [pytest.mark.integration, pytest.mark.slow]

STEPS, FRAGMENTS = 8, 24
HEIGHT, WIDTH = 360, 640
MORE_BYTES = 400 * 2**20
"""What an export of 126 MiB of frames may take beyond what it takes for 5; numbers are written in
row groups of 32 MiB, which take several times as much."""

EXPORT = """
import resource, sys
from breadbox.cli.main import main
try:
    main()
finally:
    print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def send(client: breadbox.Client, buffer: str, fragments: int, *, is_image: bool) -> None:
    """Append an episode of frames, as images or as stacks of which none is one."""
    client.create_buffer(
        buffer,
        BufferConfig(
            fragments_per_chunk=1,
            capacity_chunks=1000,
            capacity_bytes=2**30,
            full_policy=FullPolicy.EVICT,
        ),
    )
    client.start_session("run", buffer=buffer)
    base = np.arange(HEIGHT, dtype=np.uint8)[:, None, None] // 8
    for index in range(fragments):
        at = (np.arange(STEPS) + index * STEPS).astype(np.uint8)
        frames = np.broadcast_to(base + at[:, None, None, None], (STEPS, HEIGHT, WIDTH, 3))
        obs = np.ascontiguousarray(frames if is_image else frames.reshape(STEPS, -1))
        end = (STEPS - 1,) if index == fragments - 1 else ()
        fragment = played(index, obs=obs, steps=STEPS, ends=end, first=index == 0)
        fragment.next_obs = obs[-1] if end else np.uint8(1) + obs[-1]
        client.append(fragment, buffer=buffer)


def export_peak_bytes(address: str, buffer: str, out: Path) -> int:
    """Most memory that `breadbox export` of a buffer took."""
    done = subprocess.run(
        [
            *(sys.executable, "-c", EXPORT, "export", "--server", address),
            *("--buffer", buffer, "--out", str(out)),
        ],
        capture_output=True,
        check=False,
        text=True,
        env=plain_environment() | {"MALLOC_ARENA_MAX": "2"},
    )
    assert 0 == done.returncode, done.stderr[-2000:]
    return int(done.stdout.split()[-1])


@pytest.mark.parametrize("is_image", [True, False])
def test_exports_of_many_frames_take_a_bounded_memory(tmp_path: Path, is_image: bool) -> None:
    arguments = ("--store", f"file://{tmp_path}/store")
    with (
        ServerProcess(*arguments, log=tmp_path / "server.log") as server,
        breadbox.connect(server.address) as client,
    ):
        send(client, "short", 1, is_image=is_image)
        # Numbers take several times as long, and a row group of them the same memory.
        send(client, "long", FRAGMENTS if is_image else FRAGMENTS // 2, is_image=is_image)
        short = export_peak_bytes(server.address, "short", tmp_path / "short.parquet")
        long = export_peak_bytes(server.address, "long", tmp_path / "long.parquet")

        rows = parquet.read_metadata(tmp_path / "long.parquet").num_rows
        assert STEPS * (FRAGMENTS if is_image else FRAGMENTS // 2) == rows
        assert long - short < MORE_BYTES
