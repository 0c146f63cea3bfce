"""Parts, rows and claims: what is refused, listed, found and lacking."""

import json
from dataclasses import replace
from typing import Any

import pytest

from breadbox_server.core.buffers import DEFAULT_BUFFER as B
from breadbox_server.core.lacking import Wanted
from breadbox_server.core.model.config import AssemblyPolicy, BufferConfig
from breadbox_server.core.model.errors import InvalidArgumentError
from breadbox_server.core.model.ids import BufferName, PayloadId, RequestId, WorkerId
from breadbox_server.core.model.inputs import (
    AdmissionOutcome,
    AppendFragments,
    DropMembers,
    Fetch,
    Fragment,
    Offer,
    Payload,
    Settle,
)
from breadbox_server.core.model.lazy_heap import WASTE_MIN
from breadbox_server.core.model.validation import check_fragment
from core.test_parts import order_sizes
from core.test_rows_simulated import Rows
from support.inputs import publish_model

NO_PAYLOAD = Payload(PayloadId(""), 0, 0)
ADMITTED = AdmissionOutcome.ADMITTED
ROWS: dict[str, Any] = {"assembly": AssemblyPolicy.GROUPS, "fragments_per_chunk": 0}


def world(**limits: Any) -> Rows:
    return Rows(0, BufferConfig(**(ROWS | limits)))


def attach(it: Rows, *fragments: Fragment) -> list[AdmissionOutcome]:
    answers = it.buffers.apply(AppendFragments(B, list(fragments)), now=0.0)
    return [each.outcome for each in answers]


def part(it: Rows, group: str, name: str, member: int = 0, **fields: Any) -> Fragment:
    made = it.part((group, member), name, schema_hash=1, replaces=False)
    return replace(made, **({"numbers": ""} | fields))


def test_rows_are_listed_by_prefix_and_found_by_key() -> None:
    it = world()
    assert [ADMITTED] * 3 == attach(
        it, part(it, "a-1", "ids"), part(it, "a-2", "ids"), part(it, "b", "ids")
    )
    held = it.buffers[B]
    assert ["a-1", "a-2"] == [each.group for each in held.members("a-", ("", -1), 9)]
    assert ["a-2"] == [each.group for each in held.members("a-", ("a-1", 0), 9)]
    assert ["ids"] == [each.part for each in held.parts(WorkerId("b"), 0, ()) or ()]
    assert [] == held.parts(WorkerId("b"), 0, ("other",))
    assert held.parts(WorkerId("c"), 0, ()) is None
    assert 0 == it.buffers.apply(DropMembers(B, (WorkerId("c"),), (0,)), now=0.0)
    keys = [(WorkerId("b"), 0), (WorkerId("c"), 0), (WorkerId("a-1"), 0), (WorkerId("b"), 1)]
    assert ["b", "a-1"] == [each.group for each in held.members_by_key(keys)]
    assert ("", "") == (
        it.buffers.tag(BufferName("none")),
        it.buffers.tag(B),
    )


def test_members_that_lack_a_part_are_found_with_what_they_have() -> None:
    it = world(fragments_per_chunk=4, required_parts="tokens,reward")
    attach(it, it.tokens(("g", 0)), it.tokens(("g", 1)), part(it, "g", "reward", 1))
    attach(it, part(it, "g", "score", 2))
    held = it.buffers[B]

    def found(count: int = 9, part: str = "reward") -> list[int]:
        taken = held.claim(Wanted(part), count, lambda _: True, lambda _: False)
        members = [int(each[0].fragment.fragment_index) for each in taken]
        held.end_claim([(WorkerId("g"), member) for member in members])
        return members

    assert ([0], [0, 1], [0], []) == (found(), found(part="x"), found(1, "x"), found(0))
    none = Wanted("reward", ("h",))
    assert [] == held.claim(none, 9, lambda _: False, lambda _: False)
    for name in ("", "tokens", "a\n"):
        with pytest.raises(InvalidArgumentError, match="lacking"):
            found(part=name)


def test_a_buffer_without_groups_has_no_members_and_takes_no_parts() -> None:
    it = world(assembly=AssemblyPolicy.CONSECUTIVE, fragments_per_chunk=1)
    held = it.buffers[B]
    assert [] == held.members("", ("", -1), 9) == held.members_by_key([(WorkerId("w"), 0)])
    assert held.parts(WorkerId("w"), 0, ()) is None
    with pytest.raises(InvalidArgumentError, match="`assembly` groups"):
        held.claim(Wanted("reward"), 1, lambda _: True, lambda _: False)
    held.end_claim([(WorkerId("w"), 0)])
    assert (0, True) == (held.claimed_count, it.buffers.has_more_to_claim(B))
    with pytest.raises(InvalidArgumentError, match="`assembly` groups"):
        attach(it, part(it, "g", "ids"))
    with pytest.raises(InvalidArgumentError, match="keeps no rows"):
        it.buffers.apply(DropMembers(B, (WorkerId("g"),), (0,)), now=0.0)


