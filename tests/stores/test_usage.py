"""How full a store says it is."""

import secrets
from pathlib import Path

from breadbox.stores import open_custodian, open_store
from support.redis_server import RedisServer

LIMIT_BYTES = 64 * 2**20
PAYLOAD_BYTES = 4 * 2**20


async def test_redis_tells_its_memory_and_its_limit() -> None:
    with RedisServer(memory_bytes_max=LIMIT_BYTES) as server:
        store, custodian = open_store(server.url), open_custodian(server.url)
        before = await custodian.usage()
        store.write_many([[memoryview(secrets.token_bytes(PAYLOAD_BYTES))]])
        after = await custodian.usage()
        store.close()
        await custodian.close()

    assert LIMIT_BYTES == before.limit_bytes == after.limit_bytes
    assert PAYLOAD_BYTES <= after.used_bytes - before.used_bytes < 2 * PAYLOAD_BYTES


async def test_redis_without_a_limit_says_so(redis_url: str) -> None:
    custodian = open_custodian(redis_url)
    usage = await custodian.usage()
    await custodian.close()

    assert 0 == usage.limit_bytes
    assert 0 < usage.used_bytes


async def test_a_directory_tells_its_file_system(tmp_path: Path) -> None:
    usage = await open_custodian(f"file://{tmp_path}").usage()

    assert 0 < usage.used_bytes < usage.limit_bytes


async def test_redis_that_may_lose_payloads_is_named_with_the_remedy() -> None:
    with RedisServer(memory_bytes_max=LIMIT_BYTES) as server:
        server.client().config_set("maxmemory-policy", "allkeys-lru")
        custodian = open_custodian(server.url)
        policy, durability = await custodian.concerns()
        await custodian.close()

    assert "allkeys-lru" in policy
    assert "noeviction" in policy
    assert "appendonly" in durability


async def test_redis_that_keeps_what_it_has_is_no_concern() -> None:
    with RedisServer(memory_bytes_max=LIMIT_BYTES, is_durable=True) as server:
        custodian = open_custodian(server.url)
        assert () == await custodian.concerns()
        await custodian.close()


async def test_a_policy_without_a_limit_evicts_nothing(redis_url: str) -> None:
    custodian = open_custodian(redis_url)
    assert not [each for each in await custodian.concerns() if "noeviction" in each]
    await custodian.close()
