"""What can happen in a chaos run: each fault by its name, with how often it is chosen."""

import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import breadbox
from breadbox.model.errors import ReplayBufferError
from breadbox.model.types import BufferConfig
from chaos.servers import TAKEN, Servers
from chaos.tally import Older
from chaos.worlds import DiskWorld, RedisWorld
from support.proxy import Proxy
from support.server_process import ServerProcess

if TYPE_CHECKING:
    from chaos.run import Actor, Chaos

WEIGHTS: Mapping[str, int] = {
    "kill-server": 30,
    "end-server": 6,
    "kill-standby": 6,
    "kill-actor": 20,
    "kill-mirror": 8,
    "kill-redis": 8,
    "stop-server": 6,
    "stop-actor": 6,
    "stop-redis": 4,
    "cut-server": 6,
    "cut-store": 6,
    "second-server": 3,
    "take-over": 4,
    "replace-stopped": 4,
    "older-redis": 4,
    "empty-redis": 5,
    "fill-disk": 8,
}
OF_REDIS = {
    *("kill-redis", "stop-redis", "cut-store", "take-over", "replace-stopped"),
    *("older-redis", "empty-redis"),
}
"""Faults that need Redis; a directory is locked by whoever runs, asleep or not."""
OF_DISK = {"fill-disk"}
OF_ONE_SERVER = ("cut-server", "second-server")
"""Faults of a world in which nobody stands by."""
LASTS_S = (0.2, 5.0)
END_S = 45.0
"""Within which a server that was refused, or replaced, has to be gone."""
CERTIFY_S = 60.0


