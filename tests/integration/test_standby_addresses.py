"""Two servers behind names, certificates and tokens: whichever leads is found, and none other."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import breadbox
from breadbox.model import errors
from breadbox.model.options import Tls
from breadbox_server.access.authorization import Role
from support.certificates import Authority
from support.eventually import eventually_sync
from support.fragments import vector_fragment
from support.name_server import NameServer
from support.redis_server import RedisServer
from support.server_process import ServerProcess
from support.token_files import write_token_file

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

NAME = "breadbox.test"
HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
TAKEOVER_S = 20.0


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


class Crew:
    """Servers on one journal, each at an address of its own, with certificates."""

    def __init__(self, stack: ExitStack, redis: RedisServer, folder: Path) -> None:
        self._stack = stack
        self._redis = redis
        self._folder = folder
        self._authority = Authority(folder)
        self.tls = Tls(ca_file=self._authority.ca_file)
        self.token_file = folder / "tokens"
        self.tokens = write_token_file(self.token_file)
        self.port = "0"

    def server(self, host: str, *, named: str) -> ServerProcess:
        """One that does not run yet, with a certificate for `named`."""
        signed = self._authority.sign(f"at-{host}", host=named)
        server = ServerProcess(
            *("--store", self._redis.url, "--standby", "--tokens", str(self.token_file)),
            *("--tls-cert", str(signed.cert_file), "--tls-key", str(signed.key_file)),
            listen=f"{host}:{self.port}",
            log=self._folder / f"{host}.log",
        )
        self._stack.callback(lambda: server.__exit__(None, None, None))
        return server

    def client(self, address: str, token: str | None = None) -> breadbox.Client:
        token = token or self.tokens[Role.ADMIN]
        return self._stack.enter_context(breadbox.connect(address, tls=self.tls, token=token))

    def names(self, *hosts: str) -> NameServer:
        return self._stack.enter_context(NameServer(NAME, hosts))

    def pair(self, *, named: tuple[str, str]) -> tuple[ServerProcess, ServerProcess]:
        """A leader, and its standby on the same port of another address."""
        leader = self.server(HOSTS[0], named=named[0])
        leader.start(TAKEOVER_S)
        self.port = leader.address.rpartition(":")[2]
        standby = self.server(HOSTS[1], named=named[1])
        standby.start_standby()
        return leader, standby


@pytest.fixture
def crew(redis: RedisServer, tmp_path: Path) -> Iterator[Crew]:
    with ExitStack() as stack:
        yield Crew(stack, redis, tmp_path)


@pytest.mark.parametrize(
    "named", [HOSTS[:2], (",".join(HOSTS[:2]),) * 2], ids=["one-each", "one-of-all"]
)
def test_each_server_shows_a_certificate_for_its_own_address(
    crew: Crew, named: tuple[str, str]
) -> None:
    leader, standby = crew.pair(named=named)
    client = crew.client(f"{standby.address},{leader.address}")
    session = client.start_session().session_id
    client.append(vector_fragment(0, session_id=session))
    leader.kill()
    client.append(vector_fragment(1, session_id=session))
    with client.fetch(2) as lease:
        assert [0, 1] == sorted(each.fragment_index for each in lease.fragments())


def test_a_name_with_a_record_for_each_server_leads_to_the_one_that_leads(crew: Crew) -> None:
    leader, standby = crew.pair(named=(NAME, NAME))
    alone = crew.names(HOSTS[1])
    with (
        breadbox.connect(
            f"dns://{alone.address}/{NAME}:{crew.port}", tls=crew.tls, reconnect_s=0, deadline_s=5
        ) as lost,
        pytest.raises(errors.UnavailableError, match="none of those with this name leads"),
    ):
        lost.get_buffer()
    # The standby first, which a client that asks nobody for health might stay with.
    names = crew.names(HOSTS[1], HOSTS[0])
    client = crew.client(f"dns://{names.address}/{NAME}:{crew.port}")
    session = client.start_session().session_id
    client.append(vector_fragment(0, session_id=session))
    leader.kill()
    client.append(vector_fragment(1, session_id=session))
    # The other one comes again elsewhere, as a pod does; the name knows.
    third = crew.server(HOSTS[2], named=NAME)
    third.start_standby()
    names.hosts = (HOSTS[2], HOSTS[1])
    standby.kill()
    client.append(vector_fragment(2, session_id=session))
    with client.fetch(3) as lease:
        assert [0, 1, 2] == sorted(each.fragment_index for each in lease.fragments())


def test_a_certificate_for_another_name_is_refused_whoever_leads(crew: Crew) -> None:
    leader, standby = crew.pair(named=(HOSTS[0], HOSTS[2]))
    client = crew.client(f"{leader.address},{standby.address}")
    client.start_session()
    with pytest.raises(errors.TlsError, match="for another name"):
        crew.client(standby.address).get_buffer()
    names = crew.names(HOSTS[0], HOSTS[1])
    with pytest.raises(errors.TlsError, match="for another name"):
        crew.client(f"dns://{names.address}/{NAME}:{crew.port}").get_buffer()


def test_a_standby_refuses_tokens_as_the_leader_does_and_reads_them_again(crew: Crew) -> None:
    leader, standby = crew.pair(named=HOSTS[:2])
    old = crew.tokens[Role.ADMIN]

    def answer(server: ServerProcess, token: str) -> str:
        try:
            with breadbox.connect(
                server.address, tls=crew.tls, token=token, reconnect_s=0
            ) as client:
                client.get_buffer()
        except errors.ReplayBufferError as error:
            return type(error).__name__
        return "answered"

    def answers(token: str) -> list[str]:
        return [answer(each, token) for each in (leader, standby)]

    assert ["answered", "StandbyError"] == answers(old)
    assert ["UnauthenticatedError"] * 2 == answers("bbx_unknown")
    new = write_token_file(crew.token_file)[Role.ADMIN]
    eventually_sync(lambda: answers(new) == ["answered", "StandbyError"], "new tokens", within_s=30)
    assert ["UnauthenticatedError"] * 2 == answers(old)
