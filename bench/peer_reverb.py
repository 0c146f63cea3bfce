"""Appends and samples fragments with Reverb. Runs in a virtual environment of its own.

Knows nothing of Breadbox: given the shapes of a workload's arrays, prints one JSON object with the
rates. Started by `python -m bench.peers`.
"""

import json
import statistics
import sys
import time

import numpy as np
import reverb


def main() -> None:
    """Read {"arrays": [[dtype, shape], ...], "group": n, "rounds": n} from standard input."""
    task = json.load(sys.stdin)
    rng = np.random.default_rng(0)
    arrays = [
        np.frombuffer(rng.bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize), np.uint8)
        .view(np.uint8 if dtype == "|b1" else dtype)
        .reshape(shape)
        for dtype, shape in task["arrays"]
    ]
    group, rounds = task["group"], task["rounds"]
    moved = group * sum(array.nbytes for array in arrays) / 1e9
    table = reverb.Table(
        name="fragments",
        sampler=reverb.selectors.Uniform(),
        remover=reverb.selectors.Fifo(),
        max_size=2 * group,
        rate_limiter=reverb.rate_limiters.MinSize(1),
    )
    server = reverb.Server([table])
    client = reverb.Client(f"localhost:{server.port}")
    seconds: dict[str, list[float]] = {"append": [], "load": []}
    for _ in range(rounds + 1):
        start = time.perf_counter()
        for _ in range(group):
            client.insert(arrays, {"fragments": 1.0})
        seconds["append"].append(time.perf_counter() - start)
        start = time.perf_counter()
        samples = list(client.sample("fragments", num_samples=group))
        columns = zip(*[sample[0].data for sample in samples], strict=True)
        stacked = [np.stack(column) for column in columns]
        seconds["load"].append(time.perf_counter() - start)
        del samples, stacked
    rates = {name: moved / statistics.median(each[1:]) for name, each in seconds.items()}
    print(json.dumps(rates))


if __name__ == "__main__":
    main()
