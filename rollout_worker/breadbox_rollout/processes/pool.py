"""Supervise environment processes: start, watch, kill when they hang, restart.

P1 Every failure becomes one `GroupFailed` event; no other part of the worker sees a process. P2 A
process that hangs is killed within its phase's limit and one check interval. P3 Shared arrays of a
failed process stay readable until the next `poll`. P4 A process is asked to step only when done. P5
The pool gives up after a known number of attempts without any answered step; otherwise it retries,
with increasing delays.
"""

import contextlib
import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from breadbox.model.errors import ReplayBufferError
from breadbox.shared.child_processes import child_environment
from breadbox_rollout.environments.arrays import GroupArrays, Phase, open_arrays
from breadbox_rollout.environments.environments import EnvSpec
from breadbox_rollout.environments.failures import FailureKind
from breadbox_rollout.environments.space_codec import Space, decode_space
from breadbox_rollout.environments.units import GroupOptions
from breadbox_rollout.processes.host import MESSAGE_BYTES_MAX, PARTS_MAX, send

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 0.1
"""Seconds between checks of limits; a hanging process lives at most this much longer."""
_FATAL_FAILURES = 3
"""Failures in a row of one process after which the pool gives up, if no step was ever answered."""
_FRUITLESS_ROUNDS_MAX = 10
"""Rounds in a row with failures and no answer, after which a process is replaced."""
_BACKOFF_S_MIN, _BACKOFF_S_MAX = 0.1, 30.0


class EnvironmentStartError(ReplayBufferError):
    """No environment could be started, none ever answered a step, or all are retired."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOptions:
    """How many environments, in how many processes, under which limits."""

    env_count: int
    envs_per_process: int = 1
    seed: int = 0
    build_s_max: float = 300.0
    """Seconds to start a process and make its first environment, before it is killed."""
    reset_s_max: float = 120.0
    step_s_max: float = 30.0
    restarts_max: int | None = None
    """Most restarts of one process, or None for any number, with increasing delays."""
    rebuild_interval_s: float = 0.0
    """Seconds after which an environment is made anew, between episodes; 0 for never."""
    memory_bytes_max: int = 0
    """Resident bytes at which a process is replaced; 0 for no limit."""
    starts_max: int = field(default_factory=lambda: max(2, os.cpu_count() or 1))
    """Most processes that start at the same time."""
    seed_each_episode: bool = False
    episode_steps_max: int | None = None
    agents: tuple[str, ...] = ("*",)
    """Patterns of the names of an environment's agents; each pattern is a part of the rows."""


@dataclass(frozen=True, slots=True)
class AgentRows:
    """Rows of the agents of one pattern, which share spaces and may share a policy."""

    observation_space: Space
    action_space: Space
    labels: tuple[str, ...]
    """Names of agents, ("",) for one agent; a group has a row for each, by environment."""
    wrappers: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Wrappers of the environment, as `wrappers_of` describes them."""


@dataclass(frozen=True, slots=True)
class GroupReady:
    """A group answered or was started; the worker may use its arrays until `step`."""

    group: int
    notes: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class GroupFailed:
    """A group's process is gone; it is restarted unless *final*."""

    group: int
    kind: FailureKind
    detail: str
    final: bool
    notes: dict[str, Any] | None = None
    """Notes of its last round, as in `GroupReady`."""
    trace: str = ""
    """Traceback of the environment's error, or empty without one."""


Event = GroupReady | GroupFailed


class _State(Enum):
    WAITING = "waiting"
    STARTING = "starting"
    BUSY = "busy"
    READY = "ready"
    RETIRED = "retired"


