"""What is fuzzed: readers of what others wrote, each with what it may raise and a few good inputs.

A reader refuses what it cannot read with its own error. Anything else is a finding: another
exception, a crash, an input that takes seconds or gigabytes, a secret in an error.
"""

import asyncio
import json
import os
import random
import re
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import grpc
import lz4.frame
import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import zstandard

from breadbox.model.errors import ReplayBufferError
from breadbox.payload import decode_tree, encode_fragment, encode_tree
from breadbox.reading.packed import PackedBatch
from breadbox.stores.urls import parse_store_url, redact
from breadbox.v1 import fragment_pb2
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox_offline.decoding.packing import read_numpy_pickle, run_machine, unpack
from breadbox_offline.episodes.serialized import pack_episode, unpack_episode
from breadbox_offline.files.dataset import Dataset
from breadbox_offline.limits import DataLimits
from breadbox_offline.rows.options import MappingOptions
from breadbox_server.access import tokens
from breadbox_server.app import SERVICE_NAME
from breadbox_server.core.buffers import BufferSet
from breadbox_server.core.model.config import BufferConfig
from breadbox_server.journal.encoding.codec import (
    Snapshot,
    decode_snapshot,
    decode_turn,
    encode_snapshot,
    encode_turn,
)
from breadbox_server.journal.encoding.frames import (
    JournalFormatError,
    frame_snapshot,
    frame_turn,
    open_snapshot,
    open_turn,
)
from golden.history import play
from support.forged_payloads import assemble, sections_of
from support.packed_outcomes import alike, bodies_of, one_by_one, outcome
from support.rllib_cases import make_toy_episode
from support.sequences import sequence
from support.served import served

LIMITS = DataLimits.within(1 << 26)
"""Small, so that what is allowed is quickly done."""
CALL_S = 0.5


@dataclass(frozen=True, slots=True)
class Target:
    """A reader."""

    read: Callable[[bytes], object]
    seeds: Callable[[], Iterable[bytes]]
    refusals: tuple[type[Exception], ...]
    """What it raises for input that it does not read."""
    is_quick: bool = True
    """Whether thousands of inputs a second are read."""

    def try_one(self, data: bytes) -> None:
        """Read an input; raises what it must not raise."""
        with suppress(*self.refusals):
            self.read(data)


# --- payloads --------------------------------------------------------------------------------


def _payloads() -> Iterator[bytes]:
    tree = {"obs": np.arange(40, dtype=np.int16).reshape(8, 5), "state": [np.zeros(3), None]}
    for codec in ("raw", "lz4", "zstd"):
        yield b"".join(encode_tree(tree, attributes={"kind": "test"}, codecs=codec))
        yield b"".join(encode_fragment(sequence(), codecs=codec))


def _read_sealed(data: bytes) -> object:
    return decode_tree(_assembled(data))


def _assembled(data: bytes) -> bytes:
    """A head and a body, with checksums and sizes made right, which chance never finds."""
    sizes = [int.from_bytes(data[start : start + 2], "little") for start in (0, 2, 4)]
    sections = []
    rest = data[6:]
    for size_bytes in sizes:
        sections.append(rest[:size_bytes])
        rest = rest[size_bytes:]
    raw_layout, raw_figures, attributes = sections
    return assemble(raw_layout, rest, raw_figures, attributes)


def _sealed() -> Iterator[bytes]:
    for payload in _payloads():
        *sections, body = sections_of(payload)
        sizes = b"".join(len(each).to_bytes(2, "little") for each in sections)
        yield sizes + b"".join(sections) + body


def _read_together(data: bytes) -> None:
    """A payload between two good ones: verified together they come to what each one comes to."""
    sequences = [sequence(member=0), sequence(member=1, length=9), sequence(member=2)]
    good = bodies_of(sequences)
    for body in (data, _assembled(data)):
        bodies = [good[0], body, good[2]]
        for kind in (PackedBatch, None):
            with one_by_one():
                wanted = outcome(kind, sequences, bodies)
            assert alike(wanted, outcome(kind, sequences, bodies))


