"""The specification of the core: random inputs, a naive model beside, all invariants after each.

Hypothesis explores short histories and shrinks what it finds; the random walks are long, so that
books grow old, windows roll over and sessions follow each other.
"""

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from breadbox_server.core.model.inputs import ReleaseMode
from breadbox_server.core.state import buffer_state as state
from breadbox_server.core.state.holdings import ChunkHoldings
from breadbox_server.core.state.room import Room
from breadbox_server.core.state.room_queue import RoomQueue
from core.buffer_machine import PRIORITIES, WORKERS, BufferMachine, make_config
from core.naive_groups import NaiveGroups
from support.tiers import long_but

SETTINGS = settings(
    max_examples=250,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
WALK_COUNT = 24
WALK_LENGTH = 1000


class ForgetfulHoldings(ChunkHoldings):
    """A broken variant: what is given back never returns to the table."""

    def end_leases(self, chunks: Any, uses_max: int, obstacle: Any) -> None:
        for chunk in chunks:
            super().end_leases([chunk], chunk.use_count, obstacle)


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "ChunkHoldings", ForgetfulHoldings)


@pytest.mark.parametrize("example_count", long_but(1, (80, SETTINGS.max_examples)))
def test_buffer_keeps_its_rules_under_any_sequence_of_inputs(example_count: int) -> None:
    some = settings(SETTINGS, max_examples=example_count)
    run_state_machine_as_test(BufferMachine, settings=some)


@pytest.mark.parametrize("seed", long_but(8, range(WALK_COUNT)))
def test_buffer_keeps_its_rules_on_a_long_walk(seed: int) -> None:
    walk(BufferMachine(), seed, WALK_LENGTH)


@pytest.mark.usefixtures("forgetful")
def test_a_buffer_that_forgets_what_is_given_back_is_found() -> None:
    """The net has no hole of this size: the same test on a broken variant fails."""
    quick = settings(SETTINGS, phases=[Phase.generate])
    # A KeyError where the forgotten chunk is that of a group, which was forgotten with it.
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(BufferMachine, settings=quick)


@pytest.mark.usefixtures("forgetful")
def test_a_buffer_that_forgets_what_is_given_back_is_found_on_a_walk() -> None:
    def take_walks() -> None:
        for seed in range(WALK_COUNT):
            walk(BufferMachine(), seed, WALK_LENGTH)

    with pytest.raises(AssertionError):
        take_walks()


class LooseRoom(Room):
    """A broken variant: reserved places are free for others."""

    def add(self, reservation: Any, run: Any, open_count: Any = None) -> None:
        before = self.place_count, reservation.place_count
        super().add(reservation, run, open_count)
        self.place_count, reservation.place_count = before


class PushyQueue(RoomQueue):
    """A broken variant: a caller that comes again goes to the end."""

    def keep(self, position: Any, until: float) -> None:
        super().remove(position)


class BlindQueue(RoomQueue):
    """A broken variant: late appends do not see those that wait."""

    def waits_for(self) -> None:
        return None


@pytest.mark.parametrize(
    "broken", [LooseRoom, PushyQueue, BlindQueue], ids=lambda each: each.__name__
)
def test_broken_room_is_found_on_a_walk(broken: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, broken.__base__.__name__, broken)

    def take_walks() -> None:
        for seed in range(WALK_COUNT):
            walk(BufferMachine(), seed, WALK_LENGTH)

    with pytest.raises((AssertionError, StopIteration)):
        take_walks()


