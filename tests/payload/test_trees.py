"""Trees of arrays: paths lead to leaves and back, and what differs is named by its path."""

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from breadbox.model.errors import TreeMismatchError, UnsupportedArrayError
from breadbox.model.trees import (
    child_path,
    concat,
    field_of,
    flatten,
    gather,
    is_within,
    leaves,
    leaves_as,
    map_tree,
    path_parts,
    paths_of,
    row,
    rows,
    rows_equal,
    take,
    unflatten,
)

KEYS = st.text(st.sampled_from("ab.[]\\0 é"), min_size=1, max_size=5)
TREES = st.recursive(
    st.integers().map(np.array),
    lambda children: (
        st.dictionaries(KEYS, children, min_size=1, max_size=3)
        | st.lists(children, min_size=1, max_size=3).map(tuple)
    ),
    max_leaves=12,
)


@given(st.lists(KEYS | st.integers(0, 99), max_size=5))
def test_a_path_gives_back_the_keys_and_places_that_it_was_made_of(parts: list[Any]) -> None:
    path = ""
    for part in parts:
        path = child_path(path, part)

    assert parts == path_parts(path)


@pytest.mark.parametrize("text", [".", "a.", "a..b", "a[", "a[x]", "a]", "a[1", "\\", "a[-1]"])
def test_what_is_no_path_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no path"):
        path_parts(text)


@given(st.dictionaries(KEYS, TREES, min_size=1, max_size=3))
def test_a_tree_can_be_put_together_from_its_leaves_by_path(tree: Any) -> None:
    named = dict(leaves(tree))

    assert tree == gather(named)
    assert sorted(named) == sorted(paths_of(flatten(tree)[0]))


def reversed_keys(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: reversed_keys(child) for key, child in reversed(tree.items())}
    if isinstance(tree, list | tuple):
        return type(tree)(reversed_keys(child) for child in tree)
    return tree


@given(TREES)
def test_the_order_of_keys_changes_neither_structure_nor_order_of_leaves(tree: Any) -> None:
    structure, found = flatten(tree)
    other_structure, others = flatten(reversed_keys(tree))

    assert structure == other_structure
    assert [(path, id(leaf)) for path, leaf in found] == [(p, id(leaf)) for p, leaf in others]
    assert tree == unflatten(structure, [leaf for _, leaf in found])
    assert [id(leaf) for _, leaf in found] == [
        id(leaf) for leaf in leaves_as(structure, reversed_keys(tree))
    ]


def test_leaves_are_matched_by_path_whatever_the_containers_are() -> None:
    structure, _ = flatten({"b": [1, 2], "a": (3,), "gone": None, "empty": {}})

    assert [30, 10, 20] == leaves_as(structure, {"a": [30], "b": (10, 20)})
    with pytest.raises(TreeMismatchError, match=r"here: obs\.b: wanted a list, got an array"):
        leaves_as(
            structure, {"a": (3,), "b": 1, "gone": None, "empty": {}}, path="obs", where="here"
        )


@pytest.mark.parametrize(
    "named",
    [
        {"a": 1, "a.b": 2},
        {"a.b": 1, "a": 2},
        {"a[1]": 1},
        {"a[0]": 1, "a.b": 2},
        {"a[0]": 1, "a[2]": 2},
        {"a..b": 1},
    ],
    ids=str,
)
def test_leaves_that_make_no_tree_are_refused(named: dict[str, int]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - each says something else
        gather(named)


def test_paths_are_written_as_python_would_reach_the_leaf() -> None:
    tree = {"obs": {"image": 1, "more": [2, (3,)]}, "a.b": 4}

    assert ["obs.image", "obs.more[0]", "obs.more[1][0]", "a\\.b"] == [p for p, _ in leaves(tree)]


def test_a_path_belongs_to_a_field_and_lies_within_its_parts() -> None:
    assert ("obs", "action", "reward") == tuple(map(field_of, ("obs.a[0]", "action[1]", "reward")))
    assert all(is_within("obs.image[0].x", part) for part in ("obs", "obs.image", "obs.image[0]"))
    assert not any(is_within("obs.image", part) for part in ("ob", "obs.im", "obs.image.x"))


def test_a_named_tuple_is_mapped_to_a_tuple_and_none_stays() -> None:
    state = namedtuple("state", ["h", "c"])(np.ones(2), None)  # type: ignore[call-arg]

    mapped = map_tree(lambda leaf: leaf.sum(), {"state": state, "more": [np.ones(3)]})

    assert {"state": (2.0, None), "more": [3.0]} == mapped


@pytest.mark.parametrize(
    ("other", "path"),
    [
        ({"a": 1}, ""),
        ({"a": 1, "b": {"c": [1]}}, "b.c"),
        ({"a": 1, "b": {"c": (1, 2)}}, "b.c"),
        ({"a": None, "b": {"c": [1, 2]}}, "a"),
    ],
    ids=str,
)
def test_trees_that_differ_are_refused_with_the_path(other: Any, path: str) -> None:
    with pytest.raises(TreeMismatchError) as caught:
        map_tree(lambda a, b: a + b, {"a": 1, "b": {"c": [1, 2]}}, other)

    assert path == caught.value.path


def test_leaves_of_several_trees_meet_by_key_whatever_the_order() -> None:
    assert {"a": 11, "b": 22} == map_tree(int.__add__, {"a": 1, "b": 2}, {"b": 20, "a": 10})


def test_rows_are_views_and_chosen_ones_copies() -> None:
    tree = {"x": np.arange(6).reshape(3, 2), "y": (np.arange(3),)}

    assert rows(tree, 1, None)["x"].base is not None
    assert [[2, 3], [4, 5]] == rows(tree, 1, None)["x"].tolist()
    assert 2 == row(tree, 2)["y"][0]
    assert [2, 0] == take(tree, np.array([2, 0]))["y"][0].tolist()
    assert not np.shares_memory(take(tree, np.array([2, 0]))["x"], tree["x"])


def test_trees_are_joined_leaf_by_leaf() -> None:
    one, two = ({"x": np.full(n, n), "y": (np.zeros((n, 2)),)} for n in (1, 2))

    joined = concat([one, two])

    assert [1, 2, 2] == joined["x"].tolist()
    assert (3, 2) == joined["y"][0].shape


def test_a_tree_too_deep_is_refused_before_it_is_walked_to_its_end() -> None:
    tree: Any = np.zeros(1)
    for _ in range(10_000):
        tree = [tree]

    with pytest.raises(UnsupportedArrayError, match="deeper"):
        flatten(tree)


@given(TREES)
def test_taking_apart_and_putting_together_gives_the_same_tree(tree: Any) -> None:
    structure, named = flatten(tree)

    assert tree == unflatten(structure, [leaf for _, leaf in named])


def test_rows_are_equal_that_are_in_every_leaf_and_nan_equals_nan() -> None:
    one = {"a": np.array([1.0, np.nan, 3.0]), "b": (np.array([[1, 2], [3, 4], [5, 6]]),)}
    other = {"b": (np.array([[1, 2], [3, 4], [5, 7]]),), "a": np.array([1.0, np.nan, 3.0])}

    assert [True, True, False] == rows_equal(one, other).tolist()
    assert [] == rows_equal(rows(one, 0, 0), rows(other, 0, 0)).tolist()
    assert [False, False] == rows_equal(np.zeros((2, 3)), np.zeros((2, 4))).tolist()
    with pytest.raises(TreeMismatchError):
        rows_equal(one, one["a"])
