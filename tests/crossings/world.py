"""What a row stands on: store, journal, users, certificates, tokens, and one or two servers.

The server's way to Redis leads through proxies, a set for each server, so that one can be cut off;
clients have a way of their own. Nodes of a cluster tell their own addresses, so there all stand
still instead, and a directory is beside its server: that one is killed instead.
"""

import signal
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import redis
import yaml

import breadbox
from breadbox.stores.keys import payload_id_of_key
from breadbox_server.access.credentials import ACL, CONFIG, write_secrets
from chaos.servers import Servers
from crossings.settings import Setting
from support.certificates import Authority
from support.eventually import eventually_sync
from support.proxy import Proxy
from support.redis_cluster import READY_S, RedisCluster
from support.redis_server import (
    RedisServer,
    binary_since_7,
    redis_binary,
    release_of,
    valkey_binary,
)
from support.server_process import ServerProcess
from support.token_files import write_tokens

CAPACITY = 24
"""Fragments that a buffer holds."""
LEASE_S = 2.0
TEAMS = ("red", "blue")
ROLES = ("producer", "learner", "admin")


def binary_of(setting: Setting) -> str:
    """The server that a row's Redis is; with users one that reads its data as user `default`."""
    if setting.release == "valkey":
        return valkey_binary()
    return binary_since_7() if setting.acl else redis_binary()


def described(setting: Setting) -> str:
    """A row, and the very release that its Redis is."""
    if setting.store == "file":
        return str(setting)
    return f"{setting}, on {release_of(binary_of(setting))}"


