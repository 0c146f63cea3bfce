"""Gives MineStudio's functions and the adapter's the same values, and tells where they differ.

Usage: python functions.py SEED. MineStudio and the stand-ins are on the path. Prints one line per
function: its name, how many values it was given, and those with different results.
"""

import functools
import itertools
import random
import sys

import numpy as np
import ray
import torch
from minestudio.online import utils as theirs
from minestudio.online.utils.rollout import datatypes as their_types
from minestudio.online.utils.train import gae as their_gae
from omegaconf import OmegaConf

from breadbox_adapters import minestudio as ours

rng = np.random.default_rng(int(sys.argv[1]))
random.seed(int(sys.argv[1]))


def result_of(function, *arguments, **keywords):
    """What it returned, or the class of what it raised."""
    try:
        return function(*arguments, **keywords)
    except Exception as error:  # noqa: BLE001
        return ("raised", type(error).__name__)


def alike(one, other):
    if type(one) is not type(other):
        return False
    match one:
        case np.ndarray():
            return (
                one.dtype == other.dtype
                and one.shape == other.shape
                and one.tolist() == other.tolist()
            )
        case torch.Tensor():
            return one.dtype == other.dtype and torch.equal(one, other)
        case dict():
            return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
        case list() | tuple():
            return len(one) == len(other) and all(map(alike, one, other))
    return one is other or bool(one == other)


def tell(name, given, different):
    sys.stdout.write(f"{name} {given} {different}\n")


LEAVES = [
    np.zeros(()),
    np.array(3, np.int32),
    np.arange(6.0).reshape(2, 3),
    np.arange(6)[::-2],
    np.array([["a", "b"], ["c", "d"]]),
    np.array([1, None], object),
    np.ones((3, 0), np.uint8),
    np.asfortranarray(np.arange(6, dtype=np.float32).reshape(3, 2)),
    torch.arange(8.0).reshape(2, 4),
    torch.tensor(5),
    torch.ones(2, 3, requires_grad=True),
    np.True_,
    np.float32(1.5),
    np.int64(4),
    np.str_("text"),
    True,
    3,
    2.5,
    "text",
    "nul\0",
    b"bytes",
    None,
    (1, 2),
    [1, 2, 3],
    ["a", "b"],
    [],
    {},
    {1: 2},
    frozenset([1]),
    OmegaConf.create({"x": 1, "y": {"z": 2}}),
]


def tree(depth):
    kind = random.choice(["leaf", "leaf", "list", "tuple", "dict"]) if depth else "leaf"
    if kind == "leaf":
        return random.choice(LEAVES)
    children = [tree(depth - 1) for _ in range(random.choice([1, 2, 3]))]
    if kind == "dict":
        return dict(zip(["a", 2, "c"], children, strict=False))
    return children if kind == "list" else tuple(children)


def variants(value):
    """The same again and again, or something else among it."""
    others = [random.choice([value, value, value, tree(1)]) for _ in range(random.choice([1, 2]))]
    return [value, *others]


def compare(name, arguments):
    given, different = 0, []
    for each in arguments:
        given += 1
        first = result_of(getattr(theirs, name), *each)
        second = result_of(getattr(ours, name), *each)
        if not alike(first, second):
            different.append(f"{each!r}: {first!r} | {second!r}")
    tell(name, given, different)


trees = [*LEAVES, *(tree(3) for _ in range(400))]
compare("auto_stack", [(variants(each),) for each in trees] + [([],)])
compare("auto_to_numpy", [(each,) for each in trees])
compare("auto_to_torch", [(each, "cpu") for each in trees])
compare("auto_getitem", [(each, index) for each in trees for index in (0, 1)])
compare(
    "auto_slice",
    [
        (each, start, end, dim, type_list)
        for each in trees
        for start, end, dim, type_list in itertools.product([0, 1], [1, 2], [0, 1], [0, 1])
    ],
)
compare("auto_cat", [(variants(each), dim) for each in trees for dim in (0, 1)] + [([],)])
compare("auto_pad", [(each, length) for each in trees for length in (0, 2)])
compare("recursive_detach", [(each,) for each in trees])


def batch():
    """Fragments of some workers, with gaps, in any order."""
    names = [
        (worker, fid)
        for worker in "abc"
        for fid in range(random.randrange(1, 7))
        if random.random() < 0.8
    ]
    random.shuffle(names)
    step_count = random.randrange(1, 6)
    return {
        name: {
            "vpred": rng.normal(size=step_count).astype(np.float32),
            "reward": rng.normal(size=step_count).astype(np.float32),
            "next_done": rng.random(step_count) < 0.2,
        }
        for name in names
    }


def last_ones(module, index_type, names):
    indexes = [index_type(*name) for name in names]
    return [
        (each.worker_uuid, each.fid_in_worker) for each in module.get_last_fragment_indexes(indexes)
    ]


def targets(worker, index_type, infos):
    indexes = [index_type(*name) for name in infos]
    worker("reset")
    worker("update_gae_infos", dict(zip(indexes, infos.values(), strict=True)))
    worker("calculate_target")
    return [list(part.values()) for part in worker("get_target", indexes)]


def by_ray(actor, method, *arguments):
    return ray.get(getattr(actor, method).remote(*arguments))


batches = [batch() for _ in range(200)]
different = []
for infos in batches:
    last = last_ones(their_gae, their_types.FragmentIndex, infos)
    mixed = [
        last_ones(ours, kind, infos) for kind in (ours.FragmentIndex, their_types.FragmentIndex)
    ]
    if mixed != [last, last]:
        different.append((last, mixed))
    for name in last:
        infos[name]["next_vpred"] = float(rng.normal())
tell("get_last_fragment_indexes", len(batches), different)

worker = their_gae.GAEWorker.remote(discount=0.9, gae_lambda=0.8)
our_worker = ours.GAEWorker(discount=0.9, gae_lambda=0.8)
our_actor = ours.GAEWorker.remote(discount=0.9, gae_lambda=0.8)
different = []
for infos in batches:
    first = targets(functools.partial(by_ray, worker), their_types.FragmentIndex, infos)
    for name, other in (
        ("object", lambda method, *given: getattr(our_worker, method)(*given)),
        ("actor", functools.partial(by_ray, our_actor)),
    ):
        if not alike(first, targets(other, ours.FragmentIndex, infos)):
            different.append((name, infos))
tell("GAEWorker", len(batches), different)
