"""Metrics of a worker over HTTP."""

import urllib.request

import pytest
from prometheus_client import GC_COLLECTOR

from breadbox.model.errors import InvalidRequestError
from breadbox_rollout.metrics import metrics_served


def test_metrics_are_served_inside_the_block_alone() -> None:
    with metrics_served("127.0.0.1:0", GC_COLLECTOR) as address:
        with urllib.request.urlopen(f"http://{address}/metrics") as answer:
            assert b"python_gc_objects_collected_total" in answer.read()
        with (
            pytest.raises(InvalidRequestError, match="cannot be listened on"),
            metrics_served(address),
        ):
            pass
    with metrics_served(address) as again:  # The port is free.
        assert address == again


@pytest.mark.parametrize("listen", ["9465", "host:", ":1", "host:70000", "host:x"])
def test_what_is_no_address_to_listen_on_is_refused(listen: str) -> None:
    with pytest.raises(InvalidRequestError, match="HOST:PORT"), metrics_served(listen):
        pass
