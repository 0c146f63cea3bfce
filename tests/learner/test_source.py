"""Batches under leases: what is held, given back, left out, and refused."""

import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from breadbox.model.errors import (
    InvalidRequestError,
    LeaseExpiredError,
    PayloadCorruptError,
    SessionEndedError,
    WaitElapsedError,
)
from breadbox.model.fragment import Fragment
from breadbox.model.types import (
    ArrayType,
    FragmentMetadata,
    FragmentReference,
    LeaseGrant,
    PayloadReference,
    ReleaseMode,
)
from breadbox.payload import describe_arrays
from breadbox.reading.batches import Batch, Stack, load_batch
from breadbox_learner.spaces import Spaces
from breadbox_learner.training.fitting import WARNINGS_MAX, Fitting, Misfit, expected_rows
from breadbox_learner.training.source import (
    FAILED_LOADS_MAX,
    FetchedBatch,
    LeaseSource,
    Share,
    UnusableShareError,
)
from support.clock import ManualClock
from support.fake_store import FakeStore
from support.references import references
from support.rich_fragments import STEPS, plain_fragment, stored


class FakeLease:
    """Notes how it ended."""

    def __init__(self, client: "FakeClient", number: int, request_id: str) -> None:
        self.client = client
        reference = FragmentReference(
            FragmentMetadata(
                worker_id="w",
                fragment_index=number,
                session_id=client.session_id,
                model_version_min=0,
                model_version_max=0,
                payload=PayloadReference(f"{number:032x}", 1),
                step_count=2,
            ),
            chunk_id=number,
            staleness_when_granted=1,
            use_count=1,
        )
        self.references: tuple[FragmentReference, ...] = (reference,)
        self.grant = LeaseGrant(
            str(number), 60.0, self.references, client.session_id, client.version, request_id
        )
        self.ended: ReleaseMode | None = None
        self.refused: list[str] = []

    def __enter__(self) -> "FakeLease":
        return self

    def unreadable(self) -> list[str]:
        return []  # Read once more, it can be read.

    def refuse(self, payload_ids: list[str]) -> None:
        self.refused += payload_ids

    def release(self, mode: ReleaseMode) -> None:
        assert self.ended is None, "released twice"
        self.ended = mode
        if self.client.expired:
            raise LeaseExpiredError("1")


