"""`docker compose up`, driven from outside: it trains, it is watched, it survives what kills it."""

import json
import re
from collections.abc import Iterator
from uuid import uuid4

import pytest

import breadbox
from breadbox.diagnosis import diagnose
from breadbox.model.types import AdmissionOutcome, BufferConfig
from support.composition import Composition
from support.eventually import eventually_sync
from support.fragments import vector_fragment

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1200)]

START_S = 180.0
"""Two cores import torch in three containers at once."""
BACK_S = 60.0


@pytest.fixture
def client(composition: Composition) -> Iterator[breadbox.Client]:
    """A client on this host, outside the containers' networks."""
    with breadbox.connect(
        composition.address,
        token=composition.token,
        store_url=composition.store_url,
        reconnect_s=BACK_S,
    ) as connected:
        eventually_sync(lambda: composition.is_healthy("server"), "health", within_s=START_S)
        yield connected


@pytest.fixture
def own_buffer(client: breadbox.Client) -> Iterator[str]:
    """A buffer that the composition's learner and workers do not touch."""
    name = f"outside-{uuid4().hex[:8]}"
    client.create_buffer(name, BufferConfig(fragments_per_chunk=1, capacity_chunks=64))
    client.start_session("s", buffer=name)
    yield name
    client.delete_buffer(name)


def trained_version(client: breadbox.Client) -> int:
    """Model version that the composition's learner has published, -1 before the first."""
    version = client.get_buffer().model_version
    return -1 if version is None else version


def admitted(client: breadbox.Client) -> int:
    """Fragments that the composition's workers have had admitted."""
    return dict(client.get_buffer().state.counters).get("fragments_admitted", 0)


def await_training(client: breadbox.Client, within_s: float = BACK_S) -> None:
    """Return once the learner has published three further versions."""
    before = trained_version(client)
    eventually_sync(lambda: trained_version(client) >= before + 3, "training", within_s=within_s)


def test_it_trains_out_of_the_box_and_shows_it(
    composition: Composition, client: breadbox.Client
) -> None:
    eventually_sync(lambda: trained_version(client) >= 3, "training", within_s=START_S)

    assert re.search(r"return", composition.logs("learner"))
    # With what everybody gets who sets nothing there is nothing to be warned of.
    assert [] == re.findall(r".* WARNING .*", composition.logs("server"))


def test_no_container_of_ours_runs_as_root(composition: Composition) -> None:
    users = {
        service: composition.docker("exec", composition.container(service), "id", "-u").strip()
        for service in ("server", "rollout_worker", "learner")
    }

    assert {"server": "10001", "rollout_worker": "10001", "learner": "10001"} == users


def test_no_secret_stands_in_a_process_list_a_log_or_what_the_engine_shows(
    composition: Composition, client: breadbox.Client
) -> None:
    """The client is asked for so that the server has started, and logged what it logs."""
    services = ("redis", "server", "rollout_worker", "learner", "prometheus")
    shown = [composition.docker("top", composition.container(service)) for service in services]
    shown += [composition.logs(service) for service in (*services, "secrets")]
    shown += [str(composition.inspect(service)) for service in services]
    shown.append(composition.metrics())
    made = composition.secrets()

    assert [] == [text for text in shown if any(secret in text for secret in made)]


def test_each_container_sees_the_secrets_that_are_its_own(composition: Composition) -> None:
    seen = {
        service: composition.docker(
            "exec", composition.container(service), "sh", "-c", "ls /secrets/*/* 2>/dev/null || :"
        ).split()
        for service in ("redis", "server", "rollout_worker", "learner", "prometheus")
    }

    assert {
        "redis": ["/secrets/redis/users.acl"],
        "server": ["/secrets/server/config.yml", "/secrets/server/tokens"],
        "rollout_worker": ["/secrets/producer/token"],
        "learner": ["/secrets/learner/token"],
        "prometheus": [],
    } == seen


def test_whoever_has_no_token_is_refused_by_the_server_and_by_redis(
    composition: Composition, client: breadbox.Client
) -> None:
    with (
        breadbox.connect(composition.address) as stranger,
        pytest.raises(breadbox.errors.UnauthenticatedError),
    ):
        stranger.get_buffer()
    said = composition.docker(
        "exec", composition.container("redis"), "redis-cli", "SET", "breadbox:x", "1"
    )

    assert "NOAUTH" in said


def test_secrets_that_are_there_stay_as_they_are(
    composition: Composition, client: breadbox.Client
) -> None:
    before = composition.secrets()
    composition.compose("run", "--rm", "--no-deps", "-T", "secrets", "make")

    assert before == composition.secrets()


