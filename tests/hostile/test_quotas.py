"""Producers with a token of their own who want more than their share; others lose nothing."""

import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

import breadbox
from breadbox.model.errors import BackpressureError, LimitExceededError
from breadbox.stores import open_store
from breadbox.v1 import fragment_pb2, replay_buffer_service_pb2_grpc
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox_server.limits import EPISODES_MAX
from hostile.harness import attacked_server
from support.eventually import eventually_sync as eventually
from support.fragments import vector_fragment
from support.load import CALL_S, SESSION, fragments_of
from support.served import info_of, reason_of
from support.token_files import bearer, write_tokens

PAYLOAD_BYTES = 1000


class Yard:
    """A server with tokens: the greedy one's, another producer's and a learner's."""

    def __init__(self, tmp_path: Path, stack: ExitStack, greedy: str, *more: str) -> None:
        self._stack = stack
        tokens = tmp_path / "tokens"
        lines = (f"producer greedy {greedy}", "producer honest", "learner trainer")
        self.greedy, self.honest, self.trainer = write_tokens(tokens, *lines)
        url = f"file://{tmp_path}/store"
        options = ("--store", url, "--tokens", str(tokens), "--metrics-listen", "127.0.0.1:0")
        # Stubs say no schema, and clients do.
        limits = ("--uses-max", "1", "--schema", "any", *more)
        self.server = attacked_server(*options, *limits, log=tmp_path / "log")
        self.server.start()
        stack.callback(self.server.stop)
        self._store = open_store(url)
        stack.callback(self._store.close)
        channel = grpc.insecure_channel(self.server.address)
        stack.callback(channel.close)
        self._stub = replay_buffer_service_pb2_grpc.ReplayBufferServiceStub(channel)
        self._indexes: dict[str, int] = {}
        self.learner = self.client(self.trainer)
        self.learner.start_session(SESSION)

    def client(self, token: str, **options: Any) -> breadbox.Client:
        return self._stack.enter_context(
            breadbox.connect(self.server.address, token=token, **options)
        )

    def append(self, token: str, *workers: str, count: int = 1) -> list[int]:
        """The outcomes of `count` fragments of each worker, in one call."""
        fragments = []
        for worker in workers:
            payloads = [[memoryview(bytes(PAYLOAD_BYTES))] for _ in range(count)]
            first = self._indexes.get(worker, 0)
            fragments += fragments_of(self._store.write_many(payloads), worker=worker, first=first)
            self._indexes[worker] = first + count
        reply = self._stub.AppendFragments(
            pb.AppendFragmentsRequest(fragments=fragments), timeout=CALL_S, metadata=bearer(token)
        )
        return [result.outcome for result in reply.results]

    def write(self, token: str, size_bytes: int) -> fragment_pb2.PayloadReference:
        """Write a payload through the gateway."""
        message = pb.WritePayloadsRequest(size_bytes=[size_bytes], data=bytes(size_bytes))
        answers = self._stub.WritePayloads(iter([message]), timeout=CALL_S, metadata=bearer(token))
        return list(answers)[-1].payloads[0]

    def write_refusal(self, token: str, size_bytes: int) -> tuple[str, str]:
        """The reason of a refused write, and the quota that it names."""
        with pytest.raises(grpc.RpcError) as refused:
            self.write(token, size_bytes)
        return reason_of(refused.value), info_of(refused.value).metadata["quota"]

    def discard(self, token: str, payload: fragment_pb2.PayloadReference) -> None:
        """Give up a payload that was written through the gateway."""
        request = pb.DiscardPayloadsRequest(payload_ids=[payload.payload_id])
        self._stub.DiscardPayloads(request, timeout=CALL_S, metadata=bearer(token))

    def refusal(self, token: str, *workers: str, count: int = 1) -> tuple[str, str]:
        """The reason of a refused append, and the quota that it names."""
        with pytest.raises(grpc.RpcError) as refused:
            self.append(token, *workers, count=count)
        for worker in workers:
            self._indexes[worker] -= count
        return reason_of(refused.value), info_of(refused.value).metadata["quota"]

    def report(self, token: str, count: int) -> None:
        """Report so many episodes in one call."""
        episode = pb.EpisodeReport(worker_id="a", return_sum=1.0, end=pb.EPISODE_END_TERMINATED)
        request = pb.ReportEpisodesRequest(episodes=[episode] * count)
        self._stub.ReportEpisodes(request, timeout=CALL_S, metadata=bearer(token))

    def report_refusal(self, token: str, count: int) -> tuple[str, str]:
        """The reason of a refused report, and the quota that it names."""
        with pytest.raises(grpc.RpcError) as refused:
            self.report(token, count)
        return reason_of(refused.value), info_of(refused.value).metadata["quota"]

    def metrics(self) -> str:
        with urllib.request.urlopen(self.server.metrics_url) as answer:
            return str(answer.read().decode())

    def consume(self, count: int) -> None:
        with self.learner.fetch(count) as lease:
            assert count == len(lease)


