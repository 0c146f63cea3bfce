"""A Redis that may hold little: with default limits it never fills, and nobody is told to wait."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import breadbox
from breadbox.model.types import AdmissionOutcome
from support.fragments import vector_fragment
from support.redis_server import RedisServer
from support.server_process import ServerProcess

pytestmark = pytest.mark.integration

MIB = 2**20
LIMIT_BYTES = 32 * MIB
FRAGMENT_BYTES = MIB


def test_buffers_are_promised_what_redis_can_hold_and_take_turns_in_it(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with (
        RedisServer(memory_bytes_max=LIMIT_BYTES, with_tcp=True, is_durable=True) as redis,
        ServerProcess("--store", redis.tcp_url, log=log) as server,
        breadbox.connect(server.address, reconnect_s=0.0) as client,
    ):
        client.start_session("s")
        outcomes = []
        for index in range(3 * LIMIT_BYTES // FRAGMENT_BYTES):
            obs = np.full((4, FRAGMENT_BYTES // 4), index % 251, np.uint8)
            outcomes.append(client.append(replace(vector_fragment(index), obs=obs)).outcome)
        seen = client.get_buffer()

    assert {AdmissionOutcome.ADMITTED} == set(outcomes)
    assert int(LIMIT_BYTES * 0.7) == seen.config.capacity_bytes
    assert seen.config.capacity_bytes >= seen.state.payload_bytes > LIMIT_BYTES // 2
    assert "give Redis more maxmemory" in log.read_text()
