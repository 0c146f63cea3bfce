"""The process of environments: `python -m breadbox_rollout.processes.host DESCRIPTOR`.

The worker starts it with one end of a socket. A message is one byte of kind, then JSON:

    worker to process   C {config}    once, first
                        S             step: actions are in the arrays
    process to worker   H             made; has a descriptor of the parts' JSON, which has no bound,
                                      and one of each part's arrays
                        D [{notes}]   done: answers are in the arrays
                        F {failure}   failed; the process ends

The process ends when the socket closes, and the kernel kills it when the worker is killed.
"""

import ctypes
import json
import os
import re
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from breadbox.model.errors import InvalidRequestError
from breadbox_rollout.environments.arrays import GroupArrays, create_arrays
from breadbox_rollout.environments.environments import EnvSpec, make_environment, takes_seed
from breadbox_rollout.environments.failures import EnvironmentFailedError, FailureKind
from breadbox_rollout.environments.origin import wrappers_of
from breadbox_rollout.environments.parallel import ParallelUnit, Seat, is_parallel
from breadbox_rollout.environments.space_codec import Space, decode_space, encode_space
from breadbox_rollout.environments.units import EnvGroup, GroupOptions, Recorder, SingleUnit, Unit
from breadbox_rollout.environments.vector import VectorUnit, is_vector

MESSAGE_BYTES_MAX = 128 * 1024
PARTS_MAX = 16
"""Most policies that share the environments of a process."""
_PR_SET_PDEATHSIG = 1
_ROUNDS_PER_MEMORY_CHECK = 64


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends, even by a kill."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def send(connection: socket.socket, kind: bytes, data: Any = None) -> None:
    """Send one message."""
    body = b"" if data is None else json.dumps(data).encode()
    connection.send(kind + body)


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of one pair of spaces: one for each label of each environment, by environment."""

    observations: Space
    actions: Space
    labels: list[str]
    """Names of agents; [""] for an environment of one agent."""
    env_count: int


def row_label(agent: str) -> str:
    """Return an agent's name for worker ids."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", agent)


def assigned(agents: list[str], patterns: list[str]) -> list[list[str]]:
    """Return the agents of each shell pattern; an agent belongs to its first match."""
    by_id: dict[str, str] = {}
    for agent in agents:
        other = by_id.setdefault(row_label(agent), agent)
        if other != agent:
            raise _unusable(f"agents {other!r} and {agent!r} have the same worker id")
    found: list[list[str]] = [[] for _ in patterns]
    for agent in agents:
        places = [i for i, pattern in enumerate(patterns) if fnmatchcase(agent, pattern)]
        if not places:
            raise _unusable(f"--agents names no policy for agent {agent!r}")
        found[places[0]].append(agent)
    for pattern, named in zip(patterns, found, strict=True):
        if not named:
            raise _unusable(f"--agents names {pattern!r}, but the agents are {', '.join(agents)}")
    return found


def _common_spaces(env: Any, agents: list[str]) -> tuple[Space, Space]:
    spaces = [(env.observation_space(agent), env.action_space(agent)) for agent in agents]
    for agent, other in zip(agents, spaces, strict=True):
        if other != spaces[0]:
            raise _unusable(
                f"agents {agents[0]!r} and {agent!r} have other spaces and cannot share a policy: "
                "give them policies of their own with --agents"
            )
    return spaces[0]


def _encoded(space: Space, path: str) -> dict[str, Any]:
    try:
        return encode_space(space, path)
    except InvalidRequestError as error:
        raise _unusable(str(error)) from error


def _unusable(detail: str) -> EnvironmentFailedError:
    return EnvironmentFailedError(FailureKind.BUILD_RAISED, detail)


