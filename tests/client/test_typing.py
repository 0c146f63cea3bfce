"""What type checkers say of code that uses the library: of mistakes, and of what is right."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

CACHE = Path(__file__).resolve().parents[2] / ".mypy_cache" / "snippets"
RIGHT = """
import numpy as np
import torch

import breadbox


def learn(client: breadbox.Client, device: torch.device) -> float:
    with client.fetch(8) as lease:
        for batch in lease.batches(4):
            array: np.ndarray = batch.reward
            print(array.mean(), batch.terminated[:, 0], batch.obs["image"].shape, len(batch))
        for loaded in lease.batches(4, device="cpu", prefetch_batches=4):
            tensor: torch.Tensor = loaded.reward
            print(tensor.to(device))
        batch_on_device = client.load_batch(lease.references, device=device)
        return loss_of(batch_on_device)


def loss_of(batch: breadbox.types.Batch[torch.Tensor]) -> float:
    return float(batch.reward.sum().item())


def anything(batch: breadbox.types.Batch) -> int:
    return len(batch)


async def learn_async(client: breadbox.aio.Client) -> None:
    async with client.fetch(8) as lease:
        async for batch in lease.batches(4):
            array: np.ndarray = batch.ended
            print(array, (await client.load_batch(lease.references, device="cpu")).reward.cpu())


with breadbox.local_server(uses_max=4, capacity_bytes="1GiB") as client:
    print(client.get_buffer().config.uses_max)
"""

WRONG = {
    "an array has no such attribute": "batch.reward.foo",
    "a tensor has no such attribute": "tensors.reward.foo",
    "numpy arrays are on no device": "batch.reward.cuda()",
    "tensors are no numpy arrays": "tensors.reward.astype('f4')",
    "a batch has no such field": "batch.rewards",
    "a device is no number": "client.load_batch(lease.references, device=3)",
    "a device is no number, of batches either": "lease.batches(4, device=3)",
    "a batch size is a number": "lease.batches('4')",
    "there is no such option of loading": "lease.batches(4, prefetch=3)",
    "there is no such option of a server": "breadbox.local_server(uses=3)",
    "an option of a server is a number": "breadbox.local_server(uses_max='many')",
    "log_prob may be absent": "batch.log_prob.mean()",
    "a reply is no outcome": "client.append(fragment) == 'admitted' + 1",
}

FRAME = """
import breadbox


def check(
    client: breadbox.Client, lease: breadbox.types.Lease, fragment: breadbox.Fragment
) -> None:
    batch = client.load_batch(lease.references)
    tensors = client.load_batch(lease.references, device="cpu")
    print(batch, tensors, fragment)
"""


pytestmark = pytest.mark.long


@pytest.fixture(scope="module", params=["mypy", "pyright"])
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a checker says of both; one run, since it reads all of torch's annotations."""
    name = str(request.param)
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed; no extra has pyright, which needs Node.js")
    folder = tmp_path_factory.mktemp(name)
    (folder / "right.py").write_text(RIGHT)
    (folder / "wrong.py").write_text(
        FRAME + "".join(f"    print({each})\n" for each in WRONG.values())
    )
    options = {
        "mypy": ["--strict", "--config-file=", "--no-error-summary", "--cache-dir", str(CACHE)],
        "pyright": ["--pythonpath", sys.executable],
    }
    done = subprocess.run(
        [sys.executable, "-m", name, *options[name], "right.py", "wrong.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert 1 == done.returncode, done.stdout + done.stderr
    return done.stdout


def lines_with_errors(said: str, file: str) -> set[int]:
    return {int(line) for line in re.findall(rf"{file}\.py:(\d+)(?::\d+)*:? .*error", said)}


@pytest.mark.timeout(580)
def test_what_is_right_passes(said: str) -> None:
    assert set() == lines_with_errors(said, "right"), said


@pytest.mark.timeout(580)
def test_mistakes_are_found(said: str) -> None:
    start = len(FRAME.splitlines())
    wrong = lines_with_errors(said, "wrong")
    missed = [why for line, why in enumerate(WRONG, start + 1) if line not in wrong]
    assert [] == missed, said
    assert not [line for line in wrong if line <= start], said