def _together() -> Iterator[bytes]:
    (payload,) = bodies_of([sequence(member=1, length=9)])
    *sections, body = sections_of(payload)
    sizes = b"".join(len(each).to_bytes(2, "little") for each in sections)
    yield from (payload, sizes + b"".join(sections) + body)


# --- imports ---------------------------------------------------------------------------------


def _pickles() -> Iterator[bytes]:
    import pickle  # noqa: TID251 - makes inputs; what reads them is our own

    for held in (np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros(3, ">f4"), np.float64(1)):
        for protocol in (3, 4, 5):
            yield pickle.dumps(held, protocol)


def _read_pickle(data: bytes) -> None:
    """Both readers, which have to agree."""
    outcomes: list[Any] = []
    for read in (partial(read_numpy_pickle, limits=LIMITS), lambda each: run_machine(each, LIMITS)):
        try:
            outcomes.append(read(data))
        except ReplayBufferError:
            outcomes.append(ReplayBufferError)
    one, other = outcomes
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    else:
        assert type(one) is type(other)


def _packed() -> Iterator[bytes]:
    import base64

    return (base64.b64encode(lz4.frame.compress(each)) for each in _pickles())


@contextmanager
def _folder() -> Iterator[Path]:
    shared_memory = "/dev/shm"
    where = shared_memory if os.access(shared_memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=where, prefix="breadbox-fuzz-") as folder:
        yield Path(folder)


def _read_file(name: str, data: bytes) -> None:
    with _folder() as folder:
        (folder / name).write_bytes(data)
        _read_dataset(str(folder / name))


def _read_dataset(path: str) -> None:
    dataset = Dataset(path, MappingOptions(limits=LIMITS))
    for _ in dataset.episodes():
        pass
    assert all(str(finding) for finding in dataset.report.findings)


_STEPS = {
    "eps_id": ["a"] * 3,
    "t": [0, 1, 2],
    "obs": [[0.0], [1.0], [2.0]],
    "new_obs": [[1.0], [2.0], [3.0]],
    "actions": [0, 1, 0],
    "rewards": [1.0, 1.0, 1.0],
    "terminateds": [False, False, True],
    "infos": [{"x": 1}, {"x": None}, {"x": 3}],
}


def _parquets() -> Iterator[bytes]:
    dictionary = pa.array(["a"] * 3).dictionary_encode()
    batches = {name: [held] for name, held in _STEPS.items()}
    for columns in (_STEPS, _STEPS | {"eps_id": dictionary}, batches):
        out = pa.BufferOutputStream()
        parquet.write_table(pa.table(columns), out, compression="none")
        yield out.getvalue().to_pybytes()


def _lines() -> Iterator[bytes]:
    rows = [dict(zip(_STEPS, row, strict=True)) for row in zip(*_STEPS.values(), strict=True)]
    yield "".join(json.dumps(row) + "\n" for row in rows).encode()
    yield json.dumps(_STEPS).encode()


def _episodes() -> Iterator[bytes]:
    yield pack_episode(make_toy_episode("a", 3, terminated=True, truncated=False))


def _manifests() -> Iterator[bytes]:
    line = {"episode_id": "a", "action_path": "a.npz", "obs_path": "o.npz", "video_path": "v.mp4"}
    yield json.dumps(line).encode() + b"\n"


@cache
def _minari_metadata() -> bytes:
    box = {"type": "Box", "dtype": "float32", "shape": [1], "low": [0.0], "high": [1.0]}
    metadata = {
        "dataset_id": "fuzz/fuzz-v0",
        "data_format": "hdf5",
        "minari_version": "0.5.0",
        "total_episodes": 1,
        "total_steps": 1,
        "observation_space": json.dumps(box),
        "action_space": json.dumps(box),
    }
    return json.dumps(metadata).encode()