class Host:
    """Make the environments, introduce them to the worker, and play rounds until the end."""

    def __init__(self, connection: socket.socket, config: dict[str, Any]) -> None:
        self._connection = connection
        self._spec = EnvSpec(**config["env"])
        options = config["group"]
        self._options = GroupOptions(**{**options, "seeds": tuple(options["seeds"])})
        self._memory_bytes_max = int(config["memory_bytes_max"])
        self._recording = config["recording"]
        self._env_indices = config["env_indices"]
        self._agents: list[str] = config["agents"]
        self._parts: list[GroupArrays] = []
        self._made_count = -1

    def run(self) -> None:
        """Serve the worker until it closes the socket."""
        group = self._make_group()
        try:
            group.start()
            self._send_done(group)
            self._serve(group)
        except EnvironmentFailedError as failure:
            # The round's other notes must not be lost with the process.
            failure.notes = group.notes
            raise
        finally:
            group.close()

    def _make_group(self) -> EnvGroup:
        try:
            env = self._make(0)
            make_units = self._plan(env)
        except EnvironmentFailedError:
            raise
        except Exception as error:
            raise EnvironmentFailedError(FailureKind.BUILD_RAISED, repr(error)) from error
        count = 1 if is_vector(env) else len(self._options.seeds)
        group = EnvGroup(
            lambda index: make_units(self._make(index), index),
            count,
            self._parts[0],
            self._options,
            time.monotonic,
        )
        group.adopt(0, make_units(env, 0))
        return group

    def _make(self, index: int) -> Any:
        seed, self._made_count = self._options.seeds[index], self._made_count + 1
        # An environment made again in the same process gets another seed, so episodes differ.
        return make_environment(
            self._spec, len(self._options.seeds), seed + len(self._options.seeds) * self._made_count
        )

    def _plan(self, env: Any) -> Callable[[Any, int], Unit]:
        """Introduce the parts to the worker; return a function that makes units of environments."""
        if is_vector(env):
            return self._plan_vector(env)
        if is_parallel(env):
            return self._plan_parallel(env)
        if hasattr(env, "agent_selection"):
            raise _unusable("its agents act in turn: pettingzoo.utils.aec_to_parallel makes them "
                            "act at the same time")  # fmt: skip
        self._check_one_agent()
        self._introduce(
            env, [_Part(env.observation_space, env.action_space, [""], len(self._options.seeds))]
        )
        (arrays,) = self._parts
        recorders = self._recorders(arrays)
        steps_max = self._options.episode_steps_max

        def make_unit(env: Any, index: int) -> Unit:
            recorder = None if recorders is None else recorders[index]
            return SingleUnit(env, index, arrays, steps_max, recorder)

        return make_unit

    def _plan_vector(self, env: Any) -> Callable[[Any, int], Unit]:
        self._check_one_agent()
        self._check_not_recorded()
        if self._options.episode_steps_max is not None:
            raise _unusable("a vector environment truncates its episodes itself: leave out "
                            "--episode-steps-max and configure it there")  # fmt: skip
        if self._options.rebuild_interval_s:
            raise _unusable("a vector environment is never between episodes: leave "
                            "--rebuild-interval-s at 0")  # fmt: skip
        spaces = (env.single_observation_space, env.single_action_space)
        self._introduce(env, [_Part(*spaces, [""], len(self._options.seeds))])
        (arrays,) = self._parts
        is_seeded = takes_seed(self._spec)
        return lambda env, _: VectorUnit(env, arrays, is_seeded=is_seeded)

    def _plan_parallel(self, env: Any) -> Callable[[Any, int], Unit]:
        self._check_not_recorded()
        agents = [str(agent) for agent in env.possible_agents]
        by_part = assigned(agents, self._agents)
        count = len(self._options.seeds)
        self._introduce(env, [
            _Part(*_common_spaces(env, named), named, count) for named in by_part
        ])  # fmt: skip

        def make_unit(env: Any, index: int) -> Unit:
            seats = {
                agent: Seat(arrays, index * len(named) + position, env.action_space(agent))
                for arrays, named in zip(self._parts, by_part, strict=True)
                for position, agent in enumerate(named)
            }
            return ParallelUnit(env, seats, self._options.episode_steps_max)

        return make_unit

    def _check_one_agent(self) -> None:
        if self._agents != ["*"]:
            raise _unusable("--agents is for environments of several agents, and this has one")

    def _check_not_recorded(self) -> None:
        if self._recording is not None:
            raise _unusable("only plain environments of one agent can be recorded")

    def _introduce(self, env: Any, parts: "list[_Part]") -> None:
        """Make all parts' arrays and send them with their spaces, before the slow first reset."""
        wrappers = wrappers_of(env)
        hello: list[dict[str, Any]] = [
            {
                "observation": _encoded(part.observations, "obs"),
                "action": _encoded(part.actions, "action"),
                "labels": [row_label(label) for label in part.labels],
                "wrappers": wrappers,
            }
            for part in parts
        ]
        introduction = os.memfd_create("breadbox-spaces", os.MFD_CLOEXEC)
        descriptors = [introduction]
        with open(introduction, "w", closefd=False) as file:
            json.dump(hello, file)
        for part, encoded in zip(parts, hello, strict=True):
            # As the worker decodes them, so that both lay out the memory in the same way.
            both = decode_space(encoded["observation"]), decode_space(encoded["action"])
            arrays, descriptor = create_arrays(*both, len(part.labels) * part.env_count)
            self._parts.append(arrays)
            descriptors.append(descriptor)
        socket.send_fds(self._connection, [b"H"], descriptors)
        for descriptor in descriptors:
            os.close(descriptor)

    def _recorders(self, arrays: GroupArrays) -> list[Recorder] | None:
        if self._recording is None:
            return None
        # Imported here because it loads codecs, which most processes do not need.
        from breadbox_rollout.recording.recording import EpisodeRecorder, RecordingOptions

        options = RecordingOptions(**self._recording)
        return [
            EpisodeRecorder(options, env_index, arrays, row)
            for row, env_index in enumerate(self._env_indices)
        ]

    def _send_done(self, group: EnvGroup) -> None:
        send(self._connection, b"D", group.notes.as_dict() if group.notes else None)

    def _serve(self, group: EnvGroup) -> None:
        rounds = 0
        while message := self._connection.recv(MESSAGE_BYTES_MAX):
            assert message == b"S"
            group.step()
            rounds += 1
            limit = self._memory_bytes_max if rounds % _ROUNDS_PER_MEMORY_CHECK == 0 else 0
            if limit and (used := resident_bytes()) > limit:
                detail = f"{used / 2**20:.0f} MiB are more than {limit / 2**20:.0f}"
                raise EnvironmentFailedError(FailureKind.MEMORY_LIMIT, detail)
            self._send_done(group)


def serve(connection: socket.socket, make_host: Callable[..., Host] = Host) -> int:
    """Run a host on *connection*; return the exit status."""
    message = connection.recv(MESSAGE_BYTES_MAX)
    if not message:
        return 0
    try:
        try:
            make_host(connection, json.loads(message[1:])).run()
        except EnvironmentFailedError as failure:
            notes = failure.notes.as_dict() if failure.notes else None
            send(connection, b"F", {**failure.as_dict(), "notes": notes})
            return 1
    except (BrokenPipeError, ConnectionResetError):
        return 0  # The worker closed the socket.
    return 0


def main() -> int:
    """Serve on the descriptor named in the first argument."""
    die_with_parent()
    # The worker decides when to end; Ctrl-C in its terminal must not end the environments first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        return serve(connection)


if __name__ == "__main__":
    sys.exit(main())