class FakeClient:
    """Grants a fragment at once, or makes a fetch wait; loads it, or fails to."""

    def __init__(self) -> None:
        self.session_id = "run"
        self.version = 1
        self.leases: list[FakeLease] = []
        self.requests: list[tuple[str, int, int]] = []
        self.waits = 0
        self.failing: set[int] = set()
        self.expired = False

    def fetch(
        self, count: int, wait_s: float, *, rank: int, world_size: int, request_id: str
    ) -> FakeLease:
        self.requests.append((request_id, rank, world_size))
        if self.waits:
            self.waits -= 1
            raise WaitElapsedError(wait_s, "0 of 1 chunks are there")
        self.leases.append(FakeLease(self, len(self.leases), request_id))
        return self.leases[-1]

    def load_batch(
        self, references: tuple[FragmentReference, ...], *, device: str, into: Stack | None
    ) -> Batch:
        number = references[0].metadata.fragment_index
        if number in self.failing:
            raise PayloadCorruptError(f"payload {number} is damaged")
        flags = np.zeros((1, 2), np.bool_)
        return Batch(
            references=references,
            obs=np.zeros((1, 2, 1), np.float32),
            action=np.zeros((1, 2), np.int64),
            reward=np.zeros((1, 2), np.float32),
            terminated=flags,
            truncated=flags,
            first=flags,
            episode_id=np.zeros((1, 2), np.int64),
            next_obs=np.zeros((1, 1), np.float32),
        )

    @property
    def ends(self) -> list[ReleaseMode | None]:
        return [lease.ended for lease in self.leases]


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture
def make_source(client: FakeClient) -> Iterator[Callable[..., LeaseSource]]:
    made: list[LeaseSource] = []

    def make(**options: Any) -> LeaseSource:
        made.append(LeaseSource(client, fragment_count=1, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for source in made:
        source.close()


def never() -> bool:
    return False


def test_a_lease_lives_until_its_batch_is_released(
    client: FakeClient, make_source: Callable[..., LeaseSource]
) -> None:
    source = make_source()
    first, second = source.next(never), source.next(never)
    assert first is not None
    assert second is not None
    assert [None, None] == client.ends
    first.release(True)
    second.release(False)
    assert [ReleaseMode.CONSUMED, ReleaseMode.RETURNED] == client.ends
    assert ([1], [1]) == (first.staleness, first.use_count)


def test_closing_gives_back_what_was_fetched_ahead_and_what_was_not_released(
    client: FakeClient, make_source: Callable[..., LeaseSource]
) -> None:
    source = make_source(prefetch_batches=3)
    trained, held = source.next(never), source.next(never)
    assert trained is not None
    assert held is not None
    trained.release(True)
    source.close()
    assert client.ends[0] is ReleaseMode.CONSUMED
    assert {ReleaseMode.RETURNED} == set(client.ends[1:])
    source.close()


def test_waiting_repeats_the_request_and_tells_the_reason(
    client: FakeClient, make_source: Callable[..., LeaseSource]
) -> None:
    client.waits = 2
    looked: list[Any] = []
    source = make_source(while_waiting=lambda: looked.append(None), share=Share(1, 4, "nonce"))
    fetched = source.next(never)
    assert fetched is not None
    assert "0 of 1 chunks are there" == fetched.waiting_reason
    assert [("nonce-0-0", 1, 4)] * 3 == client.requests
    assert 2 == len(looked)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_long_wait_is_told_once_for_each_reason_by_one_of_all_ranks(
    client: FakeClient,
    make_source: Callable[..., LeaseSource],
    caplog: pytest.LogCaptureFixture,
    rank: int,
) -> None:
    caplog.set_level(logging.INFO)
    clock = ManualClock()
    client.waits = 25
    source = make_source(
        while_waiting=lambda: clock.advance(1.0), clock=clock, share=Share(rank, 2, "nonce")
    )
    assert source.next(never) is not None
    told = ["waiting for workers to fill a batch: 0 of 1 chunks are there"]
    assert told * (rank == 0) == caplog.messages


def test_it_stops_waiting_when_told(
    client: FakeClient, make_source: Callable[..., LeaseSource]
) -> None:
    client.waits = 1000
    answers = iter([False, False, True])
    assert make_source().next(lambda: next(answers)) is None
    assert 2 == len(client.requests)


def test_a_batch_that_cannot_be_loaded_is_left_out_and_poisons_nothing(
    client: FakeClient, make_source: Callable[..., LeaseSource]
) -> None:
    client.failing = {0, 2}
    source = make_source()
    got = [source.next(never), source.next(never)]
    assert [[1], [3]] == [fetched.batch.fragment_indices for fetched in got if fetched]
    # Counted as used: given back, it would be served, and fail, again.
    assert [ReleaseMode.CONSUMED, None, ReleaseMode.CONSUMED, None] == client.ends


def test_loads_that_keep_failing_end_the_run(
    client: FakeClient, make_source: Callable[..., LeaseSource]
) -> None:
    client.failing = set(range(100))
    with pytest.raises(PayloadCorruptError):
        make_source().next(never)
    assert FAILED_LOADS_MAX + 1 == len(client.leases)


def test_a_rank_says_that_its_share_cannot_be_loaded_and_goes_on(
    client: FakeClient, make_source: Callable[..., LeaseSource]
) -> None:
    """With the next draw, not with another of its own: the others would wait for ever."""
    client.failing = {0, 2}
    source = make_source(share=Share(0, 2, "nonce"))
    for number in (1, 3):
        with pytest.raises(UnusableShareError) as left_out:
            source.next(never)
        assert 0 == left_out.value.misfit_count
        fetched = source.next(never)
        assert fetched is not None
        assert [number] == fetched.batch.fragment_indices
    assert [f"nonce-{number}-0" for number in range(4)] == [id_ for id_, _, _ in client.requests]
    assert [ReleaseMode.CONSUMED, None, ReleaseMode.CONSUMED, None] == client.ends


def test_shares_that_keep_failing_to_load_end_the_run_of_a_rank(
    client: FakeClient, make_source: Callable[..., LeaseSource]
) -> None:
    client.failing = set(range(100))
    source = make_source(share=Share(0, 2, "nonce"))
    for _ in range(FAILED_LOADS_MAX):
        with pytest.raises(UnusableShareError):
            source.next(never)
    with pytest.raises(PayloadCorruptError):
        source.next(never)


def test_fragments_of_another_session_are_refused_and_given_back(
    client: FakeClient, make_source: Callable[..., LeaseSource]
) -> None:
    client.session_id = "another"
    source = make_source(session_id="run")
    with pytest.raises(SessionEndedError, match="another run has started 'another'"):
        source.next(never)
    source.close()
    assert [ReleaseMode.RETURNED] == client.ends


def test_a_lease_that_expired_while_training_does_not_end_the_run(
    client: FakeClient, make_source: Callable[..., LeaseSource]
) -> None:
    client.expired = True
    fetched = make_source().next(never)
    assert fetched is not None
    fetched.release(True)
    assert [ReleaseMode.CONSUMED] == client.ends


def test_request_ids_differ_between_runs(
    client: FakeClient, make_source: Callable[..., LeaseSource]
) -> None:
    make_source().next(never)
    make_source().next(never)
    assert 2 == len({request_id for request_id, _, _ in client.requests})


# Memory ------------------------------------------------------------------------------------------


class StoreClient(FakeClient):
    """Grants fragments of a store, two at a time; fragment i observes nothing but i."""

    def __init__(self) -> None:
        super().__init__()
        self.store = FakeStore()
        self.references = stored(
            self.store,
            *(
                plain_fragment(index, obs=np.full((STEPS, 3), index), next_obs=np.zeros(3))
                for index in range(10)
            ),
        )

    def load_batch(
        self, references: tuple[FragmentReference, ...], *, device: str, into: Stack | None
    ) -> Batch:
        number = references[0].metadata.fragment_index
        some = [self.references[(number + more) % 10] for more in (0, 1)]
        batch = load_batch(self.store, some, device=device, into=into)
        if number in self.failing:  # As late as can be, with half of the memory written.
            raise PayloadCorruptError(f"payload {number} is damaged")
        return batch


def is_whole(fetched: FetchedBatch) -> bool:
    """Whether a batch still holds what it held when it came."""
    wanted = [[float(index)] * STEPS * 3 for index in fetched.batch.fragment_indices]
    return wanted == fetched.batch.obs.flatten(1).tolist()


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_a_run_allocates_for_the_batches_it_holds_at_a_time_and_no_more(prefetch: int) -> None:
    client = StoreClient()
    client.failing = {5, 20}
    source = LeaseSource(
        client,  # type: ignore[arg-type]
        fragment_count=2,
        prefetch_batches=prefetch,
    )
    # All are kept alive, so that no address can come again but by being used again.
    seen: dict[str, list[torch.Tensor]] = {"obs": [], "reward": []}
    for _ in range(40):
        fetched = source.next(never)
        assert fetched is not None
        assert is_whole(fetched)
        for name, tensors in seen.items():
            tensors.append(getattr(fetched.batch, name))
        fetched.release(True)
    source.close()
    for name, tensors in seen.items():
        assert len({tensor.data_ptr() for tensor in tensors}) <= prefetch + 1, name


@pytest.mark.parametrize("prefetch", [0, 2])
def test_no_batch_is_written_over_before_it_is_released(prefetch: int) -> None:
    source = LeaseSource(
        StoreClient(),  # type: ignore[arg-type]
        fragment_count=2,
        prefetch_batches=prefetch,
    )
    rng = random.Random(prefetch)
    held: list[FetchedBatch] = []
    for _ in range(60):
        fetched = source.next(never)
        assert fetched is not None
        held.append(fetched)
        assert [True] * len(held) == [is_whole(each) for each in held]
        assert len(held) == len({each.batch.obs.data_ptr() for each in held})
        while len(held) > rng.randint(0, 3):
            held.pop(rng.randrange(len(held))).release(rng.random() < 0.5)
    for fetched in held:
        fetched.release(False)
    source.close()


# What does not fit -------------------------------------------------------------------------------


class OddClient(FakeClient):
    """Grants what a store holds, so many at a time."""

    def __init__(self, size: int, *fragments: Fragment) -> None:
        super().__init__()
        self.store = FakeStore()
        self.references = stored(self.store, *fragments)
        self.size = size

    def fetch(
        self, count: int, wait_s: float, *, rank: int, world_size: int, request_id: str
    ) -> FakeLease:
        lease = super().fetch(
            count, wait_s, rank=rank, world_size=world_size, request_id=request_id
        )
        start = (len(self.leases) - 1) * self.size
        lease.references = tuple(self.references[start : start + self.size])
        return lease

    def load_batch(
        self, references: tuple[FragmentReference, ...], *, device: str, into: Stack | None
    ) -> Batch:
        return load_batch(self.store, references, device=device, into=into)

    def describe_arrays(
        self, references: tuple[FragmentReference, ...]
    ) -> list[dict[str, ArrayType]]:
        return describe_arrays(self.store, references)


def seeing(index: int, width: int, **fields: Any) -> Fragment:
    obs = np.full((STEPS, width), index, np.float32)
    return plain_fragment(index, obs=obs, next_obs=np.zeros(width, np.float32), **fields)


def rows_of(fetched: FetchedBatch | None) -> list[int]:
    assert fetched is not None
    assert len(fetched.batch) == len(fetched.staleness) == len(fetched.use_count)
    return fetched.batch.fragment_indices


def test_fragments_that_do_not_fit_the_others_are_left_out_and_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also where one of them comes first."""
    widths = [7, 3, 3, 3, 7, 3, 3, 3]
    client = OddClient(4, *(seeing(index, width) for index, width in enumerate(widths)))
    source = LeaseSource(client, fragment_count=4)  # type: ignore[arg-type]
    first, second = source.next(never), source.next(never)
    assert [[1, 2, 3], [5, 6, 7]] == [rows_of(first), rows_of(second)]
    assert first is not None
    assert second is not None
    assert (1, 1) == (first.misfit_count, second.misfit_count)
    assert [None, None] == client.ends
    (told,) = caplog.messages
    for words in ("worker", "next_obs", "wanted <f4[3]", "got <f4[7]"):
        assert words in told
    source.close()


def test_a_batch_of_what_the_policy_cannot_take_is_used_up_and_the_next_one_trained_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Fragments that agree with one another, but are of another environment."""
    widths = [7, 7, 3, 3, 7, 3]
    client = OddClient(2, *(seeing(index, width) for index, width in enumerate(widths)))
    source = LeaseSource(
        client,  # type: ignore[arg-type]
        fragment_count=2,
        fitting=Fitting({"obs": (3,), "action": ()}),
    )
    fetched = source.next(never)
    assert [2, 3] == rows_of(fetched)
    assert fetched is not None
    assert 2 == fetched.misfit_count
    assert [ReleaseMode.CONSUMED, None] == client.ends
    # The first is not what decides where the policy cannot take it.
    fetched = source.next(never)
    assert [5] == rows_of(fetched)
    assert fetched is not None
    assert 1 == fetched.misfit_count
    assert 1 == len(caplog.messages)
    assert "obs: wanted shape [steps, 3], got" in caplog.messages[0]
    source.close()


def test_a_rank_fills_its_share_up_since_all_make_the_same_steps() -> None:
    client = OddClient(4, *(seeing(index, 7 if index == 1 else 3) for index in range(8)))
    source = LeaseSource(
        client,  # type: ignore[arg-type]
        fragment_count=8,
        share=Share(0, 2, "nonce"),
    )
    assert [0, 2, 3, 0] == rows_of(source.next(never))
    source.close()


def test_a_rank_with_a_partial_group_fills_its_share_up() -> None:
    """The share of another rank may be whole, and would make another number of minibatches."""
    client = OddClient(3, *(seeing(index, 3) for index in range(3)))
    source = LeaseSource(
        client,  # type: ignore[arg-type]
        fragment_count=8,
        share=Share(0, 2, "nonce"),
    )
    assert [0, 1, 2, 0] == rows_of(source.next(never))
    source.close()


@pytest.mark.parametrize("prefetch_batches", [0, 2])
@pytest.mark.parametrize("odd", [(7, 7), (7, 5)], ids=["of one kind", "of two kinds"])
def test_a_rank_says_that_nothing_of_its_share_fits_and_goes_on(
    odd: tuple[int, int], prefetch_batches: int
) -> None:
    widths = [*odd, 3, 3, *odd, 3, 7]
    client = OddClient(2, *(seeing(index, width) for index, width in enumerate(widths)))
    source = LeaseSource(
        client,  # type: ignore[arg-type]
        fragment_count=4,
        share=Share(1, 2, "nonce"),
        prefetch_batches=prefetch_batches,
        fitting=Fitting({"obs": (3,), "action": ()}),
    )
    for rows, misfit_count in (([2, 3], 0), ([6, 6], 1)):
        with pytest.raises(UnusableShareError) as left_out:
            source.next(never)
        assert 2 == left_out.value.misfit_count
        fetched = source.next(never)
        assert rows == rows_of(fetched)
        assert fetched is not None
        assert misfit_count == fetched.misfit_count
    assert [f"nonce-{number}-0" for number in range(4)] == [
        request_id for request_id, _, _ in client.requests[:4]
    ]
    assert [ReleaseMode.CONSUMED, None, ReleaseMode.CONSUMED, None] == client.ends[:4]
    source.close()


def test_spaces_tell_the_shapes_that_a_policy_can_take() -> None:
    spaces = Spaces(
        gymnasium.spaces.Dict(
            {
                "image": gymnasium.spaces.Box(0, 255, (8, 8, 3), np.uint8),
                "more": gymnasium.spaces.Tuple([gymnasium.spaces.Discrete(3)]),
            }
        ),
        gymnasium.spaces.MultiDiscrete([2, 3]),
    )
    wanted = {"obs.image": (8, 8, 3), "obs.more[0]": (), "action": (2,), "in_state[0]": (5,)}
    assert wanted == expected_rows(spaces, (torch.zeros(1, 5),))


def test_a_state_without_tensors_is_refused_with_the_remedy() -> None:
    spaces = Spaces(gymnasium.spaces.Box(0, 1, (3,)), gymnasium.spaces.Discrete(2))
    with pytest.raises(InvalidRequestError, match="return None for a policy without memory"):
        expected_rows(spaces, {"memory": ()})


def test_a_choice_that_does_not_exist_is_blamed_on_its_fragment_wherever_it_stands() -> None:
    """Observations that are one choice have no axis of their own."""

    def choosing(index: int, **fields: Any) -> Fragment:
        wanted = {"obs": np.full(STEPS, 3), "next_obs": np.array(4), "action": np.ones(STEPS)}
        return plain_fragment(index, **{**wanted, **fields})

    ends = {"final_obs_step": np.array([2, 5], np.int32)}
    store = FakeStore()
    references = stored(
        store,
        choosing(0, **ends, final_obs=np.array([3, 5])),
        choosing(1, next_obs=np.array(2)),
        choosing(2),
        choosing(3, **ends, final_obs=np.array([3, 6])),
        choosing(4, obs=np.full(STEPS, 7)),
    )
    spaces = Spaces(gymnasium.spaces.Discrete(3, start=3), gymnasium.spaces.Discrete(2))
    batch = load_batch(store, references, device="cpu")
    faulty = Fitting(expected_rows(spaces, None), spaces).faulty(batch)
    blamed = {row: (misfit.path, misfit.wanted) for row, misfit in faulty.items()}
    assert {1: ("next_obs", "3 to 5"), 3: ("final_obs", "3 to 5"), 4: ("obs", "3 to 5")} == blamed


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint64, np.int32])
def test_choices_of_any_dtype_are_judged_from_their_start(dtype: Any) -> None:
    store, start = FakeStore(), np.array([0, 5, 200], dtype)
    space = gymnasium.spaces.MultiDiscrete(np.array([2, 3, 50], dtype), dtype=dtype, start=start)
    chosen = [start, start + space.nvec - 1, np.array([0, 4, 200]), np.array([0, 5, 250])]
    references = stored(
        store,
        *(
            plain_fragment(
                index,
                obs=np.zeros((STEPS, 3), np.float32),
                next_obs=np.zeros(3, np.float32),
                action=np.tile(each.astype(dtype), (STEPS, 1)),
            )
            for index, each in enumerate(chosen)
        ),
    )
    spaces = Spaces(gymnasium.spaces.Box(-9, 9, (3,)), space)
    batch = load_batch(store, references, device="cpu")
    assert {2, 3} == set(Fitting(expected_rows(spaces, None), spaces).faulty(batch))


