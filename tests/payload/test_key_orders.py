"""Batches and fragments by name, whatever order of keys each producer's dicts have."""

from typing import Any

import numpy as np
import pytest

from breadbox.payload import decode_tree, encode_tree
from breadbox.payload.fragments import read_fragments, write_and_describe
from breadbox.reading.batches import load_batch
from breadbox.stores import PayloadStore
from breadbox.stores.reading import InlineStore
from support.fake_store import FakeStore
from support.key_orders import ORDERS, fragments, wrong_leaves
from support.rich_fragments import stored

FIELDS = ("obs", "next_obs", "final_obs", "action", "in_state", "extras")


@pytest.fixture(params=["store", "inline"])
def store(request: pytest.FixtureRequest) -> PayloadStore:
    made = FakeStore()
    if request.param == "store":
        return made
    return InlineStore(made.payloads.unannounced, made)


def judged(of: Any) -> list[str]:
    names = {name: "obs" if name.endswith("_obs") else name for name in FIELDS}
    return [
        each for name, field in names.items() for each in wrong_leaves(field, getattr(of, name))
    ]


@pytest.mark.parametrize("codecs", ["raw", "zstd"])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_batch_of_fragments_in_all_orders_has_each_leaf_by_its_name(
    store: PayloadStore, codecs: str, device: str | None
) -> None:
    references = stored(store, *fragments(12), codecs=codecs)

    batch = load_batch(store, references, device=device)

    assert [] == judged(batch)
    assert [*range(12)] == np.asarray(batch.final_obs_row).tolist()
    assert [[*range(at, at + 4)] for at in range(0, 48, 4)] == np.asarray(batch.reward).tolist()


def test_some_columns_of_fragments_in_all_orders_are_those_that_were_asked_for(
    store: PayloadStore,
) -> None:
    references = stored(store, *fragments(6))

    batch = load_batch(store, references, columns=["obs.goal.y", "final_obs.right"])

    assert (batch.obs["goal"]["y"] // 1000 == 4).all()
    assert (batch.final_obs["right"] // 1000 == 2).all()


def test_fragments_are_read_by_name_and_their_dicts_all_have_one_order(
    store: PayloadStore,
) -> None:
    read = read_fragments(store, stored(store, *fragments(6)))

    assert [] == [each for fragment in read for each in judged(fragment)]
    assert [["goal", "left", "right"]] * 6 == [[*fragment.obs] for fragment in read]
    assert [["goal", "left", "right"]] * 6 == [[*fragment.next_obs] for fragment in read]


def test_the_order_of_keys_is_no_other_schema() -> None:
    written = write_and_describe(FakeStore(), [*fragments(len(ORDERS))])

    assert 1 == len({each.schema.hash for each in written if each.schema})


def test_payloads_keep_the_order_in_which_a_dict_was_written() -> None:
    """They are the bytes that they have always been; readers have the one order."""
    there, back = ({"b": np.ones(2), "a": np.zeros(3)}, {"a": np.zeros(3), "b": np.ones(2)})
    payloads = [b"".join(encode_tree(tree)) for tree in (there, back)]

    assert payloads[0] != payloads[1]
    for payload in payloads:
        tree, _ = decode_tree(payload)
        assert ["a", "b"] == [*tree]
        assert ([0, 0, 0], [1, 1]) == (tree["a"].tolist(), tree["b"].tolist())
