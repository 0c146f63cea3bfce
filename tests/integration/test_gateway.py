"""Payloads through the server: one port, and nobody but the server knows of the store."""

import json
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import breadbox
from breadbox.model import errors
from breadbox.model.options import ClientOptions
from breadbox.model.types import AdmissionOutcome, FragmentMetadata, PayloadReference
from breadbox.stores.gateway import GatewayStore
from breadbox.stores.keys import payload_id_of_key
from breadbox.testing import ServerProcess, start_server
from breadbox.wire.route import Route
from breadbox_server.access.authorization import Role
from support.eventually import eventually_sync
from support.fragments import large_fragment, vector_fragment
from support.proxy import Proxy
from support.redis_server import RedisServer
from support.server_process import plain_environment
from support.store_contract import in_buffers, payload_of, read_back
from support.token_files import write_token_file, write_tokens

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

PASSWORD = "nobody-but-the-server"
MIB = 2**20


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    """With a password that no client ever sees."""
    with RedisServer(password=PASSWORD) as server:
        yield server


class World:
    """A server with tokens, its store out of everybody's sight."""

    def __init__(self, server: ServerProcess, tokens: dict[Role, str]) -> None:
        self.server = server
        self.tokens = tokens

    def connect(self, role: Role, **options: object) -> breadbox.Client:
        return breadbox.connect(self.server.address, token=self.tokens[role], **options)  # type: ignore[arg-type]


@pytest.fixture
def world(redis_server: RedisServer, tmp_path: Path) -> Iterator[World]:
    tokens = write_token_file(tmp_path / "tokens")
    with redis_server.client() as client:
        client.flushall()
    options = ["--gateway", "--tokens", str(tmp_path / "tokens"), "--unannounced-s", "60"]
    options += ["--gateway-unannounced", "64MiB"]
    environment = {"BREADBOX_STORE": redis_server.url}
    with start_server(store=redis_server.url, options=options, environment=environment) as server:
        yield World(server, tokens)


@pytest.fixture
def producer(world: World) -> Iterator[breadbox.Client]:
    with world.connect(Role.PRODUCER, reconnect_s=5.0) as client:
        yield client


@pytest.fixture
def learner(world: World) -> Iterator[breadbox.Client]:
    with world.connect(Role.LEARNER, reconnect_s=5.0) as client:
        client.start_session("s")
        yield client


def keys(redis_server: RedisServer) -> set[bytes]:
    """Of payloads, and of pieces of them."""
    with redis_server.client() as client:
        return {key for key in client.keys("breadbox:{*}:*") if payload_id_of_key(key)}


# One port ----------------------------------------------------------------------------------------


def test_fragments_and_weights_go_from_producer_to_learner_and_back(
    producer: breadbox.Client, learner: breadbox.Client
) -> None:
    sent = [vector_fragment(index, step_count=4 + 200_000 * (index == 3)) for index in range(3)]
    sent.append(vector_fragment(0, worker_id="large", step_count=200_000))
    results = producer.append_many(sent[:3])
    assert [AdmissionOutcome.ADMITTED] * 3 == [each.outcome for each in results]
    with learner.fetch(3, 5.0) as lease:
        loaded = {each.fragment_index: each for each in lease.fragments()}
    assert {0, 1, 2} == set(loaded)
    for fragment in sent[:3]:
        assert np.array_equal(fragment.obs, loaded[fragment.fragment_index].obs)
    weights = {"layer": np.random.default_rng(1).random(1_000_000)}
    learner.publish("s", 1, weights)
    newest = producer.load_model(max_wait_s=5.0)
    assert newest is not None
    assert np.array_equal(weights["layer"], newest[1]["layer"])


