"""The buffer as a torch dataset, and in the shape of TorchRL's buffers."""

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import breadbox
from breadbox.model.errors import InvalidRequestError, WaitElapsedError
from breadbox.model.fragment import Fragment
from breadbox.reading.batches import Batch
from breadbox.testing import ServerProcess, start_server
from breadbox_learner.training.dataset import FragmentDataset

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with start_server() as running:
        yield running


@pytest.fixture
def client(server: ServerProcess) -> Iterator[breadbox.Client]:
    with breadbox.connect(server.address) as made:
        yield made


def fragment(index: int, session: str, *, ended_at: int | None = None) -> Fragment:
    """Four steps; the observation at step t is 100 * index + t."""
    terminated = np.zeros(4, np.bool_)
    truncated = np.arange(4) == (-1 if ended_at is None else ended_at)
    return Fragment(
        worker_id="w",
        fragment_index=index,
        session_id=session,
        model_version_min=0,
        model_version_max=0,
        obs={"position": (100 * index + np.arange(4, dtype=np.float32))[:, None]},
        action=np.arange(4),
        reward=np.ones(4, np.float32),
        terminated=terminated,
        truncated=truncated,
        first=np.concatenate([[False], truncated[:-1]]),
        episode_id=np.zeros(4, np.int64),
        next_obs={"position": np.array([100 * index + 4], np.float32)},
        final_obs_step=None if ended_at is None else np.array([ended_at], np.int32),
        final_obs=None if ended_at is None else {"position": np.array([[-7]], np.float32)},
        log_prob=np.full(4, -0.5, np.float32),
    )


def fill(client: breadbox.Client, session: str, count: int) -> None:
    client.start_session(session)
    client.append_many([fragment(index, session) for index in range(count)])


def indices(batch: Batch) -> list[int]:
    got = [reference.metadata.fragment_index for reference in batch.references]
    assert [100.0 * index for index in got] == batch.obs["position"][:, 0, 0].tolist()
    return got


def test_batches_come_as_tensors(server: ServerProcess, client: breadbox.Client) -> None:
    fill(client, "tensors", 12)
    dataset = FragmentDataset(server.address, fragment_count=6, batch_size=4, fetch_count=2)
    batches = list(DataLoader(dataset, batch_size=None))
    assert [4, 2, 4, 2] == [len(batch) for batch in batches]
    assert all(isinstance(batch.reward, torch.Tensor) for batch in batches)
    assert list(range(12)) == sorted(index for batch in batches for index in indices(batch))
    assert 0 == client.get_buffer().state.lease_count


def test_persistent_workers_share_out_the_fetches_in_every_iteration(
    server: ServerProcess, client: breadbox.Client
) -> None:
    dataset = FragmentDataset(server.address, fragment_count=4, batch_size=2, fetch_count=3)
    loader = DataLoader(
        dataset,
        batch_size=None,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context="spawn",
    )
    for session in ("first", "second"):
        fill(client, session, 12)
        seen = Counter(index for batch in loader for index in indices(batch))
        assert dict.fromkeys(range(12), 1) == dict(seen)
        # Workers release their leases a moment after their last batch was received.
        assert client.get_buffer().state.fragment_count == 0
    loader._iterator._shutdown_workers()  # noqa: SLF001 - or they live until exit


def test_leaving_the_loop_early_gives_the_use_back(
    server: ServerProcess, client: breadbox.Client
) -> None:
    fill(client, "early", 8)
    dataset = FragmentDataset(server.address, fragment_count=8, batch_size=2)
    for _ in dataset:
        break
    state = client.get_buffer().state
    assert (8, 0) == (state.fragment_count, state.lease_count)


def test_an_empty_buffer_ends_the_wait_in_time(
    server: ServerProcess, client: breadbox.Client
) -> None:
    client.start_session("empty")
    dataset = FragmentDataset(server.address, fragment_count=1, batch_size=1, max_wait_s=0.05)
    with pytest.raises(WaitElapsedError):
        next(iter(dataset))


def test_a_negative_fetch_count_is_refused(server: ServerProcess) -> None:
    with pytest.raises(InvalidRequestError, match="fetch_count"):
        FragmentDataset(server.address, fragment_count=1, batch_size=1, fetch_count=-1)
