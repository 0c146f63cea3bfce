"""Somebody with an account on the same machine gets at a `file://` store before its owner does.

Attacks are made by a process of another user; they need root to be made at all.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import breadbox
from breadbox.model.errors import PayloadCorruptError, StoreUnavailableError
from breadbox.model.types import PayloadReference
from breadbox.stores import open_custodian, open_store
from breadbox.stores.base import Confirmation
from support.server_process import END_S, ServerProcess, plain_environment, serve_command

pytestmark = pytest.mark.integration

OTHER_USER = 65_534
PRECIOUS = "what must not be lost\n"
PAYLOAD_ID = "0" * 32
JOURNAL_FILES = ("journal.lock", "journal.sqlite", "journal.end", ".journal.end", ".snapshot-1")


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Path]:
    """A directory like /dev/shm: everybody may write, only owners may rename and delete.

    Not pytest's own, into which no other user may look.
    """
    directory = Path(tempfile.mkdtemp(prefix="breadbox-test-"))
    directory.chmod(0o1777)
    yield directory
    shutil.rmtree(directory)


def as_other_user(script: str, *arguments: object) -> None:
    """Run Python as somebody else.

    It becomes the other user only once it runs: the interpreter may lie in a directory into which
    nobody else may look.
    """
    if os.geteuid() != 0:
        pytest.skip("only root can act as another user")
    become = f"os.setgroups([]); os.setgid({OTHER_USER}); os.setuid({OTHER_USER}); os.umask(0)"
    subprocess.run(
        [sys.executable, "-c", f"import os, sys; {become}\n{script}", *map(str, arguments)],
        check=True,
        cwd="/",
    )


def refusal(*arguments: str) -> str:
    """Start a server that must not start; gives what it says."""
    done = subprocess.run(
        serve_command("--listen", "127.0.0.1:0", *arguments),
        capture_output=True,
        text=True,
        timeout=END_S,
        env=plain_environment(),
        check=False,
    )
    assert 2 == done.returncode, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_a_planted_lock_does_not_truncate_the_file_that_it_leads_to(shared: Path) -> None:
    store, victim = shared / "store", shared / "victim"
    victim.write_text(PRECIOUS)
    plant = "os.mkdir(sys.argv[1], 0o777); os.symlink(sys.argv[2], sys.argv[1] + '/server.lock')"
    as_other_user(plant, store, victim)
    told = refusal("--store", f"file://{store}")

    assert PRECIOUS == victim.read_text()
    assert "belongs to another user" in told
    assert "of your own" in told


@pytest.mark.parametrize("name", JOURNAL_FILES)
def test_a_planted_journal_does_not_touch_the_file_that_it_leads_to(
    shared: Path, name: str
) -> None:
    journal, victim = shared / "journal", shared / "victim"
    victim.write_text(PRECIOUS)
    plant = "os.mkdir(sys.argv[1], 0o777); os.symlink(sys.argv[2], sys.argv[1] + '/' + sys.argv[3])"
    as_other_user(plant, journal, victim, name)
    told = refusal("--store", f"file://{shared}/store", "--journal", f"file://{journal}")

    assert PRECIOUS == victim.read_text()
    assert "belongs to another user" in told


def test_a_store_that_somebody_else_made_is_written_to_by_nobody(shared: Path) -> None:
    store = shared / "store"
    as_other_user("os.mkdir(sys.argv[1], 0o777)", store)
    with pytest.raises(StoreUnavailableError, match="belongs to another user"):
        open_store(f"file://{store}")
    with pytest.raises(StoreUnavailableError, match="belongs to another user"):
        open_custodian(f"file://{store}")

    assert [] == list(store.iterdir())


def test_a_store_that_others_may_write_is_refused(shared: Path) -> None:
    store = shared / "store"
    store.mkdir()
    store.chmod(0o777)
    told = refusal("--store", f"file://{store}")
    with pytest.raises(StoreUnavailableError, match="chmod go-w"):
        open_store(f"file://{store}")

    assert "chmod go-w" in told
    assert [] == list(store.iterdir())


def test_a_part_of_a_store_that_somebody_else_made_is_refused(shared: Path) -> None:
    """It was open to everybody once, and closed too late."""
    store = shared / "store"
    store.mkdir()
    store.chmod(0o777)
    as_other_user("os.mkdir(sys.argv[1] + '/unannounced', 0o777)", store)
    store.chmod(0o700)
    with pytest.raises(StoreUnavailableError, match="belongs to another user"):
        open_store(f"file://{store}")


def test_a_link_to_a_store_is_followed_only_if_it_is_ones_own(shared: Path) -> None:
    store = shared / "store"
    store.mkdir(mode=0o700)
    (shared / "mine").symlink_to(store)
    as_other_user("os.symlink(sys.argv[1], sys.argv[2])", store, shared / "theirs")
    open_store(f"file://{shared}/mine").close()
    with pytest.raises(StoreUnavailableError, match="link of another user"):
        open_store(f"file://{shared}/theirs")


def test_a_journal_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    store = tmp_path / "store"
    mask = os.umask(0)
    try:
        server = ServerProcess("--store", f"file://{store}", log=tmp_path / "log")
        with server, breadbox.connect(server.address, reconnect_s=0) as client:
            client.start_session("run", model_version=0)
            modes = {path.name: path.stat().st_mode & 0o777 for path in files_of(store)}
            assert 0 == server.stop()
    finally:
        os.umask(mask)

    assert {"journal.sqlite", "journal.sqlite-wal", "journal.lock", "server.lock"} <= set(modes)
    assert {0o600} == set(modes.values()), modes


def test_a_journal_that_was_readable_by_others_is_closed_to_them(tmp_path: Path) -> None:
    store = tmp_path / "store"
    server = ServerProcess("--store", f"file://{store}", log=tmp_path / "log")
    with server:
        assert 0 == server.stop()
    for path in files_of(store):
        path.chmod(0o644)
    with server:
        kept = {"journal.sqlite", "journal.lock", "server.lock", "journal.end"}
        modes = {path.stat().st_mode & 0o777 for path in files_of(store) if path.name in kept}
        assert 0 == server.stop()

    assert {0o600} == modes


def files_of(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


@pytest.mark.parametrize("name", ["server.lock", *JOURNAL_FILES])
@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_link_in_the_directory_itself_is_not_written_through(
    tmp_path: Path, name: str, link: object
) -> None:
    assert callable(link)
    store, victim = tmp_path / "store", tmp_path / "victim"
    store.mkdir(mode=0o700)
    victim.write_text(PRECIOUS)
    link(victim, store / name)
    is_replaced = name.startswith(".")
    if is_replaced:
        server = ServerProcess("--store", f"file://{store}", log=tmp_path / "log")
        with server:
            assert 0 == server.stop()
    else:
        # A journal that has an end and nothing else is damaged.
        expected = name if name == "journal.end" else "is a link"
        assert expected in refusal("--store", f"file://{store}")

    assert PRECIOUS == victim.read_text()


async def test_a_link_in_the_place_of_a_payload_is_neither_confirmed_nor_read(
    tmp_path: Path,
) -> None:
    store, secret = tmp_path / "store", tmp_path / "secret"
    secret.write_bytes(bytes(100))
    custodian = open_custodian(f"file://{store}")
    (store / "unannounced" / PAYLOAD_ID).symlink_to(secret)
    length = len(str(secret))
    by_target, by_link = (PayloadReference(PAYLOAD_ID, size) for size in (100, length))

    seen = await custodian.confirm([by_target, by_link])
    assert [Confirmation.OTHER_SIZE] * 2 == seen
    assert [False, False] == await custodian.present([by_target, by_link])
    with pytest.raises(PayloadCorruptError, match="is no file"):
        open_store(f"file://{store}").map_many([by_target])


def test_a_ready_file_does_not_write_through_a_planted_link(tmp_path: Path, shared: Path) -> None:
    victim = shared / "victim"
    victim.write_text(PRECIOUS)
    (shared / "ready.half").symlink_to(victim)
    server = ServerProcess(
        *("--store", f"file://{tmp_path}/store", "--ready-file", str(shared / "ready")),
        log=tmp_path / "log",
    )
    with server:
        assert server.address + "\n" == (shared / "ready").read_text()
        assert 0 == server.stop()

    assert PRECIOUS == victim.read_text()
