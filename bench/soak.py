"""Appends and loads at full rate for a while, and says whether memory stays flat.

`python -m bench.soak` ends with status 1 if a process grew by more than it may.
"""

import sys
import time
from itertools import islice

import click
import psutil

import breadbox
from bench.processes import breadbox_server, redis_server
from bench.workloads import SESSION_ID, WORKLOADS, numbered

_GROUP = 8
_GROWTH_BYTES_MAX = 64 * 1024 * 1024
"""Allocators keep some; a leak of one fragment in a hundred would be far beyond."""


@click.command()
@click.option(
    "--workload", type=click.Choice(sorted(WORKLOADS)), default="atari", show_default=True
)
@click.option("--duration-s", default=60.0, show_default=True)
def main(workload: str, duration_s: float) -> None:
    """Append and load at full rate; memory must stay flat after the first quarter."""
    with (
        redis_server() as path,
        breadbox_server(f"unix://{path}", "--capacity-bytes", "256MiB") as server,
        breadbox.connect(server.address) as client,
    ):
        client.start_session(SESSION_ID)
        successive = numbered(WORKLOADS[workload](), "soak")
        start = time.monotonic()
        baseline: dict[str, int] = {}
        moved = 0
        while (elapsed := time.monotonic() - start) < duration_s:
            client.append_many(list(islice(successive, _GROUP)))
            with client.fetch(fragment_count=_GROUP, max_wait_s=10.0) as lease:
                for batch in lease.batches(batch_size=_GROUP):
                    moved += len(batch)
            if not baseline and elapsed > duration_s / 4:
                baseline = _resident(server.resident_bytes)
        growth = {
            name: after - baseline[name] for name, after in _resident(server.resident_bytes).items()
        }
    click.echo(f"{moved} fragments of {workload} in and out in {duration_s:.0f} s")
    for name, grown in growth.items():
        click.echo(f"{name}: {grown / 1e6:+.1f} MB since a quarter of the time")
    sys.exit(any(grown > _GROWTH_BYTES_MAX for grown in growth.values()))


def _resident(server_bytes: int) -> dict[str, int]:
    return {"client": psutil.Process().memory_info().rss, "server": server_bytes}


if __name__ == "__main__":
    main()
