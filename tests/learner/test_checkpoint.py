"""Checkpoints: what is resumed goes on as if nothing had happened; a crash leaves one whole."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from safetensors.torch import load, save

from breadbox_learner.runs import RunFolder, RunFolderError
from breadbox_learner.settings import PpoConfig
from breadbox_learner.training import checkpoint
from breadbox_learner.training.batching import EpisodeReturns, TrainingBatch
from breadbox_learner.training.checkpoint import CheckpointError, SessionState
from breadbox_learner.training.ppo import PpoUpdater
from breadbox_learner.training.trainer import TrainerState
from breadbox_policies import PolicyModule, make_policy
from support.collating import collate
from support.local_rollout import LocalRollout

IDENTITY = {"env": "CartPole-v1", "policy": "mlp"}


def make_cartpole() -> gymnasium.Env[Any, Any]:
    return gymnasium.make("CartPole-v1")


class Learner:
    """Policy, updater and counters of one run."""

    def __init__(self, name: str = "mlp", seed: int = 0, **config: Any) -> None:
        torch.manual_seed(seed)
        env = make_cartpole()
        self.policy: PolicyModule = make_policy(name, env.observation_space, env.action_space)
        env.close()
        self.updater = PpoUpdater(self.policy, PpoConfig(**config), seed=seed)
        self.returns = EpisodeReturns()
        self.state = TrainerState()

    def train(self, batches: list[TrainingBatch]) -> list[float]:
        losses = []
        for batch in batches:
            statistics = self.updater.update(batch, number=self.state.update)
            self.state.update += 1
            self.returns.observe(batch)
            losses += [statistics.policy_loss, statistics.value_loss, statistics.entropy]
        return losses

    def encoded(self) -> bytes:
        return checkpoint.encode(
            updater=self.updater,
            state=self.state,
            returns=self.returns,
            session=SessionState("session-1", self.state.update),
            identity=IDENTITY,
        )

    def restore(self, data: bytes, identity: dict[str, Any] = IDENTITY) -> SessionState:
        self.state, session = checkpoint.restore(
            data,
            updater=self.updater,
            returns=self.returns,
            identity=identity,
            source="checkpoint",
        )
        return session


@pytest.fixture(scope="module")
def batches() -> list[TrainingBatch]:
    policy = Learner().policy
    rollout = LocalRollout(make_cartpole, env_count=8, steps_per_fragment=16, seed=0)
    made = [collate(rollout.collect(policy, 2)) for _ in range(6)]
    rollout.close()
    return made


@pytest.mark.parametrize(
    "config", [{}, {"amp": "bfloat16"}, {"lr": "2.5e-3:0@8updates"}, {"accumulation_count": 2}]
)
def test_a_resumed_run_makes_the_very_same_curve(
    batches: list[TrainingBatch], config: dict[str, Any]
) -> None:
    whole = Learner(**config)
    wanted = whole.train(batches)

    first, second = Learner(**config), Learner(seed=99, **config)
    second.updater = PpoUpdater(second.policy, PpoConfig(**config), seed=0)
    got = first.train(batches[:3])
    session = second.restore(first.encoded())
    got += second.train(batches[3:])

    assert wanted == got
    for name, tensor in whole.policy.state_dict().items():
        assert torch.equal(tensor, second.policy.state_dict()[name]), name
    assert (SessionState("session-1", 3), 6) == (session, second.state.update)
    assert (whole.returns.recent, whole.returns.episode_count) == (
        second.returns.recent,
        second.returns.episode_count,
    )


def test_torchs_own_generator_is_resumed() -> None:
    learner, resumed = Learner(), Learner()
    data = learner.encoded()
    wanted = torch.rand(3).tolist()
    resumed.restore(data)
    assert wanted == torch.rand(3).tolist()


def test_a_checkpoint_of_another_run_is_refused() -> None:
    data = Learner().encoded()
    with pytest.raises(CheckpointError, match="policy 'mlp', not 'lstm'"):
        Learner().restore(data, {**IDENTITY, "policy": "lstm"})


def test_weights_that_do_not_fit_are_named() -> None:
    data = Learner("lstm").encoded()
    with pytest.raises(CheckpointError, match=r"missing: .*actor"):
        Learner().restore(data)


def test_damage_is_refused_in_one_line() -> None:
    data = Learner().encoded()
    header_size = int.from_bytes(data[:8], "little")
    wrong = {
        "empty": b"",
        "short": data[: len(data) // 2],
        "no header": data[:8] + b"x" * header_size + data[8 + header_size :],
        "no metadata": save({"policy.x": torch.zeros(1)}),
        "huge header": b"\xff" * 8 + data[8:],
        "not a file of ours": b"\x80\x04\x95" + b"0" * 100,
    }
    for name, damaged in wrong.items():
        with pytest.raises(CheckpointError, match="damaged, or no checkpoint") as caught:
            Learner().restore(damaged)
        assert "\n" not in str(caught.value), name


def test_another_format_version_is_refused() -> None:
    data = Learner().encoded()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    text = json.loads(header["__metadata__"]["breadbox"]) | {"format_version": 2}
    changed = save(load(data), metadata={"breadbox": json.dumps(text)})
    with pytest.raises(CheckpointError, match="format version 2, wanted 1"):
        Learner().restore(changed)


def test_a_write_that_fails_leaves_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    folder.write_checkpoint(b"first")

    def full(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(RunFolderError, match="no space left"):
        folder.write_checkpoint(b"second")
    assert b"first" == folder.read_checkpoint()


WRITER = """
import sys
from pathlib import Path
from breadbox_learner.runs import RunFolder
folder = RunFolder(Path(sys.argv[1]))
for number in range(1_000_000):
    folder.write_checkpoint(number.to_bytes(8, "little") * 200_000)
    if number % 5 == 0:
        print(number, flush=True)
"""


@pytest.mark.integration
@pytest.mark.timeout(120)
def test_a_writer_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """Three writers, killed while they write without pause: the file is one version, all of it."""
    folder = RunFolder(tmp_path)
    for _ in range(3):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        for _ in range(2):
            assert writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
        writer.wait(10)
        writer.stdout.close()
        data = folder.read_checkpoint()
        assert data[:8] * 200_000 == data
