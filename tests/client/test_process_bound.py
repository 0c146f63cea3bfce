"""What has threads or connections says so in another process, and neither hangs nor loses."""

import copy
import os
import pickle  # noqa: TID251 - what a spawned process would be given
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import breadbox
from breadbox import aio
from breadbox.loader import FragmentLoader
from breadbox.mirror import ReplayMirror
from breadbox.model.errors import ClosedError
from breadbox.model.options import ClientOptions
from breadbox.transport.prefetch import prefetched
from breadbox_adapters import run_replay
from support.fragments import vector_fragment
from support.step_client import FakeClient

STEP = (np.zeros((1, 3)), np.zeros(1), [0.0], np.ones((1, 3)), [False], [False])


@pytest.fixture
def writer() -> Iterator[breadbox.StepWriter]:
    with breadbox.StepWriter(FakeClient()) as made:
        yield made


@pytest.fixture
def appender() -> Iterator[breadbox.Appender]:
    with breadbox.Appender(FakeClient()) as made:
        yield made


def in_child(*uses: Callable[[], object]) -> list[str]:
    """The error of each use in a forked child, or what it returned."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            for use in uses:
                try:
                    told = repr(use())
                except ClosedError as error:
                    told = f"ClosedError: {error}"
                os.write(send, told.encode() + b"\n")
        finally:
            os._exit(0)
    os.close(send)
    with open(receive, "rb", buffering=0) as answers:
        told_so_far = b""
        while select.select([answers], [], [], 30)[0] and (more := answers.read(4096)):
            told_so_far += more
    os.kill(child, 9)
    os.waitpid(child, 0)
    return told_so_far.decode().splitlines()


def test_a_forked_writer_takes_no_step_and_the_parents_goes_on(
    writer: breadbox.StepWriter,
) -> None:
    writer.add(*STEP)
    with writer._changed:  # noqa: SLF001 - as a fork may find it
        told = in_child(
            lambda: writer.add(*STEP), writer.flush, lambda: writer.counts, writer.close
        )
    refusal = (
        "ClosedError: this StepWriter works only in the process that made it, not after a fork, "
        "nor pickled: connect, and make one, in each process"
    )
    assert [*[refusal] * 3, "None"] == told
    writer.add(*STEP)
    writer.flush(max_wait_s=10)
    assert (2, 2) == (writer.counts.added, writer.counts.sent)


def test_a_forked_appender_takes_no_fragment(appender: breadbox.Appender) -> None:
    fragment = vector_fragment(0)
    with appender._changed:  # noqa: SLF001 - as a fork may find it
        told = in_child(
            lambda: appender.append(fragment),
            appender.flush,
            lambda: appender.counts,
            appender.unsent,
            appender.close,
        )
    assert [True] * 4 == [each.startswith("ClosedError: this Appender works") for each in told[:4]]
    assert ["None"] == told[4:]


def test_an_iteration_that_was_forked_ends_in_the_child() -> None:
    numbers = prefetched(count(), lambda number: number, at_once=1, depth=2, in_order=True)
    assert 0 == next(numbers)
    assert ["ClosedError: an iteration continues only in the process that began it"] == in_child(
        lambda: next(numbers)
    )
    assert 1 == next(numbers)
    numbers.close()


FORKED_MIRROR = """
import sys
from breadbox.mirror import ReplayMirror
from client.test_process_bound import in_child
mirror = ReplayMirror(sys.argv[1], capacity_steps=10)
with mirror._changed:
    told = in_child(
        lambda: mirror.sample(1), lambda: mirror.wait_until(1), mirror.catch_up, mirror.close
    )
mirror.close()
print(*told, sep=chr(10))
"""


def test_a_forked_mirror_of_this_process_draws_and_waits_for_nothing(address: str) -> None:
    # In a process of its own, for gRPC may crash one that forks while a thread is in a call.
    done = subprocess.run(
        [sys.executable, "-c", FORKED_MIRROR, address],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=25,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    told = done.stdout.splitlines()
    assert [True] * 3 == [each.startswith("ClosedError: this ReplayMirror") for each in told[:3]]
    assert ["None"] == told[3:]


async def test_a_client_of_an_event_loop_is_refused_after_a_fork(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with aio.connect(address) as client:
        parent = os.getpid()
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: parent + 1)
            with pytest.raises(ClosedError, match="not after a fork"):
                await client.list_buffers()


@pytest.mark.parametrize("dump", [pickle.dumps, copy.copy, copy.deepcopy])
def test_what_is_pickled_or_copied_is_refused_with_the_remedy(
    address: str,
    writer: breadbox.StepWriter,
    appender: breadbox.Appender,
    dump: Callable[[Any], object],
) -> None:
    with breadbox.connect(address) as client, ReplayMirror(client, capacity_steps=9) as mirror:
        for thing, kind in (
            (client, "client"),
            (mirror, "ReplayMirror"),
            (writer, "StepWriter"),
            (appender, "Appender"),
        ):
            with pytest.raises(ClosedError, match=f"this {kind} works only in .* in each process"):
                dump(thing)


def test_options_of_a_client_can_be_pickled() -> None:
    options = ClientOptions()
    assert options == pickle.loads(pickle.dumps(options))


def test_a_loader_is_pickled_as_little_as_its_client(address: str) -> None:
    with (
        breadbox.connect(address) as client,
        pytest.raises(ClosedError, match="this client works only in the process that made it"),
    ):
        pickle.dumps(FragmentLoader(client.load_fragments))


def test_a_fork_of_an_adapter_ends_nothing_of_its_parents() -> None:
    """It would delete the buffer."""
    parents: Any = None
    run_replay._end(  # noqa: SLF001 - as a finaliser calls it
        parents, parents, "parents:1", "buffer", {"process_id": os.getpid() + 1, "deletes": True}
    )