ADMITTED = fragment_pb2.ADMISSION_OUTCOME_ADMITTED


@pytest.fixture
def make_yard(tmp_path: Path) -> Iterator[Callable[..., Yard]]:
    with ExitStack() as stack:
        yield lambda greedy, *more: Yard(tmp_path, stack, greedy, *more)


def test_workers_that_one_token_invents_end_at_its_quota_and_lock_nobody_out(
    make_yard: Callable[..., Yard],
) -> None:
    yard = make_yard("workers_max=3")
    assert [ADMITTED] * 3 == yard.append(yard.greedy, "a", "b", "c")
    for invented in (["d"], ["a", "e"], ["f", "g"]):
        assert ("QUOTA_EXCEEDED", "workers_max") == yard.refusal(yard.greedy, *invented)
    assert [ADMITTED] * 2 == yard.append(yard.greedy, "a", "c")
    assert [ADMITTED] * 5 == yard.append(yard.honest, *"vwxyz")
    with pytest.raises(LimitExceededError, match=r"'greedy' would exceed its workers_max of 3"):
        yard.client(yard.greedy).append(vector_fragment(worker_id="h", session_id=SESSION))
    # Those of a session that is over count no more.
    yard.learner.start_session("next")
    yard.client(yard.greedy).append(vector_fragment(worker_id="i", session_id="next"))


def test_bytes_that_one_token_holds_end_at_its_quota_until_they_are_used(
    make_yard: Callable[..., Yard],
) -> None:
    yard = make_yard(f"bytes_held_max={4 * PAYLOAD_BYTES}")
    assert [ADMITTED] * 3 == yard.append(yard.greedy, "a", count=3)
    assert ("QUOTA_FULL", "bytes_held_max") == yard.refusal(yard.greedy, "a", count=2)
    assert ("QUOTA_EXCEEDED", "bytes_held_max") == yard.refusal(yard.greedy, "a", count=5)
    assert [ADMITTED] == yard.append(yard.greedy, "a")
    waiting = yard.client(yard.greedy, append_wait_s=0.3)
    with pytest.raises(BackpressureError, match="bytes_held_max"):
        waiting.append(vector_fragment(worker_id="b", session_id=SESSION))
    assert [ADMITTED] * 9 == yard.append(yard.honest, "w", count=9)
    yard.consume(13)
    eventually(lambda: yard.learner.get_buffer().state.payload_bytes == 0)
    assert [ADMITTED] * 4 == yard.append(yard.greedy, "a", count=4)