class Faults:
    """Lets one thing after the other happen; what lasts ends later, while others happen."""

    def __init__(self, chaos: "Chaos", names: set[str]) -> None:
        self._chaos = chaos
        self._rng = chaos.rng
        self._actions: dict[str, Callable[[], None]] = {
            "kill-server": self._kill_server,
            "kill-actor": partial(self._kill_actor, chaos.actors),
            "kill-mirror": partial(self._kill_actor, chaos.mirrors),
            "stop-server": self._stop_server,
            "stop-actor": self._stop_actor,
            "cut-server": partial(self._cut, "clients", chaos.front),
            "second-server": self._start_second,
        }
        world = chaos.world
        if isinstance(chaos.server, Servers):
            assert isinstance(world, RedisWorld)
            self._actions |= self._of_pair(chaos.server)
            self._actions |= {
                "kill-redis": partial(self._kill_redis, world),
                "stop-redis": partial(self._stop_redis, world),
                "cut-store": partial(self._cut_store, world),
            }
            for name in OF_ONE_SERVER:
                self._actions.pop(name, None)
        elif isinstance(world, RedisWorld):
            self._actions |= {
                "kill-redis": partial(self._kill_redis, world),
                "stop-redis": partial(self._stop_redis, world),
                "cut-store": partial(self._cut_store, world),
                "take-over": self._take_over,
                "replace-stopped": self._replace_stopped,
                "older-redis": partial(self._bring_older_redis, world),
                "empty-redis": partial(self._empty_redis, world),
            }
        elif isinstance(world, DiskWorld) and world.is_small:
            self._actions["fill-disk"] = partial(self._fill_disk, world)
        self.names = [name for name in self._actions if name in names]
        self._first = self._rng.sample(self.names, len(self.names))
        """Each once, before any is chosen by its weight: so that a short run has them all."""
        self._lasting: dict[str, tuple[float, Callable[[], None]]] = {}
        """What lasts: until when, and what ends it, by what it is done to."""

    def happen(self) -> None:
        """Let one thing happen: each once at first, then by weight."""
        self._end_what_is_over()
        if isinstance(self._chaos.server, Servers) and not self.is_lasting("redis"):
            self._chaos.server.mend()
        world = self._chaos.world
        if (
            "older-redis" in self.names
            and isinstance(world, RedisWorld)
            and self._rng.random() < 0.3
        ) and "redis" not in self._lasting:
            world.copy()
        if self._first:
            name = self._first.pop()
        else:
            (name,) = self._rng.choices(self.names, [WEIGHTS[each] for each in self.names])
        self._chaos.tally.faults[name] += 1
        self._chaos.say(name)
        self._actions[name]()

    def _of_pair(self, pair: Servers) -> dict[str, Callable[[], None]]:
        """What happens to whichever leads, and to the other."""

        def kill() -> None:
            self.heal("redis", "store")
            leader = pair.leader()
            pair.again(leader, leader.kill)

        def end() -> None:
            self.heal("redis", "store")
            leader = pair.leader()
            pair.again(leader, leader.stop)

        def kill_standby() -> None:
            self.heal("redis", "store")
            standby = pair.standby()
            pair.again(standby, standby.kill)

        def stop() -> None:
            self.heal("server", "redis", "store")
            leader = pair.leader()
            leader.signal(signal.SIGSTOP)

            def go_on() -> None:
                if leader.is_running():
                    leader.signal(signal.SIGCONT)

            self._last("server", go_on)

        return {
            "kill-server": kill,
            "end-server": end,
            "kill-standby": kill_standby,
            "stop-server": stop,
        }

    @property
    def has_new(self) -> bool:
        """Whether one of them has not happened yet."""
        return bool(self._first)

    def is_lasting(self, victim: str) -> bool:
        """Whether somebody is asleep, or cut off."""
        return victim in self._lasting

    def heal(self, *victims: str) -> None:
        """End what lasts for these; for all where none is named."""
        for victim in victims or tuple(self._lasting):
            if victim in self._lasting:
                _, end = self._lasting.pop(victim)
                end()

    def _end_what_is_over(self) -> None:
        now = time.monotonic()
        for victim in [each for each, (until, _) in self._lasting.items() if until <= now]:
            self.heal(victim)

    def _last(self, victim: str, end: Callable[[], None]) -> None:
        self._lasting[victim] = (time.monotonic() + self._rng.uniform(*LASTS_S), end)

    # --- killing -----------------------------------------------------------------------------

    def _kill_server(self) -> None:
        self._lasting.pop("server", None)
        self._chaos.server.kill()
        time.sleep(self._rng.choice((0.0, 0.0, 0.5)))
        self._start_server()

    def _start_server(self) -> None:
        """Start the server, with its store at hand: it refuses to start without."""
        self.heal("redis", "store", "disk")
        self._chaos.server.start()
        self._chaos.lead_to_server()

    def _kill_actor(self, actors: Sequence["Actor"]) -> None:
        actor = self._rng.choice(actors)
        self._lasting.pop(actor.name, None)
        actor.kill()
        actor.start()

    def _kill_redis(self, world: RedisWorld) -> None:
        self._lasting.pop("redis", None)
        world.redis.kill()
        time.sleep(self._rng.uniform(0.0, 0.5))
        world.redis.start()

    def _empty_redis(self, world: RedisWorld) -> None:
        self.heal("redis")
        with world.redis.client() as client:
            client.flushall()

    # --- stopping, cutting, filling ----------------------------------------------------------

    def _stop_server(self) -> None:
        self.heal("server")
        server = self._only_server()
        server.signal(signal.SIGSTOP)
        self._last("server", partial(server.signal, signal.SIGCONT))

    def _stop_actor(self) -> None:
        actor = self._rng.choice(self._chaos.actors)
        self.heal(actor.name)
        if not actor.has_ended():
            actor.signal(signal.SIGSTOP)
            self._last(actor.name, partial(actor.signal, signal.SIGCONT))

    def _stop_redis(self, world: RedisWorld) -> None:
        self.heal("redis")
        world.redis.signal(signal.SIGSTOP)
        self._last("redis", partial(world.redis.signal, signal.SIGCONT))

    def _cut(self, victim: str, proxy: Proxy) -> None:
        self.heal(victim)
        proxy.fall_silent()
        self._last(victim, partial(proxy.speak, with_reset=self._rng.random() < 0.3))

    def _cut_store(self, world: RedisWorld) -> None:
        if self._rng.random() < 0.5:
            self._cut("store", world.of_server)
        else:
            self._cut("store of clients", world.of_clients)

    def _fill_disk(self, world: DiskWorld) -> None:
        self.heal("disk")
        world.fill()
        self._last("disk", world.heal)

    # --- several servers ---------------------------------------------------------------------

    def _start_second(self) -> None:
        """Start another server, which nobody asked for: one of the two goes on."""
        self.heal()
        self._certify()
        second = self._chaos.new_server()
        if self._serves(second):
            # On a busy machine the first may have shown no sign of life for long enough.
            self._chaos.tally.faults["second-server took over"] += 1
            self._expect_end(self._only_server())
            self._succeed(second)
        else:
            self._certify()

    def _take_over(self) -> None:
        self.heal()
        second = self._chaos.new_server("--take-over")
        if self._serves(second):
            self._expect_end(self._only_server())
            self._succeed(second)
        else:
            self._chaos.tally.wrong.append(f"--take-over was refused: {second.log.read_text()}")

    def _replace_stopped(self) -> None:
        self.heal()
        old = self._only_server()
        old.signal(signal.SIGSTOP)
        second = self._chaos.new_server()
        serves = self._serves(second)
        if serves:
            time.sleep(self._rng.uniform(0.0, 2.0))
        old.signal(signal.SIGCONT)
        if serves:
            self._chaos.server = second
            self._chaos.lead_to_server()
            self._expect_end(old)
            self._succeed(second)
        else:
            self._chaos.tally.wrong.append(
                f"a stopped server was not replaced: {second.log.read_text()[-500:]}"
            )

    def _serves(self, second: ServerProcess) -> bool:
        """Start a server; whether it serves within its time."""
        try:
            second.start(within_s=END_S)
        except AssertionError:
            return False
        except TimeoutError:
            self._chaos.tally.hung.append("a second server neither served nor ended")
            return False
        return True

    def _expect_end(self, old: ServerProcess) -> None:
        """See a server that was replaced end by itself, with the status that says why."""
        try:
            status = old.wait(END_S)
        except subprocess.TimeoutExpired:
            self._chaos.tally.hung.append("a server that was replaced did not end")
            return
        if status != TAKEN:
            self._chaos.tally.wrong.append(f"a server that was replaced ended with {status}")

    def _only_server(self) -> ServerProcess:
        assert isinstance(self._chaos.server, ServerProcess)
        return self._chaos.server

    def _succeed(self, second: ServerProcess) -> None:
        self._chaos.server = second
        self._chaos.lead_to_server()

    # --- a Redis of earlier ------------------------------------------------------------------

    def _bring_older_redis(self, world: RedisWorld) -> None:
        """Let Redis come back from a copy, while the server lives or is down."""
        self.heal()
        if not world.copies:
            world.copy()
            time.sleep(self._rng.uniform(0.5, 2.0))
        rolls_back = self._rng.random() < 0.5
        copied_at, path = self._rng.choice(world.copies)
        if rolls_back:
            self._chaos.server.kill()
        world.redis.kill()
        world.redis.restore_data(path)
        world.forget_copies()
        world.redis.start()
        if rolls_back:
            self._chaos.server.start()
            self._chaos.lead_to_server()
        self._certify()
        self._chaos.tally.faults[f"older-redis, server {'down' if rolls_back else 'up'}"] += 1
        self._chaos.tally.olders.append(Older(copied_at, time.monotonic(), rolls_back))

    def _certify(self) -> None:
        """See the server make something durable: from now on its books are in its journal."""
        try:
            with breadbox.connect(
                self._chaos.server.address, deadline_s=5.0, reconnect_s=CERTIFY_S
            ) as client:
                client.update_buffer("default", BufferConfig())
        except ReplayBufferError as error:
            self._chaos.tally.hung.append(
                f"the server made nothing durable for {CERTIFY_S} s: {error}"
            )
