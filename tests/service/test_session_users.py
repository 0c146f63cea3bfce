"""Goal: no process ends the session of another one by a slip, or is locked out of its own."""

from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox_server.access.authorization import Role
from breadbox_server.core.model.ids import BufferName, SessionId
from breadbox_server.limits import SESSION_USERS_MAX
from breadbox_server.reading.session_users import SessionUsers, User
from support.eventually import eventually
from support.manual_timers import ManualTimers
from support.served import Served, info_of, reason_of, served
from support.token_files import bearer, write_tokens

BUFFER = BufferName("default")
RUN = SessionId("run")
MINUTE_S = 60.0


def by(process: str) -> Any:
    return (("breadbox-process", process),)


async def start(it: Served, session_id: str, process: str, **fields: Any) -> str:
    """Return the session that is current then, or the refusal's reason and users."""
    try:
        request = pb.StartSessionRequest(session_id=session_id, **fields)
        reply = await it.stub.StartSession(request, metadata=by(process))
    except grpc.aio.AioRpcError as error:
        info = info_of(error)
        return f"{info.reason}: {info.metadata['users']}"
    assert session_id == reply.session_id
    return str(reply.session_id)


def call(it: Served, method: str, process: str, **fields: Any) -> Any:
    request = getattr(pb, f"{method}Request")(**fields)
    return getattr(it.stub, method)(request, metadata=by(process))


def calls(it: Served) -> dict[str, tuple[str, dict[str, Any]]]:
    """A call of each kind by which a process uses a session, with the role that it shows."""
    return {
        "PublishModel": ("learner", {"session_id": "run", "model_version": 1}),
        "FetchFragments": ("learner", {"request_id": "r", "fragment_count": 1}),
        "ReadFragments": ("learner", {}),
        "AppendFragments": ("producer", {"fragments": [it.metadata(0)]}),
    }


@pytest.mark.parametrize(
    "method", ["PublishModel", "FetchFragments", "ReadFragments", "AppendFragments"]
)
async def test_a_session_that_another_process_uses_is_ended_only_by_taking_it_over(
    method: str,
) -> None:
    async with served() as it:
        await start(it, "run", "host/1")
        it.clock.advance(100.0)
        role, fields = calls(it)[method]
        await call(it, method, "gpu-3/7", **fields)
        it.clock.advance(3.0)

        refusal = await start(it, "other", "host/2")
        assert refusal.startswith(
            f"SESSION_IN_USE: a {role} (process 7 on gpu-3) called 3 s ago, and first at "
        )
        assert "run" == (await it.buffer()).session_id
        assert "other" == await start(it, "other", "host/2", take_over=True)


async def test_a_process_that_calls_in_several_ways_is_one_user() -> None:
    async with served() as it:
        await start(it, "run", "host/1")
        await call(it, "PublishModel", "host/1", session_id="run", model_version=1)
        await call(it, "ReadFragments", "host/1")
        refusal = await start(it, "other", "host/2")
    assert refusal.startswith("SESSION_IN_USE: a learner (process 1 on host) called 0 s ago")


async def test_an_export_which_gives_back_what_it_fetched_is_no_user() -> None:
    async with served() as it:
        await start(it, "run", "host/1")
        await call(it, "AppendFragments", "host/1", fragments=[it.metadata(0)])
        fetched = await call(it, "FetchFragments", "host/3", request_id="r", fragment_count=1)
        both = await start(it, "other", "host/2")
        lease_id = fetched.grant.lease.lease_id
        await call(it, "ReleaseLease", "host/3", lease_id=lease_id, mode=pb.RELEASE_MODE_RETURNED)
        refusal = await start(it, "other", "host/2")
    assert both.startswith("SESSION_IN_USE: a learner (process 1 on host) and 1 more called")
    assert refusal.startswith("SESSION_IN_USE: a learner (process 1 on host) called")


async def test_a_session_is_free_a_minute_after_the_last_call() -> None:
    async with served() as it:
        await start(it, "run", "host/1")
        it.clock.advance(MINUTE_S)
        assert (await start(it, "other", "host/2")).startswith("SESSION_IN_USE")
        it.clock.advance(0.1)
        assert "other" == await start(it, "other", "host/2")


async def test_a_refused_start_is_no_use_of_the_session() -> None:
    async with served() as it:
        await start(it, "run", "host/1")
        it.clock.advance(50.0)
        assert (await start(it, "other", "host/2")).startswith("SESSION_IN_USE")
        it.clock.advance(10.1)
        assert "third" == await start(it, "third", "host/3")


async def test_the_process_that_started_a_session_ends_it_whoever_uses_it() -> None:
    async with served() as it:
        await start(it, "run", "host/1")
        await call(it, "AppendFragments", "host/2", fragments=[it.metadata(0)])
        await call(it, "ReadFragments", "host/3")
        assert "next" == await start(it, "next", "host/1")


async def test_a_process_goes_on_with_the_current_session_whoever_uses_it() -> None:
    async with served() as it:
        await start(it, "run", "host/1")
        await call(it, "AppendFragments", "host/2", fragments=[it.metadata(0)])
        assert "run" == await start(it, "run", "host/9")
        # That took nothing over: the process is a user like others.
        assert (await start(it, "next", "host/9")).startswith("SESSION_IN_USE")


