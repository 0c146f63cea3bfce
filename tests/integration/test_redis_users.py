"""A server and a Redis with the users of `breadbox secrets`, both stopped and started again."""

from pathlib import Path

import pytest
import yaml

import breadbox
from breadbox.model.errors import StoreError
from breadbox.model.types import BufferConfig, ReleaseMode
from breadbox.stores import open_store
from breadbox_server.access.credentials import ACL, CONFIG, TOKENS, write_secrets
from support.fragments import vector_fragment
from support.redis_server import RedisServer, binary_since_7
from support.server_process import ServerProcess

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

FRAGMENT_COUNT = 40


def test_a_default_user_without_rights_is_warned_of_at_the_start_and_told_to_clients(
    tmp_path: Path,
) -> None:
    """That a journal elsewhere is in such a Redis, too."""
    redis, server = installation(tmp_path)
    users = (tmp_path / ACL).read_text()
    (tmp_path / ACL).write_text(users.replace("default off ~* &* +@all", "default off"))
    url = yaml.safe_load((tmp_path / CONFIG).read_text())["store"]
    elsewhere = ServerProcess(
        *("--store", f"file://{tmp_path}/payloads", "--journal", url), log=tmp_path / "other.log"
    )
    with redis:
        for each, option in ((server, "--store"), (elsewhere, "--journal")):
            with each, breadbox.connect(each.address) as client:
                (concern,) = client.service.get_store_config().store_concerns
            assert concern.startswith(f"{option} redis://breadbox-server:***@")
            assert "as its user `default`, which may not do everything" in concern
            assert concern in each.log.read_text()


def test_a_viewer_reads_payloads_in_redis_and_can_neither_delete_nor_replace_them(
    tmp_path: Path,
) -> None:
    redis, server = installation(tmp_path)
    server.arguments = [*server.arguments, "--tokens", str(tmp_path / TOKENS)]
    admin, viewer = ((tmp_path / role / "token").read_text() for role in ("admin", "viewer"))
    with redis, server, breadbox.connect(server.address, token=admin) as client:
        client.start_session("s")
        client.append(vector_fragment(0, step_count=512))
        with breadbox.connect(server.address, token=viewer) as looking:
            read = looking.service.read_fragments()
            (loaded,) = looking.load_fragments(read.fragments)
            assert 0 == loaded.fragment_index
            assert read.lease_id is not None
            looking.service.release_lease(read.lease_id, mode=ReleaseMode.CONSUMED)
            url = looking.service.get_store_config().store_url
        store = open_store(url)
        with pytest.raises(StoreError, match="NOPERM"):
            store.delete_many([read.fragments[0].metadata.payload])
        with pytest.raises(StoreError, match="NOPERM"):
            store.write_many([[memoryview(b"mine")]])
        store.close()


def installation(directory: Path) -> tuple[RedisServer, ServerProcess]:
    """A Redis that keeps its users in a file, and a server that is one of them; neither runs."""
    redis = RedisServer(
        with_tcp=True, is_durable=True, users=directory / ACL, binary=binary_since_7()
    )
    write_secrets(directory, f"127.0.0.1:{redis.port}")
    return redis, ServerProcess("--config", str(directory / CONFIG), log=directory / "server.log")


@pytest.mark.parametrize("inline_size", ["0", "4KiB"], ids=["payloads apart", "payloads inline"])
def test_nothing_acknowledged_is_lost_when_redis_and_server_are_stopped_and_started(
    tmp_path: Path, inline_size: str
) -> None:
    redis, server = installation(tmp_path)
    server.arguments = [*server.arguments, "--inline-size-max", inline_size]
    with redis, server:
        with breadbox.connect(server.address) as client:
            client.create_buffer("kept", BufferConfig(fragments_per_chunk=1, capacity_chunks=64))
            client.start_session("s", buffer="kept")
            client.append_many(
                [vector_fragment(each) for each in range(FRAGMENT_COUNT)], buffer="kept"
            )
            before = client.get_buffer("kept")
        server.stop()
        redis.stop()
        redis.start()
        server.start()
        with breadbox.connect(server.address) as client:
            after = client.get_buffer("kept")
            with client.fetch(fragment_count=FRAGMENT_COUNT, max_wait_s=10, buffer="kept") as lease:
                fetched = {fragment.fragment_index: fragment for fragment in lease.fragments()}

    assert "append-only" not in server.log.read_text()
    assert (before.session_id, before.state.fragment_count) == (
        after.session_id,
        after.state.fragment_count,
    )
    assert list(range(FRAGMENT_COUNT)) == sorted(fetched)
    assert all((fragment.obs == index).all() for index, fragment in fetched.items())