def walk(machine: BufferMachine, seed: int, length: int) -> None:
    """Take random steps, most of them such as healthy callers take."""
    rng = random.Random(seed)
    choose = rng.choice
    machine.begin(make_config(choose), [rng.randrange(8) for _ in WORKERS])

    def pick() -> int:
        return rng.randrange(1000)

    steps: dict[str, tuple[int, Any]] = {
        "run": (24, lambda: machine.append_run(choose(WORKERS), choose([1, 3, 6]), choose([1, 2]))),
        "append": (
            10,
            lambda: machine.append(
                choose(WORKERS),
                choose([0, 0, 0, 1, 2, 9, -1, -2, -9]),
                choose([0, 0, 1, 2, 3, -1]),
                choose([0, 1]),
                choose([1, 2, 4]),
                choose([False, False, True]),
                choose([None, None, None, None, "s0"]),
                choose([1.0, 0.0, 0.25, 9.0]),
            ),
        ),
        "offer": (
            14,
            lambda: machine.offer_together(
                [choose(WORKERS) for _ in range(choose([1, 2, 5]))],
                [choose([0, 0, 0, 0, 1, -1]) for _ in range(6)],
                choose([0, 0, 1, 9]),
                choose([1, 2]),
                pick(),
                choose([1.0, 30.0]),
                choose([False, False, False, True]),
            ),
        ),
        "settle": (
            18,
            lambda: (
                machine.reservations
                and machine.settle(pick(), {pick() % 6 for _ in range(choose([0, 0, 1, 2]))})
            ),
        ),
        "tickets": (
            6,
            lambda: machine.take_tickets(choose([1, 1, 2]), choose([0.0, 2.0]), choose([1.0, 9.0])),
        ),
        "of tickets": (
            20,
            lambda: (
                isinstance(machine.model, NaiveGroups)
                and machine.append_to_ticket(pick(), choose([0, 1, 2]), choose([0, 0, 0, 1, 3]))
            ),
        ),
        "give back": (
            4,
            lambda: (
                isinstance(machine.model, NaiveGroups)
                and machine.give_back_ticket(pick(), choose([None, 0, 1, 2]))
            ),
        ),
        "renew a ticket": (
            3,
            lambda: (
                isinstance(machine.model, NaiveGroups)
                and machine.renew_ticket(pick(), choose([None, 2.0]))
            ),
        ),
        "tickets again": (
            2,
            lambda: (
                isinstance(machine.model, NaiveGroups)
                and machine.model.tickets
                and machine.take_tickets_again(pick())
            ),
        ),
        "cancel tickets": (
            1,
            lambda: (
                isinstance(machine.model, NaiveGroups)
                and machine.model.ticket_waiters
                and machine.cancel_tickets(pick())
            ),
        ),
        "call up": (
            10,
            lambda: machine.model.line and machine.call_up(pick(), choose([1.0, 30.0])),
        ),
        "leave": (
            4,
            lambda: machine.callers_in_line and machine.leave(pick(), choose([True, False])),
        ),
        "come again": (
            4,
            lambda: (
                machine.model.line
                and machine.come_again(pick(), choose([0.5, 2.0, 20.0]), choose([True, False]))
            ),
        ),
        "priorities": (
            8,
            lambda: machine.update_priorities(
                [(pick(), choose(PRIORITIES[:-2])) for _ in range(choose([1, 4]))],
                [pick() for _ in range(choose([0, 0, 2]))],
            ),
        ),
        "taken": (
            1,
            lambda: machine.model.payload_ids() and machine.append_payload_in_use(pick()),
        ),
        "fetch": (
            20,
            lambda: machine.fetch(
                choose([1, 1, 1, 2, 3]), choose([1, 1, 2]), choose([0.0, 4.0]), choose([None, 3.0])
            ),
        ),
        "learn": (6, lambda: machine.learn(choose([1, 1, 2]), choose(list(ReleaseMode)))),
        "again": (
            8,
            lambda: (
                machine.request_count
                and machine.fetch_again(
                    pick(), choose([0, 1]), choose([0.0, 2.0]), choose([0, 0, 0, 0, 1])
                )
            ),
        ),
        "cancel": (4, lambda: machine.model.waiters and machine.cancel(pick())),
        "release": (
            16,
            lambda: machine.told_leases and machine.release(pick(), choose(list(ReleaseMode))),
        ),
        "renew": (4, lambda: machine.told_leases and machine.renew(pick(), choose([None, 0.5, 6]))),
        "undo": (3, lambda: machine.told_leases and machine.report_undelivered(pick())),
        "publish": (
            8,
            lambda: machine.publish(
                choose([None, None, None, "s0"]), choose([0, 1, 1, 1, 2, -1]), choose([True, False])
            ),
        ),
        "session": (
            2,
            lambda: machine.change_session(
                choose(["repeat", "new", "ended", "end", "end and new", "end and new"])
            ),
        ),
        "drop": (3, lambda: machine.drop_payloads([pick() for _ in range(choose([0, 1, 3]))])),
        "update": (2, lambda: machine.update(make_config(choose), choose([True, False]))),
        "snapshot": (1, machine.take_snapshot),
        "crash": (2, lambda: machine.crash_and_recover(choose([True, False, False]))),
        "time": (
            8,
            lambda: machine.advance(choose([0.25, 1.0, 3.0, 10.0]), is_late=choose([True, False])),
        ),
    }
    names = list(steps)
    weights = [weight for weight, _ in steps.values()]
    claims = random.Random(seed)
    for name in rng.choices(names, weights, k=length):
        steps[name][1]()
        # A claim changes nothing else, and no walk is another for it.
        if isinstance(machine.model, NaiveGroups) and claims.random() < 0.05:
            machine.claim(claims.randrange(3), claims.choice([0, 0, 1, 9]))
        machine.nothing_is_lost_or_left()
        machine.looks_like_the_model()
    machine.teardown()