def _read_minari(file: bytes, metadata: bytes) -> None:
    with _folder() as folder:
        data = folder / "fuzz" / "fuzz-v0" / "data"
        data.mkdir(parents=True)
        (data / "main_data.hdf5").write_bytes(file)
        (data / "metadata.json").write_bytes(metadata)
        os.environ["MINARI_DATASETS_PATH"] = str(folder)
        _read_dataset("minari:fuzz/fuzz-v0")


@cache
def _hdf5() -> bytes:
    import h5py

    with _folder() as folder:
        with h5py.File(folder / "a.hdf5", "w") as file:
            episode = file.create_group("episode_0")
            episode["observations"] = np.zeros((2, 1), np.float32)
            episode["actions"] = np.zeros((1, 1), np.float32)
            for name in ("rewards", "terminations", "truncations"):
                episode[name] = np.ones(1)
        return (folder / "a.hdf5").read_bytes()


# --- files and addresses of a server ---------------------------------------------------------


def _tokens() -> Iterator[bytes]:
    digest = "ab" * 32
    yield f"# tokens\nproducer workers sha256:{digest} buffers=a*,b workers_max=3\n".encode()
    yield f"admin boss sha256:{digest}\n".encode()


_SECRET = "hunter2secret"


def _read_url(data: bytes) -> None:
    """A URL with a password, which may be shown nowhere."""
    text = data.decode(errors="replace")
    if _SECRET in text.replace(f":{_SECRET}@", "") or re.match("(?i:file|unix):|/", text):
        return  # it stands where no password does
    shown = [redact(text)]
    try:
        shown.append(repr(parse_store_url(text)))
    except ReplayBufferError as error:
        shown.append(str(error))
    assert not any(_SECRET in each for each in shown)


def _urls() -> Iterator[bytes]:
    for host in ("h:1/0", "a:1,b:2/0?timeout=1", "[::1]:6379/0", "h/0?password=x#f"):
        for scheme in ("redis", "rediss", "redis+sentinel", "redis+cluster"):
            yield f"{scheme}://user:{_SECRET}@{host}".encode()
    yield b"file:///dev/shm/breadbox?segment_bytes=1"


def _read_turn(data: bytes) -> None:
    record, _ = frame_turn(7, 8, data)
    body, _ = open_turn(7, 8, record)
    decode_turn(body)


def _turns() -> Iterator[bytes]:
    buffers = BufferSet(random.Random(3), BufferConfig(), is_recording=True)
    yield encode_turn(buffers.take_entries())
    play(buffers)
    yield encode_turn(buffers.take_entries())


def _read_snapshot(data: bytes) -> None:
    """A message: the frame and its compression are right."""
    record = frame_snapshot(3, zstandard.compress(data))
    body, _ = open_snapshot(3, record)
    decode_snapshot(body)


def _snapshots() -> Iterator[bytes]:
    buffers = BufferSet(random.Random(3), BufferConfig())
    for act in range(2):
        yield zstandard.decompress(encode_snapshot(Snapshot(3, 1.0, buffers.snapshot())))
        play(buffers, act)


# --- the service -----------------------------------------------------------------------------

_METHODS = list(pb.DESCRIPTOR.services_by_name["ReplayBufferService"].methods)
_WRONG = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)


@dataclass(slots=True)
class _Service:
    """A real server, in a thread of its own."""

    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    channel: Any = None
    ready: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        self.loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        async with served(BufferConfig(capacity_chunks=64)) as world:
            await world.start()
            self.channel = world.channel
            self.ready.set()
            await asyncio.Event().wait()

    async def call(self, method: Any, data: bytes) -> grpc.StatusCode:
        """Send a request; returns how it was answered."""
        kinds = {False: "unary", True: "stream"}
        kind = f"{kinds[method.client_streaming]}_{kinds[method.server_streaming]}"
        callee = getattr(self.channel, kind)(f"/{SERVICE_NAME}/{method.name}")
        request = _once(data) if method.client_streaming else data
        call = callee(request, timeout=CALL_S)
        try:
            if method.server_streaming:
                async for _ in call:
                    pass
            else:
                await call
        except grpc.RpcError:
            pass
        code: grpc.StatusCode = await call.code()
        return code