@dataclass
class World:
    """The servers of a row, and how to reach them."""

    setting: Setting
    folder: Path
    stack: ExitStack
    wrong: list[str]
    redises: list[RedisServer] = field(default_factory=list)
    """Of payloads first, then of the journal."""
    cluster: RedisCluster | None = None
    proxies: list[list[Proxy]] = field(default_factory=list)
    """For each server one to each Redis."""
    environments: list[dict[str, str]] = field(default_factory=list)
    """Of each server's store and journal: they may hold passwords."""
    servers: list[ServerProcess] = field(default_factory=list)
    tokens: dict[str, str] = field(default_factory=dict)
    tls: breadbox.Tls | None = None
    _users: dict[str, str] = field(default_factory=dict)
    """Name and password, as they stand in URLs, of `server` and `client`."""

    # Building ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start everything."""
        if self.setting.acl:
            self._make_users()
        self._start_store()
        common = [*self._limits(), *self._tls(), *self._tokens(), *self._path()]
        for number in range(2 if self.setting.standby else 1):
            self.servers.append(self._make_server(number, common))
        self.stack.callback(self._kill)
        self.start_servers()

    def _make_users(self) -> None:
        """The users that `breadbox secrets` writes for one installation."""
        write_secrets(self.folder / "secrets", "HOST:0")
        urls = yaml.safe_load((self.folder / "secrets" / CONFIG).read_text())
        for user, option in (("server", "store"), ("client", "client-store")):
            self._users[user] = urls[option].removeprefix("redis://").partition("@")[0] + "@"

    def _start_store(self) -> None:
        acl = self.folder / "secrets" / ACL if self.setting.acl else None
        binary = binary_of(self.setting)
        match self.setting.store:
            case "cluster":
                made = RedisCluster(sync=self.setting.sync, binary=binary)
                self.cluster = self.stack.enter_context(made)
                if acl is not None:  # Its nodes have met as nobody in particular.
                    self._stop_store()
                    self._start_nodes()
            case "redis" | "two-redis":
                for _ in range(1 if self.setting.store == "redis" else 2):
                    server = RedisServer(
                        with_tcp=True,
                        is_durable=True,
                        users=acl,
                        sync=self.setting.sync,
                        binary=binary,
                    )
                    self.redises.append(self.stack.enter_context(server))

    def _make_server(self, number: int, common: list[str]) -> ServerProcess:
        places = []
        if self.redises:
            ways = [
                self.stack.enter_context(Proxy(("127.0.0.1", each.port))) for each in self.redises
            ]
            self.proxies.append(ways)
            places = [self._url("server", f"redis://{{}}{way.address}/0") for way in ways]
        elif self.cluster is not None:
            places = [self._url("server", self.cluster.url.replace("//", "//{}"))]
        else:
            places = [f"file://{self.folder / 'store'}"]
        stores = {"BREADBOX_STORE": places[0]}
        if len(places) > 1:
            stores["BREADBOX_JOURNAL"] = places[1]
        self.environments.append(dict(stores))
        if self.setting.store != "file" and self.setting.path != "gateway":
            stores["BREADBOX_CLIENT_STORE"] = self.client_url
        return ServerProcess(
            *common,
            *(["--standby"] if self.setting.standby else []),
            *("--local-socket", str(self.folder / f"server-{number}.sock")),
            log=self.folder / f"server-{number}.log",
            environment=stores,
        )

    def _limits(self) -> list[str]:
        return [
            *("--preset", self.setting.preset, "--schema", self.setting.schema),
            *("--capacity-chunks", str(CAPACITY // self.setting.per_chunk)),
            *("--fragments-per-chunk", str(self.setting.per_chunk)),
            *("--assembly", "groups" if self.setting.per_chunk > 1 else "consecutive"),
            *(["--groups-per-version", "10000"] if self.setting.assembly == "tickets" else []),
            *("--lease-s", str(LEASE_S), "--unannounced-s", "6", "--snapshot-entries", "100"),
            *("--drain-grace-s", "1", "--seed", "7"),
            *(["--journal-sync"] if self.setting.sync == "always" else []),
        ]

    def _tls(self) -> list[str]:
        if not self.setting.tls:
            return []
        authority = Authority(self.folder)
        signed = authority.sign("server")
        self.tls = breadbox.Tls(ca_file=authority.ca_file)
        return ["--tls-cert", str(signed.cert_file), "--tls-key", str(signed.key_file)]

    def _tokens(self) -> list[str]:
        if not self.setting.tokens:
            return []
        path = self.folder / "tokens"
        names = [f"{role} {team}-{role}" for team in TEAMS for role in ROLES]
        lines = [f"{name} buffers={name.split()[1].split('-')[0]}*" for name in names]
        made = write_tokens(path, *lines)
        self.tokens = dict(zip((name.split()[1] for name in names), made, strict=True))
        return ["--tokens", str(path)]

    def _path(self) -> list[str]:
        return {
            "inline": [],
            "gateway": ["--gateway", "--inline-size-max", "0"],
            "direct": ["--inline-size-max", "0"],
        }[self.setting.path]

    def _url(self, user: str, pattern: str) -> str:
        return pattern.format(self._users.get(user, ""))

    @property
    def client_url(self) -> str:
        """The store as clients have it."""
        if self.cluster is not None:
            return self._url("client", self.cluster.url.replace("//", "//{}"))
        return self._url("client", f"redis://{{}}127.0.0.1:{self.redises[0].port}/0")

    # Clients -----------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """Of all servers, as clients take it."""
        return ",".join(each.address for each in self.servers)

    def token(self, team: str, role: str) -> str | None:
        """Of one of a team's clients; None: nobody asks for any."""
        return self.tokens.get(f"{team}-{role}")

    def connect(
        self, buffer: str, role: str, *, deadline_s: float = 10.0, reconnect_s: float = 30.0
    ) -> breadbox.Client:
        """A client of the team whose buffer this is; the caller closes it."""
        return breadbox.connect(
            self.address,
            buffer=buffer,
            tls=self.tls,
            token=self.token(buffer.partition("-")[0], role),
            deadline_s=deadline_s,
            reconnect_s=reconnect_s,
        )

    def environment(self, buffer: str, role: str) -> Mapping[str, str]:
        """The variables by which a client of another process connects as `connect` does."""
        told = {
            "BREADBOX_SERVER": self.address,
            "BREADBOX_BUFFER": buffer,
            "BREADBOX_TOKEN": self.token(buffer.partition("-")[0], role) or "",
            "BREADBOX_TLS_CA": str(self.tls.ca_file) if self.tls else "",
        }
        return {name: text for name, text in told.items() if text}

    # Life --------------------------------------------------------------------------------------

    @property
    def pair(self) -> Servers:
        """Both servers, of which one leads."""
        return Servers(self.servers, self.wrong)

    def start_servers(self) -> None:
        """Start one, or two of which the first leads."""
        self.pair.start()

    def stop_servers(self) -> None:
        """Ask them to end, the leader last, and see that each does, and well."""
        standing_by = [self.pair.standby()] if self.setting.standby else []
        for server in [*standing_by, *(each for each in self.servers if each not in standing_by)]:
            status = server.stop()
            if status != 0:
                self.wrong.append(f"a server that was asked to end did so with status {status}")

    def stop_store(self) -> None:
        """Let Redis end in good order; a directory needs no end."""
        self._stop_store()

    def start_store(self) -> None:
        """Start Redis on what it left on disk."""
        for each in self.redises:
            each.start()
        if self.cluster is not None:
            self._start_nodes()

    def _stop_store(self) -> None:
        for each in self.redises:
            each.stop()
        for node in self.cluster.nodes if self.cluster is not None else ():
            node.stop()

    def _start_nodes(self) -> None:
        assert self.cluster is not None
        acl = ("--aclfile", str(self.folder / "secrets" / ACL)) if self.setting.acl else ()
        for node in self.cluster.nodes:
            node.start(*acl)
        eventually_sync(self._is_whole, "a whole cluster", within_s=READY_S)

    def _is_whole(self) -> bool:
        """Whether every node takes the cluster for one that serves."""
        for client in self._clients():
            with client:
                try:
                    client.get("breadbox:whole")
                except redis.exceptions.MovedError:
                    continue
                except redis.RedisError:
                    return False
        return True

    def signal_store(self, number: int) -> None:
        """Send a signal to each node of the cluster."""
        assert self.cluster is not None
        for node in self.cluster.nodes:
            node.signal(number)

    def heal(self) -> None:
        """End what was done to the ways, and wake who was stopped."""
        for ways in self.proxies:
            for way in ways:
                way.speak()
        if self.cluster is not None:
            self.signal_store(signal.SIGCONT)

    def leader(self) -> ServerProcess:
        """The one that serves."""
        return self.pair.leader()

    def payloads(self) -> list[str]:
        """What is in the store, confirmed or not, beside the journal."""
        if self.setting.store == "file":
            places = ("payloads", "groups", "unannounced")
            files = (
                each for place in places for each in (self.folder / "store" / place).rglob("*")
            )
            return [path.name for path in files if path.is_file()]
        found = []
        for client in self._clients():
            with client:
                keys = list(client.scan_iter("breadbox:{*}:*", count=1000))
            found += [str(key) for key in keys if payload_id_of_key(key) is not None]
        return found

    def _clients(self) -> list[redis.Redis]:
        """Plain ones, of each process that may hold payloads, with the server's rights."""
        user, _, password = self._users.get("server", "").rstrip("@").partition(":")
        ports = [each.port for each in self.redises[:1]]
        ports += [each.port for each in self.cluster.nodes] if self.cluster is not None else []
        return [
            redis.Redis(port=port, username=user or None, password=password or None)
            for port in ports
        ]

    def _kill(self) -> None:
        self.heal()
        self.pair.kill()
