"""An append costs as much where many positions are kept as where few are (B31)."""

import random
from collections.abc import Callable

from breadbox_server.core.buffers import DEFAULT_BUFFER as B
from breadbox_server.core.buffers import BufferSet
from breadbox_server.core.model.config import BufferConfig, FullPolicy, SchemaPolicy
from breadbox_server.core.model.ids import (
    FragmentIndex,
    ModelVersion,
    PayloadId,
    SessionId,
    WorkerId,
)
from breadbox_server.core.model.inputs import (
    AdmissionOutcome,
    AppendFragments,
    Fragment,
    Offer,
    Payload,
    WaitForRoom,
)
from support import growth
from support.inputs import start_session

pytestmark = growth.marked


def first_of(number: int) -> Fragment:
    return Fragment(
        WorkerId(f"w{number}"),
        FragmentIndex(0),
        SessionId("s"),
        ModelVersion(0),
        ModelVersion(0),
        Payload(PayloadId(f"{number:032x}"), 1),
    )


def test_an_append_is_offered_without_a_look_at_positions_that_are_kept() -> None:
    """As when very many producers waited in vain, and come again one by one."""

    def among(kept_count: int) -> Callable[[], object]:
        config = BufferConfig(
            fragments_per_chunk=1,
            capacity_chunks=1,
            full_policy=FullPolicy.BLOCK,
            schema=SchemaPolicy.ANY,
        )
        buffers = BufferSet(random.Random(0), config)
        buffers.apply(start_session("s", buffer=B), now=0.0)
        buffers.apply(AppendFragments(B, [first_of(0)]), now=0.0)
        for number in range(kept_count):
            waiting = first_of(1 + number)
            buffers.apply(WaitForRoom(B, waiting, AdmissionOutcome.BUFFER_FULL, 1.0), now=0.0)
        buffers.handle_timer(now=1.0)
        offers = [Offer(B, [first_of(2**20 + number)]) for number in range(500)]

        def append() -> None:
            for offer in offers:
                buffers.apply(offer, now=1.0)
            list(buffers.call_up(now=1.0))

        return append

    growth.check(among, 8_000, growth_max=2.5)