def test_every_published_port_is_on_the_loopback_address(composition: Composition) -> None:
    hosts = {
        binding["HostIp"]
        for service in ("redis", "server", "prometheus")
        for bindings in composition.inspect(service)["NetworkSettings"]["Ports"].values()
        for binding in bindings or []
    }

    assert {"127.0.0.1"} == hosts


def test_a_client_outside_moves_payloads(client: breadbox.Client, own_buffer: str) -> None:
    results = client.append_many([vector_fragment(index) for index in range(8)], buffer=own_buffer)
    with client.fetch(fragment_count=8, max_wait_s=10, buffer=own_buffer) as lease:
        fetched = {fragment.fragment_index: fragment for fragment in lease.fragments()}

    assert [AdmissionOutcome.ADMITTED] * 8 == [result.outcome for result in results]
    assert list(range(8)) == sorted(fetched)
    assert all((fragment.obs == index).all() for index, fragment in fetched.items())


def test_prometheus_scrapes_our_series(composition: Composition, client: breadbox.Client) -> None:
    await_training(client, within_s=START_S)

    def admitted_by_prometheus() -> float:
        query = 'sum(breadbox_fragments_total{buffer="default",outcome="admitted"})'
        return sum(float(series["value"][1]) for series in composition.query(query))

    eventually_sync(lambda: admitted_by_prometheus() > 0, "our series", within_s=BACK_S)
    up = composition.query('up{job="breadbox"}')
    assert ["1"] == [series["value"][1] for series in up]

    def steps() -> list[float]:
        found = composition.query("breadbox_rollout_steps_total")
        return [float(series["value"][1]) for series in found]

    count = len(composition.containers("rollout_worker"))
    eventually_sync(
        lambda: len(steps()) == count and min(steps()) > 0, "each worker", within_s=BACK_S
    )


def test_every_alert_rule_is_evaluated_without_an_error(composition: Composition) -> None:
    eventually_sync(
        lambda: all(rule["health"] != "unknown" for rule in composition.rules()),
        "a first evaluation",
        within_s=BACK_S,
    )
    rules = composition.rules()

    assert rules
    assert [] == [rule for rule in rules if rule["health"] != "ok"]


def test_workers_can_be_scaled(composition: Composition, client: breadbox.Client) -> None:
    def workers() -> int:
        return client.get_buffer().state.worker_count

    composition.compose(
        "up", "--detach", "--no-build", "--no-recreate", "--scale", "rollout_worker=3"
    )

    assert 3 == len(composition.containers("rollout_worker"))
    # Each container has four environments, and each environment is a worker of its own.
    eventually_sync(lambda: workers() >= 12, "twelve workers", within_s=START_S)


def test_fsck_is_run_beside_the_server_as_the_page_says(
    composition: Composition, client: breadbox.Client
) -> None:
    """Before anything is killed: Redis' last second may have been the deletion of payloads."""
    running = json.loads(
        composition.docker(
            "exec", composition.container("server"), "breadbox", "fsck", "--json", "--settle-s", "9"
        )
    )
    command = ("run", "--rm", "--no-deps", "-T", "server", "fsck", "--json", "--no-checksums")
    beside = json.loads(composition.compose(*command, "--settle-s", "9"))

    for report in (running, beside):
        assert [0, 0, 0] == [report[each] for each in ("missing", "orphans", "corrupt")]


def test_training_goes_on_after_the_server_was_killed(
    composition: Composition, client: breadbox.Client
) -> None:
    await_training(client, within_s=START_S)
    composition.kill("server")
    composition.start("server")

    await_training(client, within_s=START_S)


def test_acknowledged_fragments_survive_the_death_of_the_server(
    composition: Composition, client: breadbox.Client, own_buffer: str
) -> None:
    client.append_many([vector_fragment(index) for index in range(8)], buffer=own_buffer)
    composition.kill("server")
    composition.start("server")

    with client.fetch(fragment_count=8, max_wait_s=BACK_S, buffer=own_buffer) as lease:
        assert list(range(8)) == sorted(one.fragment_index for one in lease.fragments())


