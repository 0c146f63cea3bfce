"""What a program observes of Reverb, or of the adapter under its name.

Usage: python behaviours.py MODULE. Prints one JSON object: what was observed, by what was done.
"""

import collections
import importlib
import json
import logging
import sys
import threading

import numpy as np

MODULE = sys.argv[1]
reverb = importlib.import_module(MODULE)
OBSERVED = {}
BANDS = {
    "around, ratio 1": (1.0, 4, 4.0),
    "around, ratio 4": (4.0, 2, 8.0),
    "around, late": (2.0, 20, 6.0),
    "around, below 1": (0.5, 10, 3.0),
    "bounds": (1.5, 2, (-1.0, 3.0)),
    "from the start": (1.0, 1, (0.0, 5.0)),
    "far": (1.0, 3, (-40.0, 6.0)),
}
"""Samples per insert, minimum size, error buffer."""


class Spec:
    def __init__(self, shape, dtype):
        self.shape, self.dtype = shape, dtype


def spec(shape, dtype):
    if MODULE != "reverb":
        return Spec(shape, dtype)
    import tensorflow

    return tensorflow.TensorSpec(shape, dtype)


def table(name, limiter=None, signature=None):
    return reverb.Table(
        name=name,
        sampler=reverb.selectors.Fifo(),
        remover=reverb.selectors.Fifo(),
        max_size=1000,
        rate_limiter=limiter or reverb.rate_limiters.MinSize(1),
        signature=signature,
    )


def outcome(call):
    """The class of what is raised, or that nothing was."""
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return next(
            each.__name__ for each in type(error).__mro__ if each in (ValueError, RuntimeError)
        )
    return "taken"


def passing(may, do, limit=200):
    """How many pass before the next one would wait."""
    count = 0
    while count < limit and may(1):
        do()
        count += 1
    return count


def observe_band(client, made, key):
    counts = []
    for _ in range(4):
        counts.append(passing(made.can_insert, lambda: client.insert([1.0], {made.name: 1.0})))
        counts.append(passing(made.can_sample, lambda: next(client.sample(made.name))))
    OBSERVED[f"band {key}"] = counts
    # What may not pass waits, and what may does not.
    waited = threading.Event()
    thread = threading.Thread(
        target=lambda: (client.insert([1.0], {made.name: 1.0}), waited.set()), daemon=True
    )
    thread.start()
    OBSERVED[f"band {key} lets an insert pass"] = waited.wait(20)
    limits = made.info.rate_limiter_info
    OBSERVED[f"band {key} limits"] = [
        round(limits.min_diff, 6),
        round(limits.max_diff, 6),
        limits.min_size_to_sample,
    ]


STEP = {"a": np.zeros(3, np.float32), "b": np.int64(1)}
WIDE = {"a": np.zeros(3), "b": np.int64(1)}
LONG = {"a": np.zeros(4, np.float32), "b": np.int64(1)}
SIGNATURES = {
    "step": {"a": ([3], np.float32), "b": ([], np.int64)},
    "open": {"a": ([None, 3], np.float32), "b": ([], np.int64)},
    "closed": {"a": ([2, 3], np.float32), "b": ([2], np.int64)},
}
ITEMS = {
    "both 2": lambda h: {"a": h["a"][-2:], "b": h["b"][-2:]},
    "both 3": lambda h: {"a": h["a"][-3:], "b": h["b"][-3:]},
    "squeezed": lambda h: {"a": h["a"][-1], "b": h["b"][-1]},
    "a slice": lambda h: {"a": h["a"][-2:], "b": h["b"][-1]},
    "a list": lambda h: [h["a"][-2:], h["b"][-1]],
    "one": lambda h: {"a": h["a"][-2:]},
}


def observe_signatures(client):
    for name in SIGNATURES:
        for data, step in {"step": STEP, "wide": WIDE, "long": LONG}.items():
            for shape, make in ITEMS.items():
                writer = client.trajectory_writer(3)
                for _ in range(3):
                    writer.append(step)
                done = outcome(lambda w=writer, m=make, n=name: w.create_item(n, 1.0, m(w.history)))
                OBSERVED[f"{name} takes {shape} of {data}"] = done
                writer.flush()
                writer.close()
        for data, step in {"step": STEP, "wide": WIDE, "long": LONG}.items():
            OBSERVED[f"{name} inserts {data}"] = outcome(
                lambda s=step, n=name: client.insert(s, {n: 1.0})
            )
        for data in ({"a": STEP["a"]}, {**STEP, "c": np.int64(1)}, [STEP["a"], STEP["b"]]):
            OBSERVED[f"{name} inserts {sorted(data) if isinstance(data, dict) else 'a list'}"] = (
                outcome(lambda d=data, n=name: client.insert(d, {n: 1.0}))
            )
    for count in (1, 2, 3):
        OBSERVED[f"the older writer's last {count}"] = outcome(lambda c=count: older(client, c))


def older(client, count):
    with client.writer(3) as writer:
        for _ in range(3):
            writer.append(STEP)
        writer.create_item("step", count, 1.0)


def observe_structures(client):
    step = collections.namedtuple("step", "x y")
    for name, data in {
        "int keys": {1: 2.5, 0: [1, 2]},
        "tuple keys": {(0, 1): 1, (0, 0): 2},
        "a named tuple": step(1, step(2, 3.0)),
        "an ordered dict": collections.OrderedDict(b=1, a=2),
        "texts": ["text", b"bytes"],
        "lists of lists": [[1, 2], [3, [4]]],
        "a dict without entries": {"a": {}, "b": 1},
        "no length": np.zeros((0, 3)),
        "half a float": np.float16(1),
        "a number": 1,
    }.items():
        OBSERVED[f"{name} are inserted"] = outcome(lambda d=data: client.insert(d, {"any": 1.0}))
        (sample,) = client.sample("any", emit_timesteps=False)
        leaves = [np.asarray(leaf) for leaf in sample.data]
        OBSERVED[f"{name} come back"] = [
            [leaf.shape, leaf.dtype.name if leaf.dtype.kind not in "OSU" else "text"]
            for leaf in leaves
        ]


def observe_ends(client):
    with client.trajectory_writer(3) as writer:
        writer.append(STEP)
    OBSERVED["append after the block"] = outcome(lambda: writer.append(STEP))
    writer.close()
    writer.close()
    OBSERVED["append after close"] = outcome(lambda: writer.append(STEP))
    OBSERVED["flush after close"] = outcome(writer.flush)
    OBSERVED["end_episode after close"] = outcome(writer.end_episode)
    old = client.writer(3)
    old.append(STEP)
    old.close()
    OBSERVED["the older append after close"] = outcome(lambda: old.append(STEP))
    OBSERVED["the older flush after close"] = outcome(old.flush)
    OBSERVED["the older close after close"] = outcome(old.close)


def main():
    logging.disable()
    bands = {
        key: table(f"band-{number}", reverb.rate_limiters.SampleToInsertRatio(*band))
        for number, (key, band) in enumerate(BANDS.items())
    }
    signed = [
        table(name, signature={key: spec(*each) for key, each in tree.items()})
        for name, tree in SIGNATURES.items()
    ]
    queue = reverb.Table.queue("any", 10)
    server = reverb.Server([*bands.values(), *signed, queue])
    client = reverb.Client(f"localhost:{server.port}")
    for key, made in bands.items():
        observe_band(client, made, key)
    observe_signatures(client)
    observe_structures(client)
    observe_ends(client)
    sys.stdout.write(json.dumps(OBSERVED) + "\n")
    sys.stdout.flush()
    server.stop()


main()