async def _once(data: bytes) -> Any:
    yield data


@cache
def _service() -> _Service:
    service = _Service()
    threading.Thread(target=service.run, daemon=True).start()
    assert service.ready.wait(60)
    return service


def _call(data: bytes) -> None:
    """A first byte that names a method, and a request."""
    if not data:
        return
    method = _METHODS[data[0] % len(_METHODS)]
    service = _service()
    done = asyncio.run_coroutine_threadsafe(service.call(method, data[1:]), service.loop)
    code = done.result(timeout=60)
    assert code not in _WRONG, f"{method.name} answered {code}"


def _calls() -> Iterator[bytes]:
    fragment = fragment_pb2.FragmentMetadata(
        worker_id="w0",
        session_id="run",
        step_count=8,
        payload=fragment_pb2.PayloadReference(payload_id="0" * 32, size_bytes=100),
    )
    requests = {
        "StartSession": pb.StartSessionRequest(session_id="run"),
        "PublishModel": pb.PublishModelRequest(session_id="run", model_version=1),
        "AppendFragments": pb.AppendFragmentsRequest(fragments=[fragment, fragment]),
        "FetchFragments": pb.FetchFragmentsRequest(request_id="r", fragment_count=1),
        "RenewLease": pb.RenewLeaseRequest(lease_id="l"),
        "UpdatePriorities": pb.UpdatePrioritiesRequest(
            updates=[pb.PriorityUpdate(chunk_id=0, priority=0.5)], delete_chunk_ids=[1]
        ),
        "ReportEpisodes": pb.ReportEpisodesRequest(
            episodes=[
                pb.EpisodeReport(
                    worker_id="w", task="t", return_sum=1.0, end="EPISODE_END_TERMINATED"
                )
            ]
        ),
    }
    for index, method in enumerate(_METHODS):
        request = requests.get(method.name)
        yield bytes([index]) + (b"" if request is None else request.SerializeToString())


TARGETS: dict[str, Target] = {
    "payload": Target(decode_tree, _payloads, (ReplayBufferError,)),
    "payload-sealed": Target(_read_sealed, _sealed, (ReplayBufferError,)),
    "payloads-together": Target(_read_together, _together, ()),
    "pickle": Target(_read_pickle, _pickles, ()),
    "packed": Target(partial(unpack, limits=LIMITS), _packed, (ReplayBufferError,)),
    "episode": Target(partial(unpack_episode, limits=LIMITS), _episodes, (ReplayBufferError,)),
    "parquet": Target(
        partial(_read_file, "a.parquet"), _parquets, (ReplayBufferError,), is_quick=False
    ),
    "json-lines": Target(
        partial(_read_file, "a.jsonl"), _lines, (ReplayBufferError,), is_quick=False
    ),
    "msgpack": Target(
        partial(_read_file, "a.msgpack"), _episodes, (ReplayBufferError,), is_quick=False
    ),
    "manifest": Target(
        partial(_read_file, "manifest.jsonl"), _manifests, (ReplayBufferError,), is_quick=False
    ),
    "minari-metadata": Target(
        lambda data: _read_minari(_hdf5(), data),
        lambda: [_minari_metadata()],
        (ReplayBufferError,),
        is_quick=False,
    ),
    "hdf5": Target(
        lambda data: _read_minari(data, _minari_metadata()),
        lambda: [_hdf5()],
        (ReplayBufferError,),
        is_quick=False,
    ),
    "tokens": Target(
        lambda data: tokens.parse(data.decode(errors="replace")), _tokens, (ValueError,)
    ),
    "store-url": Target(_read_url, _urls, ()),
    "journal-turn": Target(_read_turn, _turns, (JournalFormatError,)),
    "journal-snapshot": Target(_read_snapshot, _snapshots, (JournalFormatError,)),
    "rpc": Target(_call, _calls, (), is_quick=False),
}
