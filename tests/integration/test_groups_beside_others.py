"""Groups beside shared files, copies, quotas and a gateway; origins beside a mirror."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import breadbox
from breadbox.mirror import ReplayMirror
from breadbox.model.errors import SchemaMismatchError
from breadbox.types import GroupEndReason
from support.eventually import eventually_sync
from support.fragments import vector_fragment
from support.fsck_process import MUST_BE_0, fsck_report
from support.server_process import ServerProcess
from support.token_files import write_tokens

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

SIZE = 4
ADMITTED = breadbox.AdmissionOutcome.ADMITTED
COMPLETE, INCOMPLETE = GroupEndReason.COMPLETE, GroupEndReason.INCOMPLETE


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory, where small payloads of one call share a file."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
        yield Path(made)


def serve(store: Path, log: Path, *options: str) -> ServerProcess:
    return ServerProcess(
        *("--store", f"file://{store}", "--inline-size-max", "0"),
        *("--preset", "groups", "--fragments-per-chunk", str(SIZE), *options),
        log=log,
    )


def member(group: str, index: int) -> breadbox.Fragment:
    fragment = vector_fragment(index, worker_id=group)
    fragment.worker_id = group
    return fragment


def check_agreement(store: Path) -> None:
    report = fsck_report("--store", f"file://{store}")
    assert [0] * len(MUST_BE_0) == [report[name] for name in MUST_BE_0]


def found(client: breadbox.Client, count: int) -> dict[str, list[int]]:
    """Take groups out; gives what the observations of their members say."""
    groups: dict[str, list[int]] = {}
    with client.fetch(fragment_count=count, max_wait_s=30.0) as lease:
        for each in lease.fragments():
            groups.setdefault(each.worker_id, []).append(int(each.obs[0, 0]))
    return groups


WHOLE = [*range(SIZE)]


def test_groups_that_share_a_file_go_apart_and_survive_a_crash(
    folder: Path, tmp_path: Path
) -> None:
    """One call brings members of twelve groups: three are whole, and the others end with time."""
    with serve(folder, tmp_path / "log", "--open-chunk-s", "3") as server:
        with breadbox.connect(server.address, reconnect_s=60.0) as client:
            client.start_session("s")
            names = [f"g{number}" for number in range(12)]
            members = [member(name, index) for index in WHOLE for name in names[: 12 - 3 * index]]
            assert {ADMITTED} == {each.outcome for each in client.append_many(members)}
            assert 1 == len(os.listdir(folder / "groups"))
            server.kill()
            server.start()
            ends = client.group_ends(max_wait_s=30)
            while len(ends) < 12:
                later = client.group_ends(ends[-1].number, max_wait_s=30)
                assert later, "the wait has elapsed"
                ends += later
            reasons = {end.group: end.reason for end in ends}
            assert reasons == {
                name: COMPLETE if number < 3 else INCOMPLETE for number, name in enumerate(names)
            }
            check_agreement(folder)
            assert dict.fromkeys(names[:3], WHOLE) == found(client, 3 * SIZE)
        eventually_sync(lambda: not os.listdir(folder / "groups"), "deletions")


def test_a_copy_of_the_store_has_open_groups_their_files_and_ends(
    folder: Path, tmp_path: Path
) -> None:
    """As a backup is made: no server runs, and the copy is put to any path."""
    store, copy = folder / "store", folder / "copy"
    with serve(store, tmp_path / "log") as server:
        with breadbox.connect(server.address) as client:
            client.start_session("s")
            client.append_many([member(name, index) for name in "abc" for index in WHOLE[1:]])
            client.append(member("a", 0))
            [ended] = client.group_ends()
        assert 0 == server.stop()
    shutil.copytree(store, copy)
    check_agreement(copy)
    with serve(copy, tmp_path / "copy.log") as server:
        with breadbox.connect(server.address) as client:
            assert [ended] == client.group_ends()
            assert {ADMITTED} == {client.append(member(name, 0)).outcome for name in "bc"}
            assert [ended.number + 1, ended.number + 2] == [
                each.number for each in client.group_ends(ended.number)
            ]
            assert dict.fromkeys("abc", WHOLE) == found(client, 3 * SIZE)
        check_agreement(copy)


def test_a_bound_token_makes_any_number_of_groups_through_the_gateway(
    folder: Path, tmp_path: Path
) -> None:
    """Its quota of workers is about groups that are open, whatever their files hold."""
    tokens = tmp_path / "tokens"
    producer, learner = write_tokens(
        tokens, "producer team buffers=* workers=team-* workers_max=2", "learner us"
    )
    options = ("--gateway", "--tokens", str(tokens), "--allow-plaintext")
    with (
        serve(folder, tmp_path / "log", *options) as server,
        breadbox.connect(server.address, token=learner) as trains,
        breadbox.connect(server.address, token=producer) as client,
    ):
        trains.start_session("s")
        for number in range(5):
            members = [member(f"team-{number}", index) for index in reversed(WHOLE)]
            assert {ADMITTED} == {each.outcome for each in client.append_many(members)}
        client.append_many([member("team-x", 0), member("team-y", 0)])
        with pytest.raises(breadbox.errors.LimitExceededError):
            client.append(member("team-z", 0))
        assert 5 == len(client.group_ends())
        assert {f"team-{number}": WHOLE for number in range(5)} == found(trains, 5 * SIZE)


def test_a_mirror_follows_to_a_session_of_another_origin(folder: Path, tmp_path: Path) -> None:
    options = ("--store", f"file://{folder}", "--preset", "off-policy")
    with (
        ServerProcess(*options, log=tmp_path / "log") as server,
        breadbox.connect(server.address) as plain,
        breadbox.connect(server.address) as wrapped,
    ):
        plain.declare_origin({"wrappers": "none"})
        wrapped.declare_origin({"wrappers": "Normalize()"})
        plain.start_session("first")
        with ReplayMirror(plain, capacity_steps=100) as mirror:
            plain.append(vector_fragment(1, session_id="first"))
            with pytest.raises(SchemaMismatchError, match="wrappers"):
                wrapped.append(vector_fragment(2, session_id="first"))
            mirror.wait_until(4, timeout_s=30)
            wrapped.start_session("second")
            wrapped.append(vector_fragment(3, session_id="second"))
            with pytest.raises(SchemaMismatchError, match="wrappers"):
                plain.append(vector_fragment(4, session_id="second"))
            eventually_sync(lambda: shown(mirror) == [3], "the steps of the second session")


def shown(mirror: ReplayMirror) -> list[int]:
    count = mirror.step_count
    return sorted({int(each) for each in mirror.at(range(count)).obs[:, 0]}) if count else []
