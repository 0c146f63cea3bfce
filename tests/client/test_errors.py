"""Errors go from one process to another as they are: pools and data loaders raise them again."""

import copy
import inspect
import pickle  # noqa: TID251 - pools use it
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from breadbox.model import errors
from breadbox.model.types import AdmissionOutcome, AppendResult

KINDS = [
    kind
    for _, kind in sorted(inspect.getmembers(errors, inspect.isclass))
    if issubclass(kind, errors.ReplayBufferError)
]


def made(kind: type[errors.ReplayBufferError]) -> errors.ReplayBufferError:
    """One whose arguments say which they are."""
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    wanted = [
        each
        for each in parameters
        if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
    ]
    numbers = {int: 3, float: 2.5}
    error = kind(*[numbers.get(each.annotation, each.name) for each in wanted])
    error.request_id = "r7"
    error.add_note("gave up")
    return error


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.__name__))
@pytest.mark.parametrize("again", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_an_error_that_is_made_again_has_its_class_text_fields_and_notes(
    kind: type[errors.ReplayBufferError],
    again: Callable[[errors.ReplayBufferError], errors.ReplayBufferError],
) -> None:
    error = made(kind)
    another = again(error)
    assert type(another) is kind
    assert (str(another), another.args) == (str(error), error.args)
    assert another.__dict__ == error.__dict__
    assert another.__notes__ == ["gave up"]


def fail() -> None:
    error = errors.BackpressureError("no room", 2.5)
    error.results = (AppendResult(AdmissionOutcome.BUFFER_FULL),)
    raise error


def test_a_pool_raises_what_its_process_raised() -> None:
    with (
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool,
        pytest.raises(errors.BackpressureError, match="no room") as raised,
    ):
        pool.submit(fail).result(60)
    assert raised.value.retry_delay_s == 2.5
    assert raised.value.results == (AppendResult(AdmissionOutcome.BUFFER_FULL),)
