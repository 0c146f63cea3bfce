"""Settings of `breadbox learn`: from file, environment and flags; what is wrong is one line."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.numpy import save_file
from safetensors.torch import load, save

from breadbox.cli.main import cli
from breadbox.model.errors import UnavailableError
from breadbox_learner.app import build_policy, build_reference, run
from breadbox_learner.settings import LearnSettings, PpoConfig
from breadbox_learner.training import checkpoint
from breadbox_learner.training.batching import EpisodeReturns
from breadbox_learner.training.checkpoint import SessionState
from breadbox_learner.training.ppo import PpoUpdater
from breadbox_learner.training.trainer import TrainerState
from breadbox_policies import PolicyModule, policy_weights


def dry_run(*arguments: str, environment: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(cli, ["learn", "--dry-run", *arguments], env=environment)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--env", "NoSuchEnv-v0"), "env 'NoSuchEnv-v0' cannot be made"),
        (("--env", "no_such_module:make"), "env 'no_such_module:make' cannot be made"),
        (("--policy", "transformer"), "policy 'transformer' is not one of"),
        (("--policy-options", '{"depth": 3}'), "policy_options do not fit"),
        (("--device", "abacus"), "device 'abacus'"),
        (("--lr", "nan"), "--lr must be a finite number"),
        (("--discount", "1.5"), "--discount must be less than or equal to 1, got '1.5'"),
        (
            ("--fragments-per-batch", "0"),
            "--fragments-per-batch must be greater than or equal to 1",
        ),
        (("--burn-in-steps", "4"), "burn_in_steps is for a policy with memory"),
        (("--kl-coefficient", "0.1"), "reference_policy is needed"),
        (("--wandb-project", "x"), "wandb_project needs the package wandb"),
        (("--config", "/no/such/file.yaml"), "--config /no/such/file.yaml cannot be read"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_wrong_settings_are_one_line_and_exit_status_2(
    arguments: tuple[str, ...], message: str
) -> None:
    result = dry_run(*arguments)
    assert (2, "", 1) == (result.exit_code, result.stdout, len(result.stderr.splitlines()))
    assert message in result.stderr


def test_environment_and_policy_may_be_of_a_module_in_the_current_folder(tmp_path: Path) -> None:
    """As for rollout workers; the command is run as a script, whose path lacks that folder."""
    (tmp_path / "of_ones_own.py").write_text(
        "import gymnasium\n"
        "from breadbox_policies import make_policy\n"
        "def make():\n"
        "    return gymnasium.make('CartPole-v1')\n"
        "def make_small(observations, actions):\n"
        "    return make_policy('mlp', observations, actions, hidden_sizes=[4])\n"
    )
    script = Path(sys.executable).parent / "breadbox"
    done = subprocess.run(
        [script, "learn", "--dry-run", "--env", "of_ones_own:make",
         "--policy", "of_ones_own:make_small"],
        cwd=tmp_path, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert (0, "") == (done.returncode, done.stderr)


def test_flags_win_over_environment_and_environment_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "learn.yaml"
    file.write_text("epochs: 7\nclip: 0.3\nlr: 0.004\npolicy_options: {hidden_sizes: [8]}\n")
    environment = {"BREADBOX_CLIP": "0.4", "BREADBOX_LR": "0.005", "BREADBOX_TOKEN": "secret"}
    result = dry_run("--config", str(file), "--clip", "0.1", environment=environment)
    assert (0, "") == (result.exit_code, result.stderr)
    for line in ("epochs: 7", "clip: 0.1", "lr: 0.005", "parameters: fits", "hidden_sizes:"):
        assert line in result.stdout
    assert "secret" not in result.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch: 3", "names unknown options: epoch"),
        ("epochs: many", "epochs must be a valid integer, got 'many'"),
        ("- a list", "must be a mapping"),
        ("a: [", "is not YAML"),
        ("!!python/object/apply:os.system ['true']", "is not YAML"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "learn.yaml"
    file.write_text(text)
    result = dry_run("--config", str(file))
    assert (2, 1) == (result.exit_code, len(result.stderr.splitlines()))
    assert str(file) in result.stderr
    assert message in result.stderr


# The reference policy ----------------------------------------------------------------------------


def checkpoint_of(policy: PolicyModule) -> bytes:
    """A checkpoint of a run that trained *policy*."""
    return checkpoint.encode(
        updater=PpoUpdater(policy, PpoConfig()),
        state=TrainerState(update=3),
        returns=EpisodeReturns(),
        session=SessionState("s", 3),
        identity={"policy": "mlp"},
    )


def other_policy(**options: Any) -> PolicyModule:
    """The policy of the default settings, with weights of another seed."""
    return build_policy(LearnSettings(seed=77, **options))


def make_checkpoint(path: Path) -> None:
    path.write_bytes(checkpoint_of(other_policy()))


def make_weights(path: Path) -> None:
    save_file(dict(policy_weights(other_policy())), path)


@pytest.mark.parametrize("make", [make_checkpoint, make_weights])
@pytest.mark.parametrize("by", ["flag", "environment", "file"])
def test_the_reference_policy_is_read_from_a_checkpoint_or_from_weights(
    tmp_path: Path, make: Callable[[Path], None], by: str
) -> None:
    path = tmp_path / "reference.safetensors"
    make(path)
    config = tmp_path / "learn.yaml"
    named = f"reference_policy: {path}\n" if by == "file" else ""
    config.write_text(f"kl_coefficient: 0.1\n{named}")
    flags = ("--reference-policy", str(path)) if by == "flag" else ()
    environment = {"BREADBOX_REFERENCE_POLICY": str(path)} if by == "environment" else None
    result = dry_run("--config", str(config), *flags, environment=environment)
    assert (0, "") == (result.exit_code, result.stderr)
    assert f"reference_policy: {path}" in result.stdout

    reference = build_reference(LearnSettings(kl_coefficient=0.1, reference_policy=path))
    assert reference is not None
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    wanted, got = other_policy().state_dict(), reference.state_dict()
    assert wanted.keys() == got.keys()
    assert all(torch.equal(wanted[name], got[name]) for name in wanted)
    own = build_policy(LearnSettings()).state_dict()
    assert not all(torch.equal(own[name], got[name]) for name in own)


def damaged(data: bytes) -> bytes:
    return data[: len(data) // 2]


def of_another_version(data: bytes) -> bytes:
    """The same checkpoint, but of a format from the future."""
    tensors = load(data)
    return bytes(save(tensors, metadata={"breadbox": json.dumps({"format_version": 99})}))


def of_another_policy(_: bytes) -> bytes:
    return checkpoint_of(other_policy(policy_options={"hidden_sizes": [8]}))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (damaged, "is no safetensors file"),
        (lambda _: b"", "is no safetensors file"),
        (of_another_version, "has format version 99, wanted 1"),
        (of_another_policy, "wanted ("),
    ],
    ids=["damaged", "empty", "version", "policy"],
)
def test_a_reference_policy_that_does_not_fit_is_one_line_and_exit_status_2(
    tmp_path: Path, spoil: Callable[[bytes], bytes], message: str
) -> None:
    path = tmp_path / "reference.safetensors"
    path.write_bytes(spoil(checkpoint_of(other_policy())))
    result = dry_run("--kl-coefficient", "0.1", "--reference-policy", str(path))
    assert (2, "", 1) == (result.exit_code, result.stdout, len(result.stderr.splitlines()))
    assert f"reference_policy {path}: " in result.stderr
    assert message in result.stderr


def test_a_reference_policy_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nowhere.safetensors"
    result = dry_run("--kl-coefficient", "0.1", "--reference-policy", str(path))
    assert 2 == result.exit_code
    assert f"reference_policy {path}: cannot be read: No such file" in result.stderr


def test_a_reference_policy_is_checked_even_where_nothing_pulls_towards_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    missing = tmp_path / "nowhere.safetensors"
    result = dry_run("--reference-policy", str(missing))
    assert 2 == result.exit_code
    assert f"reference_policy {missing}: cannot be read: No such file" in result.stderr

    path = tmp_path / "reference.safetensors"
    make_weights(path)
    assert 0 == dry_run("--reference-policy", str(path)).exit_code
    assert "does nothing while kl_coefficient is 0" in caplog.text


def test_a_learner_whose_server_is_away_says_at_once_that_it_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = LearnSettings(server="127.0.0.1:1", reconnect_s=0.2, run_dir=tmp_path)
    with pytest.raises(UnavailableError):
        run(settings, lambda: False)
    assert "trying for 0.2 s: no answer from 127.0.0.1:1" in caplog.text
