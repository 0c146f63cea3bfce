"""The process that holds environments: `python -m breadbox_rollout.host DESCRIPTOR`.

Started by the worker with one end of a socket. Messages are one byte of kind, then JSON:

    worker to process   C {config}    once, first
                        S             step: actions are in the arrays
    process to worker   H {spaces}    made and reset; carries the descriptor of the arrays
                        D [{notes}]   done: answers are in the arrays
                        F {failure}   cannot go on; the process ends

The process ends when the socket does, and the kernel kills it when the worker is killed.
"""

import ctypes
import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from breadbox_rollout.arrays import GroupArrays, create_arrays
from breadbox_rollout.environments import EnvSpec, make_environment
from breadbox_rollout.group import (
    EnvGroup,
    EnvironmentFailedError,
    FailureKind,
    GroupOptions,
    Recorder,
)
from breadbox_rollout.space_codec import encode_space

MESSAGE_BYTES_MAX = 128 * 1024
_PR_SET_PDEATHSIG = 1
_TURNS_PER_MEMORY_CHECK = 64


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends, however it ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def resident_bytes() -> int:
    """Return how much memory this process has in RAM."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def send(connection: socket.socket, kind: bytes, data: Any = None) -> None:
    """Send one message."""
    body = b"" if data is None else json.dumps(data).encode()
    connection.send(kind + body)


class Host:
    """One process's life: make, say hello, take turns, end."""

    def __init__(self, connection: socket.socket, config: dict[str, Any]) -> None:
        self._connection = connection
        self._spec = EnvSpec(**config["env"])
        options = config["group"]
        self._options = GroupOptions(**{**options, "seeds": tuple(options["seeds"])})
        self._memory_bytes_max = int(config["memory_bytes_max"])
        self._recording = config["recording"]
        self._env_indices = config["env_indices"]

    def run(self) -> None:
        """Serve the worker until it hangs up.

        Raises:
            EnvironmentFailedError: An environment cannot be made, or not go on.
        """
        group = self._make_group()
        try:
            group.start()
            self._send_done(group)
            self._serve(group)
        except EnvironmentFailedError as failure:
            # What else happened in this turn must not get lost with the process.
            failure.notes = group.notes
            raise
        finally:
            group.close()

    def _make_group(self) -> EnvGroup:
        try:
            env = make_environment(self._spec)
            spaces = (encode_space(env.observation_space), encode_space(env.action_space))
        except Exception as error:
            raise EnvironmentFailedError(FailureKind.BUILD_RAISED, repr(error)) from error
        count = len(self._options.seeds)
        arrays, descriptor = create_arrays(env.observation_space, env.action_space, count)
        group = EnvGroup(
            lambda: make_environment(self._spec),
            arrays,
            env.observation_space,
            self._options,
            time.monotonic,
            self._recorders(arrays),
        )
        group.adopt(0, env)
        # Introduced before the first reset, so that the worker can tell which phase takes long.
        hello = json.dumps({"observation": spaces[0], "action": spaces[1], "count": count})
        socket.send_fds(self._connection, [b"H" + hello.encode()], [descriptor])
        os.close(descriptor)
        return group

    def _recorders(self, arrays: GroupArrays) -> list[Recorder] | None:
        if self._recording is None:
            return None
        # Imported here: it brings codecs, which most processes do not need.
        from breadbox_rollout.recording import EpisodeRecorder, RecordingOptions

        options = RecordingOptions(**self._recording)
        return [
            EpisodeRecorder(options, env_index, arrays, row)
            for row, env_index in enumerate(self._env_indices)
        ]

    def _send_done(self, group: EnvGroup) -> None:
        send(self._connection, b"D", group.notes.as_dict() if group.notes else None)

    def _serve(self, group: EnvGroup) -> None:
        turns = 0
        while message := self._connection.recv(MESSAGE_BYTES_MAX):
            assert message == b"S"
            group.step()
            turns += 1
            if turns % _TURNS_PER_MEMORY_CHECK == 0:
                self._check_memory()
            self._send_done(group)

    def _check_memory(self) -> None:
        limit = self._memory_bytes_max
        if limit and (used := resident_bytes()) > limit:
            raise EnvironmentFailedError(
                FailureKind.MEMORY_LIMIT,
                f"{used / 2**20:.0f} MiB are more than {limit / 2**20:.0f}",
            )


def serve(connection: socket.socket, make_host: Callable[..., Host] = Host) -> int:
    """Run a host on *connection*; returns the exit status."""
    message = connection.recv(MESSAGE_BYTES_MAX)
    if not message:
        return 0
    try:
        make_host(connection, json.loads(message[1:])).run()
    except EnvironmentFailedError as failure:
        send(
            connection,
            b"F",
            {
                "kind": failure.kind.value,
                "detail": failure.detail,
                "notes": failure.notes.as_dict() if failure.notes else None,
            },
        )
        return 1
    except (BrokenPipeError, ConnectionResetError):
        return 0
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
