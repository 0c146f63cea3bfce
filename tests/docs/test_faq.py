"""Claims of docs/faq.md that no other test holds."""

import subprocess
import sys
from copy import copy
from pathlib import Path

import numpy as np
import pytest

import breadbox
from breadbox.errors import ClosedError
from support.fragments import vector_fragment

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "faq.md").read_text()


def test_a_client_that_is_pickled_into_an_actor_says_to_connect_there(
    breadbox_client: breadbox.Client,
) -> None:
    with pytest.raises(ClosedError, match="connect in each process"):
        copy(breadbox_client)  # By the same protocol as a pickle.


def test_a_buffer_takes_the_limiters_that_the_page_names(breadbox_client: breadbox.Client) -> None:
    for limiter in (
        breadbox.SampleToInsertRatio(ratio=2.0, error_chunks=8.0),
        breadbox.MinimumChunks(3),
    ):
        config = breadbox.BufferConfig(limiter=limiter)
        description = breadbox_client.update_buffer(breadbox_client.buffer, config)
        assert limiter == description.config.limiter


def test_the_oldest_chunks_leave_a_full_buffer_and_are_counted(
    breadbox_client: breadbox.Client,
) -> None:
    name = breadbox_client.buffer
    breadbox_client.update_buffer(name, breadbox.BufferConfig(capacity_chunks=4))
    breadbox_client.start_session("s")
    breadbox_client.append_many([vector_fragment(index) for index in range(6)])
    held = [
        fragment.fragment_index
        for read in breadbox_client.tail(max_wait_s=0)
        for fragment in read.fragments
    ]
    assert [2, 3, 4, 5] == held
    assert 2 == breadbox_client.get_buffer().state.counters["chunks_evicted_capacity"]
    assert "`chunks_evicted_capacity`" in PAGE


def test_batches_and_weights_need_no_torch(breadbox_client: breadbox.Client) -> None:
    breadbox_client.start_session("s")
    breadbox_client.append_many([vector_fragment(index) for index in range(2)])
    code = f"""
import sys
sys.modules["torch"] = None
import breadbox, numpy
with breadbox.connect({breadbox_client.address!r}, buffer={breadbox_client.buffer!r}) as client:
    client.publish("s", 1, {{"weights": numpy.arange(3)}})
    batch = next(client.batches(2))
    assert isinstance(batch.obs, numpy.ndarray)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
    loaded = breadbox_client.load_model()
    assert loaded is not None
    assert [0, 1, 2] == np.asarray(loaded[1]["weights"]).tolist()