def test_acknowledged_fragments_survive_the_death_of_redis(
    composition: Composition, client: breadbox.Client, own_buffer: str
) -> None:
    """On a slow disk Redis acknowledges what its file does not have yet; the server has it."""
    client.append_many([vector_fragment(index) for index in range(8)], buffer=own_buffer)
    composition.kill("redis")
    composition.start("redis")
    eventually_sync(lambda: composition.is_healthy("redis"), "Redis", within_s=BACK_S)

    with client.fetch(fragment_count=8, max_wait_s=BACK_S, buffer=own_buffer) as lease:
        assert list(range(8)) == sorted(one.fragment_index for one in lease.fragments())


def test_nothing_acknowledged_is_lost_when_everything_is_stopped_and_started(
    composition: Composition, client: breadbox.Client, own_buffer: str
) -> None:
    """What an operator does who restarts a machine."""
    client.append_many([vector_fragment(index) for index in range(32)], buffer=own_buffer)
    before = client.get_buffer(own_buffer)
    composition.compose("stop")
    composition.up()
    eventually_sync(lambda: composition.is_healthy("server"), "health", within_s=START_S)
    after = client.get_buffer(own_buffer)
    with client.fetch(fragment_count=32, max_wait_s=BACK_S, buffer=own_buffer) as lease:
        fetched = {one.fragment_index: one for one in lease.fragments()}

    assert (before.session_id, 32) == (after.session_id, after.state.fragment_count)
    assert list(range(32)) == sorted(fetched)
    assert all((one.obs == index).all() for index, one in fetched.items())
    assert "CRITICAL" not in composition.logs("redis")
    assert "append-only" not in composition.logs("server")


def test_training_goes_on_after_redis_was_killed(
    composition: Composition, client: breadbox.Client
) -> None:
    await_training(client, within_s=START_S)
    composition.kill("redis")
    composition.start("redis")

    await_training(client, within_s=START_S)


def test_a_learner_that_has_reached_its_target_trains_again_as_the_page_says(
    composition: Composition, client: breadbox.Client
) -> None:
    command = ("up", "--detach", "--no-build", "--no-deps", "learner")
    await_training(client, within_s=START_S)

    def waits() -> int:
        """Times that workers have said that they wait for a learner."""
        return composition.logs("rollout_worker").count("waiting for a learner")

    before = waits() + len(composition.containers("rollout_worker"))
    composition.compose(*command, BREADBOX_RUN="easy", BREADBOX_TARGET_RETURN="1")
    eventually_sync(
        lambda: "ended: target_reached" in composition.logs("learner"), within_s=START_S
    )
    ended = client.get_buffer()
    eventually_sync(lambda: waits() >= before, "workers that wait", within_s=BACK_S)
    composition.compose(*command, BREADBOX_RUN="second")

    assert "the last session has ended" in diagnose(ended, ended, 1.0).headline
    await_training(client, within_s=START_S)


SERVERS = ("server", "standby")


def leader_of(composition: Composition) -> str:
    """The service that leads, which may have changed on a busy machine; nobody is killed."""
    found: list[str] = []

    def leads() -> bool:
        found[:] = [each for each in SERVERS if composition.stands_by(each) == ""]
        return len(found) == 1

    eventually_sync(leads, "one server that leads", within_s=START_S)
    return found[0]


@pytest.fixture
def pair(composition: Composition, client: breadbox.Client) -> Iterator[breadbox.Client]:
    """A client of both servers: the profile `ha` is brought up beside what runs."""
    composition.compose("--profile", "ha", "up", "--detach", "--no-build")
    eventually_sync(lambda: composition.is_healthy("standby"), "health", within_s=START_S)
    with breadbox.connect(
        composition.addresses,
        token=composition.token,
        store_url=composition.store_url,
        reconnect_s=BACK_S,
    ) as connected:
        yield connected
    # Others know of one server.
    composition.compose("--profile", "ha", "rm", "--stop", "--force", "standby")
    composition.compose("up", "--detach", "--no-build")
    eventually_sync(lambda: composition.stands_by("server") == "", "the lead", within_s=START_S)


def test_training_goes_on_with_the_other_server_when_the_leaders_container_is_killed(
    composition: Composition, pair: breadbox.Client
) -> None:
    """To and back; workers and learner were there before the second server was."""
    await_training(pair, within_s=START_S)
    for _ in range(2):
        leader = leader_of(composition)
        (other,) = set(SERVERS) - {leader}
        before = admitted(pair)
        composition.kill(leader)
        await_training(pair, within_s=START_S)
        assert "" == composition.stands_by(other)
        assert admitted(pair) > before

        composition.start(leader)
        eventually_sync(
            lambda: composition.is_healthy(leader) and composition.stands_by(leader) != "",  # noqa: B023
            "a standby",
            within_s=START_S,
        )
