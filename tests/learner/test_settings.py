"""Settings of `breadbox learn`: from file, environment and flags; what is wrong is one line."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from breadbox_learner.main import learn


def dry_run(*arguments: str, environment: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(learn, ["--dry-run", *arguments], env=environment)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--env", "NoSuchEnv-v0"), "env 'NoSuchEnv-v0' cannot be made"),
        (("--env", "no_such_module:make"), "env 'no_such_module:make' cannot be made"),
        (("--policy", "transformer"), "policy 'transformer' is not one of"),
        (("--policy-options", '{"depth": 3}'), "policy_options do not fit"),
        (("--device", "abacus"), "device 'abacus'"),
        (("--lr", "nan"), "lr: "),
        (("--discount", "1.5"), "discount: Input should be less than or equal to 1"),
        (("--fragments-per-batch", "0"), "fragments_per_batch: "),
        (("--kl-coefficient", "0.1"), "reference_policy is needed"),
        (("--wandb-project", "x"), "wandb_project needs the package wandb"),
        (("--config", "/no/such/file.yaml"), "/no/such/file.yaml: cannot be read"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_wrong_settings_are_one_line_and_exit_status_2(
    arguments: tuple[str, ...], message: str
) -> None:
    result = dry_run(*arguments)
    assert (2, "", 1) == (result.exit_code, result.stdout, len(result.stderr.splitlines()))
    assert message in result.stderr


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
        ("epoch: 3", "epoch: Extra inputs are not permitted"),
        ("epochs: many", "epochs: Input should be a valid integer"),
        ("- a list", "wanted names and values, got a list"),
        ("a: [", "cannot be read as YAML"),
        ("!!python/object/apply:os.system ['true']", "cannot be read as YAML"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "learn.yaml"
    file.write_text(text)
    result = dry_run("--config", str(file))
    assert (2, 1) == (result.exit_code, len(result.stderr.splitlines()))
    assert str(file) in result.stderr
    assert message in result.stderr