def test_nobody_announces_what_somebody_else_wrote(
    world: World, producer: breadbox.Client, learner: breadbox.Client
) -> None:
    """Its id would make it theirs to read."""
    (written,) = producer.store.write_many([in_buffers(payload_of(100))])
    fragment = FragmentMetadata("w0", 0, "s", 0, 0, written, 4)
    with world.connect(Role.ADMIN) as other:
        (refused,) = other.service.append_fragments([fragment]).results
    with pytest.raises(errors.PayloadMissingError):
        learner.service.publish_model("s", 1, weights=written)
    (admitted,) = producer.service.append_fragments([fragment]).results

    assert AdmissionOutcome.PAYLOAD_MISSING == refused.outcome
    assert AdmissionOutcome.ADMITTED == admitted.outcome


@pytest.mark.parametrize("role", list(Role), ids=lambda role: role.value)
def test_nobody_is_told_where_the_store_is(world: World, role: Role) -> None:
    with world.connect(role) as client:
        assert "gateway:" == client.service.get_store_config().store_url


def test_learners_go_to_the_store_where_they_are_given_a_way_of_their_own(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    tokens = write_token_file(tmp_path / "tokens")
    options = ["--gateway", "--tokens", str(tmp_path / "tokens")]
    environment = {"BREADBOX_CLIENT_STORE": redis_server.url}
    with start_server(store=redis_server.url, options=options, environment=environment) as server:
        told = {}
        for role in Role:
            with breadbox.connect(server.address, token=tokens[role]) as client:
                told[role] = client.service.get_store_config().store_url
    assert {
        Role.PRODUCER: "gateway:",
        Role.LEARNER: redis_server.url,
        Role.VIEWER: "gateway:",
        Role.ADMIN: redis_server.url,
    } == told


def test_a_server_without_a_gateway_says_so(tmp_path: Path) -> None:
    with start_server() as server:
        store = GatewayStore(Route(server.address), ClientOptions())
        with pytest.raises(errors.NotSupportedError, match="--gateway"):
            store.write_many([in_buffers(payload_of(2000))])
        store.close()


# Who may what ------------------------------------------------------------------------------------


def test_a_producer_reads_weights_and_what_it_has_not_announced_and_nothing_else(
    world: World, producer: breadbox.Client, learner: breadbox.Client
) -> None:
    producer.append(vector_fragment(0))
    learner.publish("s", 1, {"w": np.arange(8.0)})
    (announced,) = [
        each.metadata.payload for each in learner.service.fetch_fragments(1, 5.0).fragments
    ]
    state = producer.watch_model()
    assert state is not None
    assert state.weights is not None
    (mine,) = producer.store.write_many([in_buffers(payload_of(2000))])
    (others,) = learner.store.write_many([in_buffers(payload_of(2000))])
    readable = {}
    for name, reference in {
        "announced": announced, "weights": state.weights, "mine": mine, "others": others,
    }.items():  # fmt: skip
        for who, client in {"producer": producer, "learner": learner}.items():
            try:
                read_back(client.store, [reference])
                readable[who, name] = True
            except errors.PayloadMissingError:
                readable[who, name] = False
    assert {
        ("producer", "announced"): False,
        ("producer", "weights"): True,
        ("producer", "mine"): True,
        ("producer", "others"): False,
        ("learner", "announced"): True,
        ("learner", "weights"): True,
        ("learner", "mine"): False,
        ("learner", "others"): True,
    } == readable


def test_a_learner_reads_payloads_of_its_own_buffers_only(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    admin, mine, other = write_tokens(
        tmp_path / "tokens", "admin a", "learner mine buffers=mine", "learner other buffers=other"
    )
    options = ["--gateway", "--tokens", str(tmp_path / "tokens")]
    with start_server(store=redis_server.url, options=options) as server:
        with breadbox.connect(server.address, token=admin, buffer="mine") as client:
            client.create_buffer("mine")
            client.create_buffer("other")
            client.start_session("s")
            client.append(large_fragment(0))
            (granted,) = client.service.fetch_fragments(1, 5.0).fragments
        with breadbox.connect(server.address, token=mine, buffer="mine") as client:
            assert 0 == client.load_fragments([granted])[0].fragment_index
        with (
            breadbox.connect(server.address, token=other, buffer="other") as client,
            pytest.raises(errors.PayloadMissingError),
        ):
            client.load_fragments([granted])


def test_nobody_discards_what_others_wrote_or_a_buffer_refers_to(
    redis_server: RedisServer, producer: breadbox.Client, learner: breadbox.Client
) -> None:
    producer.append(vector_fragment(0))
    (announced,) = [
        each.metadata.payload for each in learner.service.fetch_fragments(1, 5.0).fragments
    ]
    (mine,) = producer.store.write_many([in_buffers(payload_of(2000))])
    (others,) = learner.store.write_many([in_buffers(payload_of(2000))])
    unknown = PayloadReference("0" * 32, 10)
    producer.store.delete_many([announced, mine, others, unknown])
    gone = f"breadbox:{{{mine.payload_id}}}:0".encode()
    eventually_sync(lambda: gone not in keys(redis_server), "the payload being deleted")
    kept = [f"breadbox:{{{each.payload_id}}}:0".encode() for each in (announced, others)]
    assert set(kept) <= keys(redis_server)


# Bounds ------------------------------------------------------------------------------------------


def test_a_payload_larger_than_may_be_is_refused_before_it_is_sent(
    redis_server: RedisServer, producer: breadbox.Client
) -> None:
    with pytest.raises(errors.InvalidRequestError, match="--gateway-unannounced"):
        producer.store.write_many([[memoryview(bytearray(MIB))] * 65])
    assert set() == keys(redis_server)


def test_a_token_may_leave_so_much_unannounced_and_then_waits(
    producer: breadbox.Client, learner: breadbox.Client
) -> None:
    payload = memoryview(secrets.token_bytes(16 * MIB))
    references = producer.store.write_many([[payload]] * 4)
    with pytest.raises(errors.StoreFullError, match="not announced"):
        producer.store.write_many([[payload[:1000]]])
    # It bounds a token, not all of them.
    learner.store.write_many([[payload[:1000]]])
    producer.store.delete_many(references[:1])
    producer.store.write_many([[payload[:1000]]])


def test_what_is_announced_counts_no_more(
    producer: breadbox.Client, learner: breadbox.Client
) -> None:
    large = [vector_fragment(index, step_count=400_000) for index in range(6)]
    assert sum(fragment.size_bytes for fragment in large) > 64 * MIB
    assert [AdmissionOutcome.ADMITTED] * 6 == [producer.append(each).outcome for each in large]


# When something dies, or is slow -----------------------------------------------------------------


@pytest.mark.parametrize("cut_bytes", [100, 3 * MIB])
def test_a_server_killed_while_it_takes_a_payload_loses_nothing(
    world: World, learner: breadbox.Client, cut_bytes: int
) -> None:
    host, _, port = world.server.address.rpartition(":")
    with Proxy((host, int(port))) as proxy, ThreadPoolExecutor(1) as pool:
        token = world.tokens[Role.PRODUCER]
        with breadbox.connect(proxy.address, token=token, reconnect_s=30.0) as client:
            client.get_buffer()
            _ = client.store
            proxy.fall_silent_after(cut_bytes, to_target=True)
            fragment = vector_fragment(0, step_count=400_000)
            appending = pool.submit(client.append, fragment)
            eventually_sync(lambda: proxy.is_silent, "the payload on its way")
            world.server.kill()
            proxy.speak()
            world.server.start()
            assert AdmissionOutcome.ADMITTED == appending.result(60).outcome
    with learner.fetch(1, 10.0) as lease:
        (loaded,) = lease.fragments()
    assert np.array_equal(fragment.obs, loaded.obs)


def test_a_server_killed_while_it_gives_a_payload_is_asked_again(
    world: World, producer: breadbox.Client, learner: breadbox.Client
) -> None:
    fragment = vector_fragment(0, step_count=400_000)
    producer.append(fragment)
    (granted,) = learner.service.fetch_fragments(1, 10.0).fragments
    host, _, port = world.server.address.rpartition(":")
    with Proxy((host, int(port))) as proxy, ThreadPoolExecutor(1) as pool:
        token = world.tokens[Role.LEARNER]
        with breadbox.connect(proxy.address, token=token, reconnect_s=30.0) as client:
            _ = client.store
            proxy.fall_silent_after(3 * MIB, to_target=False)
            reading = pool.submit(client.load_fragments, [granted])
            eventually_sync(lambda: proxy.is_silent, "the payload on its way")
            world.server.kill()
            proxy.speak()
            world.server.start()
            (loaded,) = reading.result(60)
    assert np.array_equal(fragment.obs, loaded.obs)


def impatient(proxy: Proxy, token: str) -> breadbox.Client:
    return breadbox.connect(proxy.address, token=token, deadline_s=1.0, reconnect_s=0.0)


def test_slow_bytes_are_no_silence(
    world: World, producer: breadbox.Client, learner: breadbox.Client
) -> None:
    """Each takes several times the deadline."""
    host, _, port = world.server.address.rpartition(":")
    fragment = vector_fragment(0, step_count=200_000)
    learner.get_buffer()
    for role in (Role.PRODUCER, Role.LEARNER):
        with Proxy((host, int(port))) as proxy:
            proxy.pass_at_most(fragment.size_bytes / 3)
            with impatient(proxy, world.tokens[role]) as client:
                if role is Role.PRODUCER:
                    client.append(fragment)
                else:
                    granted = learner.service.fetch_fragments(1, 10.0).fragments
                    (loaded,) = client.load_fragments(granted)
    assert np.array_equal(fragment.obs, loaded.obs)


def test_who_is_silent_in_the_middle_of_a_payload_ends_a_call_by_its_deadline(
    world: World, producer: breadbox.Client, learner: breadbox.Client
) -> None:
    fragment = vector_fragment(0, step_count=400_000)
    producer.append(fragment)
    granted = learner.service.fetch_fragments(1, 10.0).fragments
    host, _, port = world.server.address.rpartition(":")
    for role in (Role.PRODUCER, Role.LEARNER):
        with Proxy((host, int(port))) as proxy, impatient(proxy, world.tokens[role]) as client:
            _ = client.store
            proxy.fall_silent_after(MIB, to_target=role is Role.PRODUCER)
            move: dict[Role, Callable[[], object]] = {
                Role.PRODUCER: partial(client.append, vector_fragment(1, step_count=400_000)),
                Role.LEARNER: partial(client.load_fragments, granted),
            }
            with pytest.raises(errors.StoreUnavailableError) as caught:
                move[role]()
            assert caught.value.was_silent


def test_readers_that_take_nothing_hold_up_nobody(
    world: World, producer: breadbox.Client, learner: breadbox.Client
) -> None:
    producer.append(vector_fragment(0, step_count=400_000))
    granted = learner.service.fetch_fragments(1, 10.0).fragments
    host, _, port = world.server.address.rpartition(":")
    begun = threading.Barrier(9, timeout=30)
    with Proxy((host, int(port))) as proxy, ThreadPoolExecutor(8) as pool:
        token = world.tokens[Role.ADMIN]
        with breadbox.connect(proxy.address, token=token, deadline_s=5.0, reconnect_s=0) as stuck:
            _ = stuck.store
            proxy.fall_silent_after(256 * 1024, to_target=False)

            def read() -> bool:
                begun.wait()
                try:
                    stuck.load_fragments(granted)
                except errors.StoreUnavailableError as error:
                    return error.was_silent
                return False

            reading = [pool.submit(read) for _ in range(8)]
            begun.wait()
            eventually_sync(lambda: proxy.is_silent, "the readers being stuck")
            for _ in range(5):
                assert 1 == len(learner.load_fragments(granted))
            assert not any(each.done() for each in reading)
            assert all(each.result(30) for each in reading)


def test_a_write_that_its_caller_gives_up_leaves_nothing_behind(
    world: World, redis_server: RedisServer
) -> None:
    host, _, port = world.server.address.rpartition(":")
    with Proxy((host, int(port))) as proxy:
        options = ClientOptions(token=world.tokens[Role.PRODUCER], deadline_s=1.0)
        store = GatewayStore(Route(proxy.address), options)
        store.write_many([in_buffers(payload_of(2000))])
        proxy.fall_silent_after(5 * MIB, to_target=True)
        with pytest.raises(errors.StoreUnavailableError):
            store.write_many([[memoryview(secrets.token_bytes(20 * MIB))]])
        assert 1 < len(keys(redis_server))
        proxy.speak()
        eventually_sync(lambda: len(keys(redis_server)) == 1, "the pieces being deleted")
        store.close()


def test_a_server_that_ends_ends_although_payloads_are_on_their_way(world: World) -> None:
    host, _, port = world.server.address.rpartition(":")
    with Proxy((host, int(port))) as proxy, ThreadPoolExecutor(1) as pool:
        options = ClientOptions(token=world.tokens[Role.PRODUCER], deadline_s=30.0)
        store = GatewayStore(Route(proxy.address), options)
        proxy.fall_silent_after(MIB, to_target=True)
        writing = pool.submit(store.write_many, [[memoryview(bytearray(20 * MIB))]])
        eventually_sync(lambda: proxy.is_silent, "the payload on its way")
        assert 0 == world.server.stop(grace_s=20.0)
        proxy.speak()
        with pytest.raises(errors.StoreUnavailableError):
            writing.result(30)
        store.close()


# A whole run -------------------------------------------------------------------------------------


@pytest.mark.timeout(240)
@pytest.mark.long
def test_a_worker_and_a_learner_learn_through_one_port(world: World, tmp_path: Path) -> None:
    """They know an address and a token each; fragments go in, weights come out."""
    progress = tmp_path / "run" / "progress.jsonl"
    host, _, port = world.server.address.rpartition(":")
    environment = plain_environment() | {"OMP_NUM_THREADS": "1"}

    def start(stack: ExitStack, role: Role, address: str, *arguments: str) -> subprocess.Popen[str]:
        log = stack.enter_context((tmp_path / f"{role.value}.log").open("w"))
        process = subprocess.Popen(
            [sys.executable, "-m", "breadbox.cli.main", *arguments, "--server", address],
            env=environment | {"BREADBOX_TOKEN": world.tokens[role]},
            stdout=log,
            stderr=log,
            text=True,
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        return process

    with Proxy((host, int(port))) as proxy, ExitStack() as stack:
        learner = start(
            *(stack, Role.LEARNER, proxy.address, "learn", "--run-dir", str(progress.parent)),
            *("--fragments-per-batch", "8", "--minibatch-fragments", "8", "--no-tensorboard"),
        )
        worker = start(
            *(stack, Role.PRODUCER, proxy.address),
            *("rollout", "--env", "CartPole-v1", "--num-envs", "2"),
        )

        def updates() -> int:
            return len(progress.read_text().splitlines()) if progress.exists() else 0

        eventually_sync(lambda: updates() >= 5, "the learner learning", within_s=150.0)
        assert None is worker.poll(), (tmp_path / "producer.log").read_text()
        assert None is learner.poll(), (tmp_path / "learner.log").read_text()
    versions = [json.loads(line)["model_version"] for line in progress.read_text().splitlines()]
    assert versions == sorted(versions)
    said = (tmp_path / "producer.log").read_text() + (tmp_path / "learner.log").read_text()
    assert PASSWORD not in said
