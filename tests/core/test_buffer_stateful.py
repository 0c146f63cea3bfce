"""The specification of the core: random inputs, a naive model beside, all invariants after each."""

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from breadbox_server.core.buffers import DEFAULT_BUFFER, BufferSet
from breadbox_server.core.config import BufferConfig
from breadbox_server.core.holdings import Holdings
from core.buffer_machine import BufferMachine

SETTINGS = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


class ForgetfulHoldings(Holdings):
    """A broken variant: what is given back never returns to the table."""

    def end_lease(self, chunk: Any, uses_max: int, obstacle: Any) -> None:
        super().end_lease(chunk, chunk.use_count, obstacle)


class BrokenMachine(BufferMachine):
    def make_buffers(self, config: BufferConfig) -> BufferSet:
        buffers = super().make_buffers(config)
        buffers._buffers[DEFAULT_BUFFER]._state.holdings.__class__ = ForgetfulHoldings
        return buffers


def test_buffer_keeps_its_rules_under_any_sequence_of_inputs() -> None:
    run_state_machine_as_test(BufferMachine, settings=SETTINGS)


def test_a_buffer_that_forgets_what_is_given_back_is_found() -> None:
    """The net has no hole of this size: the same test on a broken variant fails."""
    quick = settings(SETTINGS, phases=[Phase.generate])
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(BrokenMachine, settings=quick)