def test_kinds_of_misfits_are_logged_up_to_a_bound_and_all_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fitting = Fitting()
    (reference,) = references(1)
    for number in range(2 * WARNINGS_MAX):
        for _ in range(2):
            fitting.leave_out(reference, Misfit(f"extras.{number}", "numbers", "text"))
    assert (4 * WARNINGS_MAX, WARNINGS_MAX) == (fitting.misfit_count, len(caplog.records))


# What became too stale ---------------------------------------------------------------------------


def aging(
    *versions: int, at_grant: int, **options: Any
) -> tuple[OddClient, LeaseSource, list[int]]:
    """A source of draws of four fragments of these versions; the list has the current version."""
    fragments = [
        seeing(index, 3, model_version_min=each, model_version_max=each)
        for index, each in enumerate(versions)
    ]
    client, now = OddClient(4, *fragments), [at_grant]
    in_groups(client, 1)
    client.version = at_grant
    source = LeaseSource(
        client,  # type: ignore[arg-type]
        fragment_count=4,
        model_version=lambda: now[0],
        **options,
    )
    return client, source, now


def test_fragments_too_stale_at_their_update_are_left_out_and_counted() -> None:
    _, source, now = aging(3, 2, 3, 1, at_grant=3, max_staleness_at_use=2)
    now[0] = 4
    fetched = source.next(never)
    assert fetched is not None
    assert [0, 1, 2] == rows_of(fetched)
    assert ([3, 2, 3], [0, 1, 0]) == (fetched.versions, fetched.staleness)
    assert [0.0, 1.0, 2.0] == fetched.batch.obs[:, 0, 0].tolist()
    assert [1, 0] == [source.take_left_out_count() for _ in range(2)]
    source.close()


