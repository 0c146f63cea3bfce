"""What the codec `auto` picked, as Prometheus and the log see it."""

import logging
import urllib.request

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from breadbox.metrics import CodecCollector, metrics_served
from breadbox.model.errors import InvalidRequestError
from breadbox.payload import codec_reports, encode_tree
from breadbox.payload.arrays import auto


@pytest.fixture(autouse=True)
def _fresh_picker(monkeypatch: pytest.MonkeyPatch) -> None:
    from breadbox import payload
    from breadbox.payload import format as payload_format

    picker = auto.AutoPicker()
    monkeypatch.setattr(payload_format, "picker", picker)
    monkeypatch.setattr(payload, "picker", picker)


def encode_often(tree: dict[str, np.ndarray]) -> None:
    for _ in range(4):
        encode_tree(tree, codecs="auto:1")


def test_a_scrape_tells_what_was_picked_and_what_it_saves() -> None:
    registry = CollectorRegistry()
    registry.register(CodecCollector())
    assert b"{" not in generate_latest(registry)
    noise = np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint8)
    encode_often({"flat": np.zeros(100_000, np.uint8), "noise": noise})
    encode_often({"flat": np.zeros(50_000, np.uint8)})
    picked = {report.name: report.picked for report in codec_reports()}
    assert picked["flat"] != "raw"
    flat = {"array": "flat", "codec": picked["flat"]}
    raw = {"array": "noise", "codec": "raw"}
    assert 1 == registry.get_sample_value("breadbox_codec_picks", raw)
    assert 0 == registry.get_sample_value("breadbox_codec_saved_ratio", raw)
    saved = registry.get_sample_value("breadbox_codec_saved_ratio", flat)
    assert saved is not None
    assert 0.9 < saved < 1.0
    picks = [
        registry.get_sample_value("breadbox_codec_picks", {"array": "flat", "codec": codec})
        for codec in {report.picked for report in codec_reports() if report.name == "flat"}
    ]
    assert 2 == sum(value for value in picks if value is not None)


def test_a_log_line_says_what_was_picked_and_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="breadbox"):
        encode_often({"flat": np.zeros(100_000, np.uint8)})
    (line,) = [each.getMessage() for each in caplog.records if "codec auto" in each.getMessage()]
    assert line.startswith("codec auto: flat |u1[100000] gets ")
    assert "saves" in line


def test_metrics_are_served_inside_the_block_alone() -> None:
    encode_often({"flat": np.zeros(100_000, np.uint8)})
    with metrics_served("127.0.0.1:0") as address:
        with urllib.request.urlopen(f"http://{address}/metrics") as answer:
            assert b'breadbox_codec_picks{array="flat",' in answer.read()
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
