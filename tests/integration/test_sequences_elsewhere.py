"""Sequences and tickets elsewhere: through a gateway, in Redis, in a mirror."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import breadbox
from breadbox.errors import InvalidRequestError, PermissionDeniedError
from breadbox.mirror import ReplayMirror
from support.redis_server import RedisServer
from support.sequences import same_sequence, sequence
from support.server_process import ServerProcess
from support.token_files import write_tokens

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

SIZE = 2
GROUPS = ("--preset", "groups", "--fragments-per-chunk", str(SIZE))
LENGTH = 20_000
"""Tokens that take more than 64 KiB in each column."""


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with RedisServer() as started:
        yield started


def test_tickets_through_the_gateway_by_a_token_that_is_bound_to_them(tmp_path: Path) -> None:
    lines = ["producer paced workers=ticket-*", "producer other workers=w*", "learner learner"]
    paced, other, learner = write_tokens(tmp_path / "tokens", *lines)
    with ServerProcess(
        *("--store", f"file://{tmp_path}/store", *GROUPS, "--groups-per-version", "3"),
        *("--gateway", "--inline-size-max", "0", "--tokens", str(tmp_path / "tokens")),
        log=tmp_path / "log",
    ) as server:

        def connect(token: str) -> breadbox.Client:
            return breadbox.connect(server.address, token=token, store_url="gateway:")

        with connect(paced) as producer, connect(learner) as trainer, connect(other) as stranger:
            trainer.start_session("s")
            with pytest.raises(PermissionDeniedError, match=r"ticket-\*"):
                stranger.tickets(1, max_wait_s=5)
            first, second, third = producer.tickets(3, max_wait_s=5)
            sent = [sequence(first.group, member, LENGTH, session_id="s") for member in (1, 0)]
            with first:
                producer.append_many(sent)
            with pytest.raises(PermissionDeniedError, match="worker"):
                stranger.service.give_back_ticket(second.group)
            with pytest.raises(PermissionDeniedError, match="worker"):
                stranger.append(sequence(second.group, 0, session_id="s"))
            second.give_back()
            third.give_back(0)
            with trainer.fetch(SIZE, max_wait_s=10) as lease:
                found = list(lease.sequences())
            ends = [(each.group, each.reason.value) for each in producer.group_ends()]
            assert producer.get_buffer().state.ticket_count == 0
    assert all(map(same_sequence, sorted(sent, key=lambda each: each.member), found))
    given_back = [(each.group, "given_back") for each in (second, third)]
    assert [(first.group, "complete"), *given_back] == ends


@pytest.mark.parametrize("columns", [None, ["ids"], ["tokens.log_prob", "prompt"]])
def test_large_payloads_in_redis_are_packed_by_columns(
    tmp_path: Path, redis: RedisServer, columns: list[str] | None
) -> None:
    with (
        ServerProcess(*("--store", redis.url), *GROUPS, log=tmp_path / "log") as server,
        breadbox.connect(server.address) as client,
    ):
        client.start_session("s")
        sent = [sequence("g", member, LENGTH + member, session_id="s") for member in range(SIZE)]
        client.append_many(sent)
        with client.fetch(SIZE, max_wait_s=10) as lease:
            [packed] = lease.packed(columns=columns)
            [padded] = lease.padded(columns=columns)
    names = (
        set(sent[0].tokens)
        if columns is None
        else {"ids", "log_prob"} & {each.rpartition(".")[2] for each in columns}
    )
    assert names == set(packed.tokens) == set(padded.tokens)
    for name in names:
        wanted = np.concatenate([np.asarray(each.tokens[name]) for each in sent])
        assert np.array_equal(wanted, packed.tokens[name])
        for row, each in enumerate(sent):
            assert np.array_equal(
                each.tokens[name], padded.tokens[name][row, : len(each.tokens[name])]
            )
    assert (["prompt"] if columns != ["ids"] else []) == list(packed.context)


def test_a_mirror_refuses_sequences_and_readers_by_a_cursor_get_them(tmp_path: Path) -> None:
    with (
        ServerProcess(
            *("--store", f"file://{tmp_path}/store"), *GROUPS, log=tmp_path / "log"
        ) as server,
        breadbox.connect(server.address) as client,
    ):
        client.start_session("s")
        sent = [sequence("g", member, session_id="s") for member in range(SIZE)]
        client.append_many(sent)
        [read] = client.tail(max_wait_s=0)
        assert all(map(same_sequence, sent, read.fragments))  # type: ignore[arg-type]
        with ReplayMirror(client) as mirror, pytest.raises(InvalidRequestError, match="sequence"):
            mirror.catch_up(10)
