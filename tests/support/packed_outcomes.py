"""What comes of loading packed payloads, verified together or one by one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

import breadbox
from breadbox.model.errors import ReplayBufferError
from breadbox.model.trees import map_tree
from breadbox.payload import encode_fragment, fragments, read_fragments, receive
from breadbox.reading.packed import load_sequences
from breadbox.stores.reading import InlineStore
from breadbox.types import FragmentReference, PayloadReference
from support.announced import metadata_of
from support.fake_store import FakeStore
from support.payload_trees import same


def bodies_of(sequences: Sequence[breadbox.Sequence], codecs: Any = "raw") -> list[bytes]:
    return [b"".join(encode_fragment(each, codecs=codecs)) for each in sequences]


def held(
    sequences: Sequence[Any], bodies: Sequence[bytes]
) -> tuple[InlineStore, list[FragmentReference]]:
    """Return a store of these bodies, and the references to them."""
    payloads = [PayloadReference(f"{k:032x}", len(each)) for k, each in enumerate(bodies)]
    found = {each.payload_id: body for each, body in zip(payloads, bodies, strict=True)}
    pairs = zip(sequences, payloads, strict=True)
    references = [FragmentReference(metadata_of(*pair), 0, 0, 1) for pair in pairs]
    return InlineStore(found, FakeStore()), references


@contextmanager
def one_by_one() -> Iterator[None]:
    """Verify each payload by itself in the block."""
    with pytest.MonkeyPatch.context() as patched:
        for module in (fragments, receive):
            patched.setattr(module, "verify_unequal", lambda payloads: [])
        yield


def outcome(kind: Any, sequences: Sequence[Any], bodies: Sequence[bytes]) -> object:
    """Return what came of loading, or of reading without a kind: an error, or the arrays."""
    # What a payload's size foresees is of earlier payloads of the process, and changes words.
    receive.heads_met.clear()
    store, references = held(sequences, bodies)
    try:
        if kind is None:
            read = read_fragments(store, references)
            return map_tree(comparable, [[dict(each.tokens), dict(each.context)] for each in read])
        batch = load_sequences(kind, store, references, positions=range(len(references)))
    except ReplayBufferError as error:
        return f"{type(error).__name__}: {error}"
    return map_tree(comparable, [batch.tokens, batch.context, batch.lengths])


def comparable(leaf: Any) -> Any:
    return leaf if isinstance(leaf, np.ndarray) else leaf.view(torch.int16).numpy()


def alike(wanted: object, got: object) -> bool:
    return wanted == got if isinstance(wanted, str) else same(wanted, got)
