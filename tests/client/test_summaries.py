"""What holds arrays shows their paths, dtypes and shapes, and no numbers."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from breadbox.model.fragment import Fragment, Part
from breadbox.model.summaries import LEAVES_MAX, Summarized, html_table, summary
from breadbox.model.types import FragmentMetadata, FragmentReference, LeaseGrant
from breadbox.operations.leasing import Granted
from breadbox.payload import write_fragments
from breadbox.reading import packed  # noqa: F401 - its batches show themselves
from breadbox.reading.batches import Batch, load_batch
from breadbox_learner.training.batching import training_batch
from breadbox_offline.training.pipeline import OfflineBatch
from support.fake_store import FakeStore
from support.fragments import vector_fragment
from support.operation_world import OperationWorld


def loaded(fragment: Fragment) -> Batch:
    store = FakeStore()
    (payload,) = write_fragments(store, [fragment])
    metadata = FragmentMetadata(
        worker_id="w",
        fragment_index=0,
        session_id="s",
        model_version_min=0,
        model_version_max=0,
        payload=payload,
        step_count=fragment.step_count,
    )
    return load_batch(store, [FragmentReference(metadata, 0, 0, 1)])


@pytest.fixture
def fragment() -> Fragment:
    return vector_fragment(7)


def test_a_fragment_says_whose_it_is_and_what_is_in_it(fragment: Fragment) -> None:
    text = repr(fragment)
    assert text.startswith("Fragment(worker_id=")
    steps, *rest = fragment.obs.shape
    assert f"obs: float32{[steps, *rest]}" in text
    assert "fragment_index=7" in text
    assert "extras" not in text
    fragment.model_version_max = fragment.model_version_min + 2
    fragment.extras = {"a": {"b": np.zeros((2, 3), np.uint8)}}
    low, high = fragment.model_version_min, fragment.model_version_max
    assert f"model versions {low} to {high}" in repr(fragment)
    assert "extras.a.b: uint8[2, 3]" in repr(fragment)


def test_a_part_says_whose_it_is_and_what_is_in_it() -> None:
    part = Part("row-1", 2, "reward", {"scores": np.ones(3)}, {"reward": 0.5})
    shown = "Part(group='row-1', member=2, name='reward', reward=0.5, arrays.scores: float64[3])"
    assert shown == repr(part)
    assert "arrays.scores" in part._repr_html_()
    assert "Part(group='row-1', member=0, name='', a=1)" == repr(Part("row-1", numbers={"a": 1}))


def kinds_of(base: type[Summarized]) -> Iterator[type[Summarized]]:
    """Public classes below one."""
    for each in base.__subclasses__():
        if each.__module__.startswith("breadbox") and not each.__name__.startswith("_"):
            yield each
        yield from kinds_of(each)


def test_whatever_shows_itself_has_what_it_shows() -> None:
    kinds = {each.__name__ for each in kinds_of(Summarized)}
    assert {"Fragment", "Sequence", "Part", "Batch", "PackedBatch", "PaddedBatch"} <= kinds
    for kind in kinds_of(Summarized):
        for name in ("_facts", "_arrays"):
            assert getattr(kind, name) is not getattr(Summarized, name), (kind, name)


def test_a_batch_is_a_short_line(fragment: Fragment) -> None:
    batch = loaded(fragment)
    text = repr(batch)
    assert text.startswith("Batch(1 fragments, obs: float32[1, ")
    assert len(text) < 600, text
    assert "\n" not in text
    assert repr(batch.stacked).startswith("Stack(")
    assert len(repr(batch.stacked)) < 600
    assert "obs: float32[1, " in repr(training_batch(batch))


def test_tensors_elsewhere_say_where() -> None:
    tensor = torch.zeros(2, 3, device="meta", dtype=torch.bfloat16)
    assert "X(obs: bfloat16[2, 3] on meta)" == summary("X", [], {"obs": tensor})
    assert "X(obs: bool[2])" == summary("X", [], {"obs": torch.zeros(2, dtype=torch.bool)})


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (None, "X()"),
        ({}, "X()"),
        ({1: np.zeros(2)}, "X(obs.1: float64[2])"),
        ((np.float32(1.0), [None, "text"]), "X(obs[0]: float32[], obs[1][1]: str)"),
        ([0] * 1000, f"X({', '.join(f'obs[{i}]: int' for i in range(LEAVES_MAX))}, ...)"),
    ],
)
def test_whatever_is_in_a_tree_is_shown(tree: Any, expected: str) -> None:
    assert expected == summary("X", [], {"obs": tree})


def test_a_grant_and_an_offline_batch_are_short(fragment: Fragment) -> None:
    references = loaded(fragment).references * 1000
    grant = LeaseGrant("lease-1", 9.5, references, "run", 3, "request")
    assert len(repr(grant)) < 200
    assert "lease-1" in repr(grant)
    batch = OfflineBatch(modules={"p": {"obs": np.zeros((5, 2), np.float32)}}, env_step_count=5)
    assert "OfflineBatch(5 environment steps, p.obs: float32[5, 2])" == repr(batch)


def test_in_a_notebook_a_batch_is_a_table_of_paths_types_and_shapes(fragment: Fragment) -> None:
    fragment.extras = {"<b>": np.zeros((4, 2), np.uint8)}
    batch = loaded(fragment)
    table = batch._repr_html_()
    assert "<caption>Batch: 1 fragments</caption>" in table
    assert "<tr><td>obs</td><td>float32</td><td>[1, 4, 3]</td></tr>" in table
    assert "<td>extras.&lt;b&gt;</td>" in table, "what others named is no markup"
    assert "<td>extras.&lt;b&gt;</td>" in fragment._repr_html_()


def test_a_table_of_many_rows_ends_with_an_ellipsis() -> None:
    rows = [(number, "x") for number in range(LEAVES_MAX + 5)]
    table = html_table("T", ("number", "letter"), rows)
    assert LEAVES_MAX + 2 == table.count("<tr>")
    assert table.endswith("<tr><td>...</td><td></td></tr></table>")


def test_a_lease_is_a_table_of_its_fragments(fragment: Fragment) -> None:
    reference = loaded(fragment).references[0]
    grant = LeaseGrant("lease-1", 9.5, (reference,) * 2, "run", 3, "request")
    lease = Granted(SimpleNamespace(context=OperationWorld().context), "default", grant)
    assert "Lease: 2 fragments of session &#x27;run&#x27; at version 3, open" in lease._repr_html_()
    assert 2 == lease._repr_html_().count("<td>w</td>")


def test_a_reference_is_a_short_line(fragment: Fragment) -> None:
    (reference,) = loaded(fragment).references
    expected = (
        "FragmentReference('w' #0 of 's', 4 steps, versions 0 to 0, staleness 0, chunk 0, use 1)"
    )
    assert expected == repr(reference)
