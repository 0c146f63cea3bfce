"""The examples of prioritised and of recurrent Q-learning reach what they say."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from breadbox.mirror import SequenceBatch

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(660)]

EXAMPLES = Path(__file__).parents[2] / "examples"
TARGETS = {"prioritised_dqn.py": 195.0, "recurrent_q.py": 120.0}


@pytest.mark.long
@pytest.mark.parametrize("name", TARGETS)
def test_two_actors_and_a_learner_reach_the_target(name: str) -> None:
    ended = subprocess.run(
        [sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, check=False
    )
    assert 0 == ended.returncode, ended.stdout + ended.stderr
    returns = [float(each) for each in re.findall(r"return ([\d.]+)$", ended.stdout, re.MULTILINE)]
    assert returns[-1] >= TARGETS[name]


def test_no_gradient_goes_through_burn_in() -> None:
    """R2D2's burn-in only brings a state up to date that weights of another age made."""
    example = runpy.run_path(str(EXAMPLES / "recurrent_q.py"))
    torch.manual_seed(0)
    network, shape = example["Network"](), (4, example["BURN_IN"] + example["LENGTH"])
    obs = torch.randn(*shape, example["OBS_SIZE"], requires_grad=True)
    flags = torch.zeros(shape, dtype=torch.bool)
    batch = SequenceBatch(
        obs=obs,
        action=torch.zeros(shape, dtype=torch.int64),
        reward=torch.ones(shape),
        next_obs=obs.detach(),
        terminated=flags,
        truncated=flags,
        first=flags,
        mask=~flags,
        is_burn_in=torch.arange(shape[1]) < example["BURN_IN"],
        in_state=None,
        weight=torch.ones(4),
        handle=torch.zeros(shape, dtype=torch.int64),
        model_version=torch.zeros(shape, dtype=torch.int64),
        extras={"state": torch.zeros(*shape, example["HIDDEN"])},
    )
    example["loss_of"](network, network, batch).backward()
    assert obs.grad is not None
    felt = obs.grad.abs().sum((0, 2)) > 0
    assert batch.is_burn_in.tolist() == (~felt).tolist()


@pytest.mark.parametrize("name", TARGETS)
def test_it_is_short(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) < 150