async def test_a_session_that_ended_is_free_whoever_still_calls() -> None:
    async with served() as it:
        await start(it, "run", "host/1")
        await call(it, "AppendFragments", "host/2", fragments=[it.metadata(0)])
        await call(it, "EndSession", "host/1", session_id="run")
        assert "next" == await start(it, "next", "host/3")


async def test_a_session_that_had_ended_is_refused_as_ended() -> None:
    async with served() as it:
        await start(it, "old", "host/1")
        await start(it, "run", "host/2", take_over=True)
        request = pb.StartSessionRequest(session_id="old")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await it.stub.StartSession(request, metadata=by("host/1"))
        assert "SESSION_NOT_CURRENT" == reason_of(caught.value)


async def test_workers_of_a_session_that_ended_do_not_use_the_next_one() -> None:
    async with served() as it:
        await start(it, "old", "host/1")
        await start(it, "run", "host/2", take_over=True)
        it.clock.advance(MINUTE_S + 1)
        await call(it, "AppendFragments", "host/3", fragments=[it.metadata(0, session_id="old")])
        assert "next" == await start(it, "next", "host/4")


async def test_looks_and_watches_are_no_use_of_a_session() -> None:
    async with served() as it:
        await start(it, "run", "host/1")
        it.clock.advance(MINUTE_S + 1)
        await call(it, "ReadFragments", "host/2", is_look=True)
        await call(it, "GetBuffer", "host/2")
        await call(it, "WatchModel", "host/2")
        assert "next" == await start(it, "next", "host/3")


async def test_a_fetch_that_waits_uses_its_session_and_so_does_a_renewed_lease() -> None:
    async with served() as it:
        await start(it, "run", "host/1")
        waiting = call(
            *(it, "FetchFragments", "host/2"),
            request_id="r",
            fragment_count=1,
            max_wait=Duration(seconds=250),
        )
        calls_now = partial(it.server.metrics.registry.get_sample_value, "breadbox_calls")
        await eventually(lambda: calls_now() == 1)
        it.clock.advance(100.0)
        assert (await start(it, "other", "host/3")).startswith(
            "SESSION_IN_USE: a learner (process 2 on host) called 0 s ago"
        )
        await it.fill(1)
        lease = (await waiting).grant.lease.lease_id
        it.clock.advance(55.0)
        await call(it, "RenewLease", "host/2", lease_id=lease)
        it.clock.advance(55.0)
        assert (await start(it, "other", "host/3")).startswith(
            "SESSION_IN_USE: a learner (process 2 on host) called 55 s ago"
        )


async def test_clients_that_name_no_process_are_told_apart_by_their_connection() -> None:
    async with served() as it:
        await it.start("run")
        await it.start("next")
        assert (await start(it, "other", "host/3")).startswith(
            "SESSION_IN_USE: a learner called 0 s ago"
        )


async def test_a_users_token_is_named(tmp_path: Path) -> None:
    alice, bob = write_tokens(tmp_path / "tokens", "learner alice", "learner bob")
    async with served(tokens=tmp_path / "tokens") as it:
        await it.stub.StartSession(
            pb.StartSessionRequest(session_id="run"),
            metadata=(*by("host/1"), *bearer(alice)),
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await it.stub.StartSession(
                pb.StartSessionRequest(session_id="other"),
                metadata=(*by("host/2"), *bearer(bob)),
            )
        assert "a learner (process 1 on host, token 'alice') called" in str(caught.value.details())


async def test_a_buffers_description_names_its_sessions_other_users() -> None:
    async with served() as it:
        await start(it, "run", "host/1")
        own = await call(it, "GetBuffer", "host/1", name="default")
        others = await call(it, "GetBuffer", "host/2", name="default")
        assert "" == own.buffer.state.session_users
        assert others.buffer.state.session_users.startswith("a learner (process 1 on host) called")


def user(number: int, role: Role = Role.PRODUCER) -> User:
    return User(role, f"host/{number}", "", "run")


def test_remembered_users_are_bounded_and_a_learner_is_not_pushed_out_by_producers() -> None:
    clock = ManualTimers()
    users = SessionUsers(clock, lambda _: True)
    users.begin(BUFFER, user(0, Role.LEARNER))
    users.end(BUFFER, user(0, Role.LEARNER))
    for number in range(1, 1000):
        users.begin(BUFFER, user(number))
        users.end(BUFFER, user(number))

    words = users.others(BUFFER, RUN, "host/5000")
    assert words.startswith("a learner (process 0 on host) called 0 s ago")
    assert f" and {SESSION_USERS_MAX - 1} more called" in words


def test_users_make_room_once_they_are_silent_for_a_minute() -> None:
    clock = ManualTimers()
    users = SessionUsers(clock, lambda _: True)
    for number in range(SESSION_USERS_MAX):
        users.begin(BUFFER, user(number))
        users.end(BUFFER, user(number))
    clock.advance(MINUTE_S + 1)
    users.begin(BUFFER, user(1000))

    assert "process 1000" in users.others(BUFFER, RUN, "host/1")


def test_calls_on_a_buffer_that_does_not_exist_leave_nothing_behind() -> None:
    users = SessionUsers(ManualTimers(), lambda _: False)
    users.begin(BUFFER, user(1))
    users.end(BUFFER, user(1))

    assert "" == users.others(BUFFER, RUN, "host/2")