def in_groups(client: OddClient, size: int) -> None:
    """Let the fragments be the members of groups, as a server grants them."""
    client.references = [
        replace(each, chunk_id=number // size, metadata=replace(each.metadata, discontinuity=True))
        for number, each in enumerate(client.references)
    ]


def test_a_group_with_a_member_too_stale_at_its_update_is_left_out_as_a_whole() -> None:
    client, source, now = aging(3, 1, 2, 3, at_grant=3, max_staleness_at_use=2)
    in_groups(client, 2)
    now[0] = 4
    assert [2, 3] == rows_of(source.next(never))
    assert 2 == source.take_left_out_count()
    source.close()


def test_a_rank_fills_up_with_whole_groups() -> None:
    client, source, now = aging(
        *(3, 1, 2, 3), at_grant=3, max_staleness_at_use=2, share=Share(1, 2, "nonce")
    )
    in_groups(client, 2)
    now[0] = 4
    assert [2, 3, 2, 3] == rows_of(source.next(never))
    source.close()


def test_a_limit_that_nothing_exceeds_changes_nothing() -> None:
    _, source, _ = aging(3, 2, 3, 1, at_grant=3, max_staleness_at_use=2)
    assert [0, 1, 2, 3] == rows_of(source.next(never))
    assert 0 == source.take_left_out_count()
    source.close()


@pytest.mark.parametrize(
    ("draw", "at_grant", "how"),
    [
        ((3, 3, 3, 3), 4, "RETURNED"),
        ((3, 4, 3, 4), 6, "RETURNED"),  # In part.
        ((3, 3, 3, 3), 6, "CONSUMED"),
    ],
)
def test_a_draw_too_stale_as_a_whole_is_returned_unless_all_of_it_came_so(
    draw: tuple[int, ...], at_grant: int, how: str
) -> None:
    """If returned again and again it would be granted again and again."""
    client, source, now = aging(*draw, 7, 7, 7, 7, at_grant=at_grant, max_staleness_at_use=2)
    now[0] = 7
    assert [4, 5, 6, 7] == rows_of(source.next(never))
    assert [ReleaseMode[how], None] == client.ends
    assert 4 == source.take_left_out_count()
    source.close()


def test_a_rank_fills_up_what_it_left_out_and_skips_a_draw_of_which_nothing_is_left() -> None:
    versions = (3, 1, 3, 1, 1, 1, 1, 1)
    client, source, now = aging(
        *versions, at_grant=3, max_staleness_at_use=2, share=Share(1, 2, "nonce")
    )
    now[0] = 4
    assert [0, 2, 0, 2] == rows_of(source.next(never))
    with pytest.raises(UnusableShareError):
        source.next(never)
    assert [None, ReleaseMode.RETURNED] == client.ends
    assert 6 == source.take_left_out_count()
    source.close()