class _Group:
    def __init__(self, index: int, env_indices: range) -> None:
        self.index = index
        self.env_indices = env_indices
        self.state = _State.WAITING
        self.start_at = 0.0
        self.since = 0.0
        """Time when it was started or last asked to step."""
        self.process: subprocess.Popen[bytes] | None = None
        self.connection: socket.socket | None = None
        self.parts: list[GroupArrays] = []
        """Shared arrays; none before its H message."""
        self.start_count = 0
        self.failures_in_a_row = 0
        """Ends of the process since one of its environments last answered a step."""
        self.fruitless_ends = 0
        """Those among them that happened during a request."""
        self.fruitless_rounds = 0
        self.answer_count = 0
        """Answers of all its environments, at its last message."""

    def kill(self) -> int | None:
        """Kill the process and everything it started; return its exit status."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        process, self.process = self.process, None
        if process is None:
            return None
        # Its own process group, so that processes that the environment started are killed too, even
        # if the process itself has ended already.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


class EnvProcesses:
    """Environments in processes that the kernel kills with the thread that uses them."""

    def __init__(
        self,
        spec: EnvSpec,
        options: PoolOptions,
        *,
        clock: Callable[[], float] = time.monotonic,
        recording: dict[str, Any] | None = None,
    ) -> None:
        self._spec = spec
        self._options = options
        self._clock = clock
        self._recording = recording
        self._selector = selectors.DefaultSelector()
        self._checked_at = 0.0
        self._said_hello = False
        self._answered = False
        """True if any environment has ever answered a step."""
        self.parts: list[AgentRows] = []
        """The parts of the rows, known once a process has introduced its environments."""
        self.restart_count = 0
        width = options.envs_per_process
        self._groups = [
            _Group(index, range(start, min(start + width, options.env_count)))
            for index, start in enumerate(range(0, options.env_count, width))
        ]

    def __enter__(self) -> "EnvProcesses":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def groups(self) -> list[range]:
        """Indices of the environments of each group."""
        return [group.env_indices for group in self._groups]

    @property
    def live_env_count(self) -> int:
        """Number of environments that are ready or being stepped."""
        live = (_State.READY, _State.BUSY)
        return sum(len(group.env_indices) for group in self._groups if group.state in live)

    def arrays(self, group: int, part: int = 0) -> GroupArrays:
        """Return shared arrays of a group that was ready at least once since its start."""
        return self._groups[group].parts[part]

    def arrays_or_none(self, group: int, part: int = 0) -> GroupArrays | None:
        """Return `arrays`, or None if the process never had some."""
        parts = self._groups[group].parts
        return parts[part] if parts else None

    def step(self, group: int) -> None:
        """Ask a ready group to step, with the actions in its arrays."""
        entry = self._groups[group]
        assert entry.state is _State.READY, f"group {group} is {entry.state.value}"
        assert entry.connection is not None
        entry.state, entry.since = _State.BUSY, self._clock()
        try:
            send(entry.connection, b"S")
        except OSError:
            # It died while idle; the selector reports that as the end of the socket.
            logger.debug("environment process %d is gone before its step", group)

    def poll(self, wait_s: float) -> list[Event]:
        """Wait for events, at most *wait_s* seconds."""
        self._start_waiting()
        events: list[Event] = []
        until = self._clock() + wait_s
        while True:
            left_s = until - self._clock()
            ready = self._selector.select(max(0.0, min(left_s, CHECK_INTERVAL_S)))
            for key, _ in ready:
                self._receive(key.data, events)
            if self._clock() - self._checked_at >= CHECK_INTERVAL_S:
                self._checked_at = self._clock()
                self._check_limits(events)
                self._start_waiting()
            if events or self._clock() >= until:
                return events

    def close(self, grace_s: float = 5.0) -> None:
        """Let every process close its environments, and kill those that take longer. Idempotent."""
        for group in self._groups:
            if group.connection is not None:
                self._selector.unregister(group.connection)
                group.connection.close()
                group.connection = None
            group.state = _State.RETIRED
        until = self._clock() + grace_s
        for group in self._groups:
            if group.process is not None:
                try:
                    group.process.wait(max(0.0, until - self._clock()))
                except subprocess.TimeoutExpired:
                    logger.warning("environment process %d does not end; killed", group.index)
                group.kill()
            group.parts = []  # The mapping holds a descriptor.
        self._selector.close()

    def _start_waiting(self) -> None:
        starting = sum(group.state is _State.STARTING for group in self._groups)
        for group in self._groups:
            if starting >= self._options.starts_max:
                return
            if group.state is _State.WAITING and self._clock() >= group.start_at:
                self._start(group)
                starting += 1

    def _start(self, group: _Group) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            descriptor = theirs.fileno()
            group.process = subprocess.Popen(
                [sys.executable, "-m", "breadbox_rollout.processes.host", str(descriptor)],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                # Environments print to the log, not to the worker's own output.
                stdout=2,
                env=child_environment(),
                start_new_session=True,
            )
        group.connection = ours
        group.state, group.since, group.parts = _State.STARTING, self._clock(), []
        options = self._options
        seeds = tuple(_seed(options.seed, index, group.start_count) for index in group.env_indices)
        config = {
            "env": asdict(self._spec),
            "group": asdict(
                GroupOptions(
                    seeds=seeds,
                    seed_each_episode=options.seed_each_episode,
                    episode_steps_max=options.episode_steps_max,
                    rebuild_interval_s=options.rebuild_interval_s,
                )
            ),
            "memory_bytes_max": options.memory_bytes_max,
            "recording": self._recording,
            "env_indices": list(group.env_indices),
            "agents": list(options.agents),
        }
        group.start_count += 1
        self._selector.register(ours, selectors.EVENT_READ, group)
        try:
            send(ours, b"C", config)
        except OSError:
            # It has ended already; the selector reports that as the end of the socket.
            logger.debug("environment process %d is gone before its configuration", group.index)

    def _receive(self, group: _Group, events: list[Event]) -> None:
        assert group.connection is not None
        try:
            message, descriptors, _, _ = socket.recv_fds(
                group.connection, MESSAGE_BYTES_MAX, 1 + PARTS_MAX
            )
        except OSError as error:
            message, descriptors = b"", []
            logger.debug("environment process %d: %s", group.index, error)
        kind, body = message[:1], message[1:]
        if kind == b"D":
            self._done(group, json.loads(body) if body else None, events)
        elif kind == b"H":
            self._hello(group, descriptors)
        elif kind == b"F":
            failure = json.loads(body)
            kind_of_failure = FailureKind(failure["kind"])
            notes, trace = failure["notes"], failure["trace"]
            self._fail(group, kind_of_failure, failure["detail"], events, notes, trace)
        else:
            self._died(group, events)

    def _hello(self, group: _Group, descriptors: list[int]) -> None:
        introduction, *descriptors = descriptors
        with open(introduction) as file:
            file.seek(0)
            hello: list[dict[str, Any]] = json.load(file)
        parts = [
            AgentRows(
                decode_space(part["observation"]),
                decode_space(part["action"]),
                (*part["labels"],),
                part["wrappers"],
            )
            for part in hello
        ]
        for part, descriptor in zip(parts, descriptors, strict=True):
            row_count = len(part.labels) * len(group.env_indices)
            group.parts.append(
                open_arrays(descriptor, part.observation_space, part.action_space, row_count)
            )
            os.close(descriptor)
        if not self.parts:
            self.parts = parts
        elif parts != self.parts:
            raise EnvironmentStartError(
                f"environments disagree on their spaces: {parts} are not {self.parts}"
            )

    def _done(self, group: _Group, notes: dict[str, Any] | None, events: list[Event]) -> None:
        if group.state is _State.BUSY and self._is_fruitless(group, notes):
            kind, detail = FailureKind.FRUITLESS, notes["failures"][-1]["detail"] if notes else ""
            self._fail(group, kind, detail, events, notes)
            return
        group.state = _State.READY
        self._said_hello = True
        events.append(GroupReady(group.index, notes))

    def _is_fruitless(self, group: _Group, notes: dict[str, Any] | None) -> bool:
        """Count the round's answers; return True if too many rounds in a row had none."""
        before = group.answer_count
        group.answer_count = sum(int(arrays.answer_count.sum()) for arrays in group.parts)
        if group.answer_count != before:
            group.failures_in_a_row = group.fruitless_ends = group.fruitless_rounds = 0
            self._answered = True
        elif notes is not None and notes["failures"]:
            group.fruitless_rounds += 1
        return group.fruitless_rounds >= _FRUITLESS_ROUNDS_MAX

    def _died(self, group: _Group, events: list[Event]) -> None:
        assert group.process is not None
        try:
            status: int | None = group.process.wait(1.0)
        except subprocess.TimeoutExpired:
            status = None
        if status is None:
            detail = "closed its connection"
        elif status < 0:
            detail = f"killed by {signal.Signals(-status).name}"
        else:
            detail = f"ended with exit status {status}"
        self._fail(group, FailureKind.DIED, detail, events)

    def _check_limits(self, events: list[Event]) -> None:
        now = self._clock()
        for group in self._groups:
            if group.state not in (_State.STARTING, _State.BUSY):
                continue
            overdue = self._overdue(group, now)
            if overdue is not None:
                kind, limit_s = overdue
                self._fail(group, kind, f"no end after {limit_s:g} s", events)

    def _overdue(self, group: _Group, now: float) -> tuple[FailureKind, float] | None:
        options = self._options
        arrays = group.parts[0] if group.parts else None
        phase = Phase.BUILDING if arrays is None else Phase(int(arrays.phase[0]))
        if group.state is _State.STARTING and phase is Phase.IDLE:
            phase = Phase.BUILDING  # It is about to make the other environments.
        since = group.since
        if arrays is not None and phase is not Phase.IDLE:
            # The phase may still be that of the step before.
            since = max(since, float(arrays.phase_at[0]))
        kind, limit_s = {
            Phase.BUILDING: (FailureKind.BUILD_HUNG, options.build_s_max),
            Phase.RESETTING: (FailureKind.RESET_HUNG, options.reset_s_max),
            Phase.STEPPING: (FailureKind.STEP_HUNG, options.step_s_max),
            Phase.IDLE: (FailureKind.STEP_HUNG, options.step_s_max),
        }[phase]
        return (kind, limit_s) if now - since > limit_s else None

    def _fail(
        self,
        group: _Group,
        kind: FailureKind,
        detail: str,
        events: list[Event],
        notes: dict[str, Any] | None = None,
        trace: str = "",
    ) -> None:
        if group.connection is not None:
            self._selector.unregister(group.connection)
        group.kill()
        group.failures_in_a_row += 1
        # A process that died while idle proves nothing.
        group.fruitless_ends += group.state is not _State.READY
        group.fruitless_rounds = group.answer_count = 0
        if not self._answered and group.fruitless_ends >= _FATAL_FAILURES:
            what = "answers a step" if self._said_hello else "starts"
            raise EnvironmentStartError(f"no environment {what}; {kind.value}: {detail}")
        limit = self._options.restarts_max
        final = limit is not None and group.start_count > limit
        group.state = _State.RETIRED if final else _State.WAITING
        delay_s = min(_BACKOFF_S_MAX, _BACKOFF_S_MIN * 2 ** (group.failures_in_a_row - 1))
        group.start_at = self._clock() + delay_s
        self.restart_count += not final
        events.append(GroupFailed(group.index, kind, detail, final, notes, trace))
        if all(entry.state is _State.RETIRED for entry in self._groups):
            raise EnvironmentStartError(
                f"every environment failed more than {limit} times; last: {kind.value}: {detail}"
            )


def _seed(seed: int, env_index: int, start_count: int) -> int:
    """Return a seed below 2^31, as old environments require; it differs after every restart."""
    # Arithmetic instead of numpy's generators, to keep them out of here; primes avoid overlaps.
    return (seed * 1_000_003 + env_index * 7_919 + start_count * 104_729) % (2**31 - 1)