def test_too_much_of_a_member_is_refused() -> None:
    it = world()
    attach(it, *[part(it, "g", f"p{n}") for n in range(64)])
    with pytest.raises(InvalidArgumentError, match="is one of 65"):
        attach(it, part(it, "g", "more"))
    attach(it, part(it, "n", "a", numbers='{"a":1}'))
    many = json.dumps({f"n{number}": 1 for number in range(16)})
    with pytest.raises(InvalidArgumentError, match="are 17"):
        attach(it, part(it, "n", "b", numbers=many))
    grouped = world(fragments_per_chunk=2)
    with pytest.raises(InvalidArgumentError, match="is for buffers of rows"):
        attach(grouped, part(grouped, "g", "ids", replaces=True))
    fetch = Fetch(B, request_id=RequestId("r"), fragment_count=1, deadline_at=1.0)
    with pytest.raises(InvalidArgumentError, match="keeps rows"):
        it.buffers.apply(fetch, now=0.0)


@pytest.mark.parametrize("names", ["reward", "tokens,tokens", "tokens,", "tokens," + "x" * 65])
def test_required_parts_are_different_names_with_tokens(names: str) -> None:
    with pytest.raises(InvalidArgumentError, match="required_parts"):
        BufferConfig(assembly=AssemblyPolicy.GROUPS, required_parts=names)


def test_required_parts_are_of_groups_that_close() -> None:
    with pytest.raises(InvalidArgumentError, match="is for `assembly` groups"):
        BufferConfig(required_parts="tokens,reward")


def test_parts_are_checked() -> None:
    it = world()
    fields = {"model_version_min": 0, "model_version_max": 0, "step_count": 1}
    check_fragment(part(it, "g", "ids", **fields))
    alone = part(it, "g", "", numbers='{"a":1}', session_id="", **fields)
    check_fragment(replace(alone, payload=NO_PAYLOAD))
    for name, problem in {
        "tokens": "cannot be",
        "x" * 65: "at most 64",
        "a\n": "printable",
    }.items():
        with pytest.raises(InvalidArgumentError, match=problem):
            check_fragment(part(it, "g", name, **fields))


def test_a_silent_group_is_delivered_with_its_complete_members_and_drops_the_rest() -> None:
    it = world(fragments_per_chunk=4, group_min=1, required_parts="tokens,reward", open_chunk_s=1.0)
    attach(it, it.tokens(("g", 0)), part(it, "g", "reward", 0), it.tokens(("g", 1)))
    it.buffers.handle_timer(now=2.0)
    assert [("g", "partial", 2)] == [
        (each.group, each.reason.value, each.member_count)
        for each in it.buffers[B].group_ends(0, 9)
    ]
    counters = it.buffers.describe(B, now=2.0).counters
    assert (1, 1) == (counters["groups_partial"], counters["fragments_discarded_worker_silent"])
    assert [(0, ""), (0, "reward")] == [each.key for each in it.buffers[B].fragments()]


def test_a_replacing_part_that_changes_a_number_to_a_flag_is_no_duplicate() -> None:
    """Python takes 1 for True, and NaN for no NaN."""
    it = world()
    attach(it, part(it, "g", "ids", numbers='{"a":1,"b":NaN}'))

    def replaced(numbers: str) -> list[AdmissionOutcome]:
        return attach(it, part(it, "g", "ids", numbers=numbers, replaces=True))

    assert [AdmissionOutcome.DUPLICATE] == replaced('{"b": NaN, "a": 1}')
    assert [ADMITTED] == replaced('{"a":true}')
    (member,) = it.buffers[B].members("", ("", -1), 9)
    assert '{"a":true,"b":NaN}' == member.numbers


def test_a_sequence_never_replaces_another() -> None:
    it = world()
    attach(it, it.tokens(("g", 0)))
    again = replace(it.tokens(("g", 0)), replaces=True)
    assert [AdmissionOutcome.DUPLICATE] == attach(it, again)


def test_rows_that_come_and_go_beside_one_that_stays_leave_nothing_in_any_order() -> None:
    it = world()
    attach(it, it.tokens(("g", 0)))
    it.buffers.apply(publish_model(5, session_id="s", buffer=B), now=0.0)
    attach(it, it.tokens(("h", 0), 5))
    for _ in range(500):
        assert [ADMITTED] == attach(it, it.tokens(("h", 1), 0))
        assert 1 == it.buffers.apply(DropMembers(B, (WorkerId("h"),), (1,)), now=0.0)
    (size,) = order_sizes(it.buffers[B]._state.assembly)  # noqa: SLF001 - no public way
    assert size <= 2 * 2 + WASTE_MIN
    it.buffers.check_invariants()


def test_numbers_that_are_settled_leave_what_is_reserved_of_their_member() -> None:
    it = world(fragments_per_chunk=1, required_parts="tokens")
    numbers, sequence = part(it, "g", "", numbers='{"a":1}'), it.tokens(("g", 0))
    numbers.payload = replace(numbers.payload, size_bytes=0)
    first, second = (it.buffers.apply(Offer(B, [each]), now=0.0) for each in (numbers, sequence))
    for offered in (first, second):
        assert offered.reservation_id is not None
        it.buffers.check_invariants()
        settle = Settle(B, offered.reservation_id, [True])
        (answer,) = it.buffers.apply(settle, now=0.0)
        assert answer is not None
        assert ADMITTED is answer.outcome
