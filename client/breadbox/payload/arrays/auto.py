"""The codec `auto`: measures the first arrays of each kind, then picks and says why.

A kind is an array's name, type and shape. While the first arrays of a kind are encoded, every
lossless codec that fits is tried on them. A codec is worth its time when it saves, per second of
encoding and decoding together, more bytes than the rate asked for: what a link or a store's memory
is worth. Among those that are, the one that saves most per array after paying for its time wins.
"""

import logging
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from breadbox.payload.arrays import video
from breadbox.payload.arrays.codecs import RAW, CodecChoice, decode_into, encode

_log = logging.getLogger(__name__)

_TRIALS: Final = 3
"""Arrays of a kind that are measured: enough to pass over one that is not typical."""

_SIZE_BYTES_MIN: Final = 4 * 1024
"""Smaller arrays stay raw: no codec earns its call."""

_KINDS_MAX: Final = 256
"""Kinds remembered; beyond, the oldest is measured anew."""

_CANDIDATES: Final = (CodecChoice("lz4"), CodecChoice("zstd", 1), CodecChoice("h264"))

_Kind = tuple[str, str, tuple[int, ...], int]


@dataclass(frozen=True, slots=True)
class CodecReport:
    """What `auto` picked for one kind of array, and by what figures."""

    name: str
    """The array's path."""
    picked: str
    raw_bytes: int
    """Bytes of all measured arrays together."""
    encoded_bytes: int
    """What the codec picked made of them."""
    encode_s: float
    decode_s: float
    reason: str
    """One sentence with the figures of all candidates."""


@dataclass(slots=True)
class _Tally:
    """What one candidate did so far."""

    encoded_bytes: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0

    def gain_bytes(self, raw_bytes: int, bytes_per_s: float) -> float:
        """Bytes saved, less what the time spent is worth."""
        return raw_bytes - self.encoded_bytes - (self.encode_s + self.decode_s) * bytes_per_s


@dataclass(slots=True)
class _Trial:
    """A kind that is still being measured."""

    count: int
    raw_bytes: int
    tallies: dict[CodecChoice, _Tally]


class AutoPicker:
    """Picks codecs by measuring. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._trials: dict[_Kind, _Trial] = {}
        self._reports: OrderedDict[_Kind, tuple[CodecChoice, CodecReport]] = OrderedDict()

    def pick(self, path: str, array: NDArray[Any], type_name: str, mb_per_s: int) -> CodecChoice:
        """Return the codec for a C-contiguous array; measures if its kind is new."""
        if array.nbytes < _SIZE_BYTES_MIN:
            return RAW
        kind = (path, type_name, array.shape, mb_per_s)
        with self._lock:
            if kind in self._reports:
                return self._reports[kind][0]
            trial = self._trials.setdefault(kind, _Trial(0, 0, {}))
            self._measure(trial, array, type_name)
            choice = self._best(trial, mb_per_s)
            if trial.count == _TRIALS:
                del self._trials[kind]
                self._settle(kind, trial, choice)
            return choice

    def reports(self) -> tuple[CodecReport, ...]:
        """What was picked so far, for metrics."""
        with self._lock:
            return tuple(report for _, report in self._reports.values())

    @staticmethod
    def _measure(trial: _Trial, array: NDArray[Any], type_name: str) -> None:
        trial.count += 1
        trial.raw_bytes += array.nbytes
        scratch = np.empty_like(array)
        for choice in _CANDIDATES:
            if choice.name == "h264" and not _fits_video(array, type_name):
                continue
            tally = trial.tallies.setdefault(choice, _Tally())
            start = time.perf_counter()
            encoded = encode(array, type_name, choice)
            tally.encode_s += time.perf_counter() - start
            tally.encoded_bytes += len(encoded.buffer)
            if len(encoded.buffer) == array.nbytes:
                continue  # It saved nothing; only its time counts.
            start = time.perf_counter()
            decode_into(scratch, encoded.buffer, encoded.codec, encoded.parameters)
            tally.decode_s += time.perf_counter() - start

    @staticmethod
    def _best(trial: _Trial, mb_per_s: int) -> CodecChoice:
        gains = {
            choice: tally.gain_bytes(trial.raw_bytes, mb_per_s * 1e6)
            for choice, tally in trial.tallies.items()
        }
        best = max(gains, key=lambda choice: gains[choice])
        return best if gains[best] > 0 else RAW

    def _settle(self, kind: _Kind, trial: _Trial, choice: CodecChoice) -> None:
        path, type_name, shape, mb_per_s = kind
        figures = "; ".join(
            f"{candidate} saves {1 - tally.encoded_bytes / trial.raw_bytes:.0%} in "
            f"{(tally.encode_s + tally.decode_s) / trial.count * 1000:.1f} ms"
            for candidate, tally in trial.tallies.items()
        )
        reason = f"a second must save {mb_per_s} MB: {figures}, per array"
        picked = trial.tallies.get(choice, _Tally(encoded_bytes=trial.raw_bytes))
        report = CodecReport(
            name=path,
            picked=str(choice),
            raw_bytes=trial.raw_bytes,
            encoded_bytes=picked.encoded_bytes,
            encode_s=picked.encode_s,
            decode_s=picked.decode_s,
            reason=reason,
        )
        self._reports[kind] = (choice, report)
        while len(self._reports) > _KINDS_MAX:
            self._reports.popitem(last=False)
        _log.info("codec auto: %s %s%s gets %s; %s", path, type_name, list(shape), choice, reason)


def _fits_video(array: NDArray[Any], type_name: str) -> bool:
    return video.is_video(array.shape, type_name) and find_spec("av") is not None


picker = AutoPicker()
"""The process's own: what one appender has measured, the next one knows."""