def test_bytes_that_one_token_writes_through_the_gateway_are_held_before_they_are_announced(
    make_yard: Callable[..., Yard],
) -> None:
    yard = make_yard(f"bytes_held_max={40 * PAYLOAD_BYTES}", "--gateway")
    assert [ADMITTED] * 10 == yard.append(yard.greedy, "a", count=10)
    written = yard.write(yard.greedy, 20 * PAYLOAD_BYTES)
    assert ("QUOTA_FULL", "bytes_held_max") == yard.write_refusal(yard.greedy, 20 * PAYLOAD_BYTES)
    assert ("QUOTA_EXCEEDED", "bytes_held_max") == yard.write_refusal(
        yard.greedy, 41 * PAYLOAD_BYTES
    )
    yard.write(yard.honest, 50 * PAYLOAD_BYTES)
    yard.discard(yard.greedy, written)
    yard.write(yard.greedy, 20 * PAYLOAD_BYTES)


def test_bytes_of_a_token_that_is_bound_to_workers_are_known_after_a_restart(
    make_yard: Callable[..., Yard],
) -> None:
    yard = make_yard(f"workers=a* bytes_held_max={4 * PAYLOAD_BYTES}")
    assert [ADMITTED] * 2 == yard.append(yard.honest, "w", count=2)
    assert [ADMITTED] * 3 == yard.append(yard.greedy, "a1", count=3)
    yard.server.kill()
    yard.server.start()
    eventually(lambda: yard.learner.get_buffer().state.chunk_count == 5)
    assert ("QUOTA_FULL", "bytes_held_max") == yard.refusal(yard.greedy, "a2", count=2)
    assert [ADMITTED] == yard.append(yard.greedy, "a2")


def test_appends_of_one_token_are_slowed_down_to_its_rate_and_others_are_not(
    make_yard: Callable[..., Yard],
) -> None:
    yard = make_yard("appends_per_s_max=2")
    # What five seconds may bring comes at once, and a call is not cut.
    assert [ADMITTED] * 9 == yard.append(yard.greedy, "a", count=9)
    assert [ADMITTED] * 4 == yard.append(yard.greedy, "a", count=4)
    assert ("QUOTA_FULL", "appends_per_s_max") == yard.refusal(yard.greedy, "a")
    assert [ADMITTED] * 40 == yard.append(yard.honest, "w", count=40)
    # A client waits, and comes through by itself.
    yard.client(yard.greedy).append(vector_fragment(worker_id="b", session_id=SESSION))


def test_reports_of_one_token_are_slowed_down_to_its_rate_and_others_are_not(
    make_yard: Callable[..., Yard],
) -> None:
    rate = 0.02  # Slow enough that no time on a busy machine earns another report.
    yard = make_yard(f"appends_per_s_max={rate}")
    yard.report(yard.greedy, EPISODES_MAX)
    for count in (1, EPISODES_MAX):
        refused = yard.report_refusal(yard.greedy, count)
        assert ("QUOTA_FULL", "appends_per_s_max") == refused
    # What is refused counts nowhere, and those of others are counted all.
    for _ in range(20):
        yard.report(yard.honest, EPISODES_MAX)
    assert f'_total{{end="terminated",task="default"}} {21 * EPISODES_MAX:.1f}' in yard.metrics()
    # A flood of reports takes nothing of what may be appended.
    assert [ADMITTED] == yard.append(yard.greedy, "a")
    report = breadbox.EpisodeReport(
        worker_id="a",
        return_sum=1.0,
        discounted_return_sum=1.0,
        step_count=1,
        end=breadbox.EpisodeEnd.TERMINATED,
    )
    with pytest.raises(BackpressureError, match="appends_per_s_max"):
        yard.client(yard.greedy).report_episodes([report])


def test_what_is_refused_and_held_is_counted_by_token(make_yard: Callable[..., Yard]) -> None:
    yard = make_yard("workers_max=1 bytes_held_max=5000")
    yard.append(yard.greedy, "a", count=2)
    yard.refusal(yard.greedy, "b")
    text = yard.metrics()
    for line in (
        'breadbox_token_workers{token="greedy"} 1.0',
        'breadbox_token_bytes{token="greedy"} 2000.0',
        'breadbox_quota_refusals_total{quota="workers_max",token="greedy"} 1.0',
    ):
        assert line in text
