"""`breadbox rollout` and `breadbox generate`, as processes and as commands."""

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest
import yaml
from click.testing import CliRunner

import breadbox
from breadbox.cli.main import cli
from breadbox.shared.extras import how_to_install
from breadbox_rollout.environments import environments
from breadbox_rollout.settings import RolloutSettings
from support.eventually import eventually_sync
from support.fake_service import FakeService, refuse, serving
from support.hidden_modules import hiding
from support.server_process import ServerProcess
from support.token_files import write_tokens

SCRIPTED = "support.scripted_env:make"


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    # The commands add the current folder to the path of modules.
    monkeypatch.setattr(sys, "path", [*sys.path])
    return CliRunner()


def effective(runner: CliRunner, *arguments: str) -> dict[str, object]:
    result = runner.invoke(cli, ["rollout", "--dry-run", *arguments])
    assert 0 == result.exit_code, result.output
    return dict(yaml.safe_load(result.stdout))


def test_a_dry_run_prints_what_would_be_used_and_reads_it_back(
    runner: CliRunner, tmp_path: Path
) -> None:
    arguments = ["--env", "CartPole-v1", "--num-envs", "3", "--worker-name", "w"]
    result = runner.invoke(cli, ["rollout", "--dry-run", *arguments])
    config = tmp_path / "config.yaml"
    config.write_text(result.stdout)
    assert yaml.safe_load(result.stdout) == effective(runner, "--config", str(config))


def test_flags_stand_above_the_environment_which_stands_above_the_file(
    runner: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("env: CartPole-v1\nnum-envs: 2\nfragment-steps: 8\nseed: 5\n")
    monkeypatch.setenv("BREADBOX_FRAGMENT_STEPS", "16")
    monkeypatch.setenv("BREADBOX_SEED", "6")
    found = effective(runner, "--config", str(config), "--seed", "7")
    assert (2, 16, 7) == (found["num_envs"], found["fragment_steps"], found["seed"])


def test_a_codec_that_is_none_and_metrics_that_cannot_be_served_are_refused_at_once(
    runner: CliRunner,
) -> None:
    found = runner.invoke(cli, ["rollout", "--dry-run", "--env", "CartPole-v1", "--codec", "gzip"])
    assert (2, True) == (found.exit_code, "codec" in found.stderr), found.output
    with serving(FakeService()) as address:
        arguments = ["--env", "CartPole-v1", "--server", address, "--metrics-listen", "nowhere"]
        found = runner.invoke(cli, ["rollout", *arguments])
    assert (2, True) == (found.exit_code, "metrics_listen" in found.stderr), found.output


def test_sizes_have_units_and_secrets_are_hidden(runner: CliRunner) -> None:
    found = effective(
        runner, "--env", "CartPole-v1", "--queue-bytes", "2GiB", "--token", "swordfish"
    )
    assert (2**31, "(hidden)") == (found["queue_bytes"], found["token"])


def test_a_hidden_secret_that_is_read_back_is_not_taken_for_one(
    runner: CliRunner, tmp_path: Path
) -> None:
    arguments = ["--dry-run", "--env", "CartPole-v1"]
    config = tmp_path / "config.yaml"
    secrets = ["--token", "swordfish", "--store-url", "redis://:swordfish@host:1"]
    config.write_text(runner.invoke(cli, ["rollout", *arguments, *secrets]).stdout)
    assert 2 == config.read_text().count("(hidden)")
    assert "swordfish" not in config.read_text()
    found = effective(runner, "--config", str(config))
    assert (None, None) == (found["token"], found["store_url"])


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "--env is missing"),
        (["--env", "CartPoole-v1"], "is not an environment"),
        (["--env", "no_such_module:make"], "cannot be loaded"),
        (["--env", "CartPole-v1", "--env-options", '{"gravitation": 9}'], "argument 'gravitation'"),
        (["--env", SCRIPTED, "--env-options", '{"speed": 1}'], "argument 'speed'"),
        (["--env", "support.scripted_env:make_with_helper"], "required argument: 'script'"),
        (
            ["--env", "CartPole-v1", "--num-envs", "0"],
            "--num-envs must be greater than or equal to 1",
        ),
        (["--env", "CartPole-v1", "--policy", "nonesuch"], "is not one of auto, mlp"),
        (["--env", "CartPole-v1", "--device", "toaster"], "is not a device"),
        (["--env", "CartPole-v1", "--agents", '{"*": {"model": "mlp"}}'], "unknown keys model"),
        (["--env", "CartPole-v1", "--agents", '{"*": {"learn": false}}'], "nothing is learned"),
        (["--env", "CartPole-v1", "--agents", '{"*": {"policy": "x"}}'], "'x' is not one of auto"),
        (
            ["--env", "CartPole-v1", "--agents", '{"a": {"weights_files": ["f"]}}'],
            "are for opponents",
        ),
        (["--env", "CartPole-v1", "--queue-bytes", "many"], "--queue-bytes must be a size"),
        (["--env", "CartPole-v1", "--env-options", "[1]"], "--env-options must be a JSON object"),
        (["--env", "CartPole-v1", "--server", "http://host:1"], "without a scheme"),
        (["--env", "CartPole-v1", "--worker-name", "a/b"], "must be 1 to 100 letters"),
        (["--env", "CartPole-v1", "--config", "/no/such/file"], "cannot be read"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    runner: CliRunner, arguments: list[str], problem: str
) -> None:
    """The ancestor started, and then waited forever."""
    result = runner.invoke(cli, ["rollout", "--dry-run", *arguments])
    assert (2, "") == (result.exit_code, result.stdout)
    assert 1 == len(result.stderr.splitlines())
    assert problem in result.stderr


@pytest.mark.parametrize("command", ["rollout", "generate"])
def test_recording_what_nothing_installed_can_draw_is_refused_at_once(
    runner: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(environments, "is_installed", lambda package: package != "pygame")
    out = str(tmp_path / "out")
    arguments = {"rollout": ["--dry-run", "--record-dir", out], "generate": ["--out", out]}
    result = runner.invoke(cli, [command, "--env", "CartPole-v1", *arguments[command]])
    assert 2 == result.exit_code
    assert 1 == len(result.stderr.splitlines())
    assert how_to_install("classic-control") in result.stderr


def test_arguments_that_an_environment_takes_pass(runner: CliRunner) -> None:
    for options in ('{"sutton_barto_reward": true}', '{"max_episode_steps": 9}'):
        effective(runner, "--env", "CartPole-v1", "--env-options", options)
    effective(runner, "--env", "breadbox_rollout.atari:make", "--env-options", '{"game": "Pong"}')


def test_an_unknown_option_in_the_file_is_named(runner: CliRunner, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("env: CartPole-v1\nnum_env: 2\n")
    result = runner.invoke(cli, ["rollout", "--dry-run", "--config", str(config)])
    assert 2 == result.exit_code
    assert "names unknown options: num_env" in result.stderr


def test_generate_adds_episodes_and_says_where_and_how_many_there_are(
    runner: CliRunner, tmp_path: Path
) -> None:
    options = json.dumps({"script": "...t"})
    manifest = tmp_path / "manifest.jsonl"
    for in_all in (2, 4):
        result = runner.invoke(
            cli,
            ["generate", "--env", SCRIPTED, "--env-options", options, "--policy", "random",
             "--episodes", "2", "--out", str(tmp_path), "--media", "jpeg", "--no-progress"],
        )  # fmt: skip
        assert 0 == result.exit_code, result.output
        assert f"2 episodes were added to {manifest}, which has {in_all}" in result.stdout
        assert in_all == len(manifest.read_text().splitlines())


def test_generate_plays_fresh_weights_beside_the_server_of_other_commands(
    runner: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BREADBOX_SERVER, set for the others, made it demand weights that nobody had published."""
    monkeypatch.setenv("BREADBOX_SERVER", "127.0.0.1:1")
    arguments = ["--env", "CartPole-v1", "--media", "none", "--no-progress"]
    result = runner.invoke(cli, ["generate", *arguments, "--out", str(tmp_path)])
    assert 0 == result.exit_code, result.output
    named = runner.invoke(
        cli, ["generate", *arguments, "--out", str(tmp_path), "--server", "127.0.0.1:1"]
    )
    assert 2 == named.exit_code


def test_what_waits_to_be_sent_is_two_fragments_of_each_environment_unless_told(
    runner: CliRunner,
) -> None:
    """With 1,024 a worker was 33 versions behind its learner."""

    def fragments_max(*arguments: str) -> int:
        found = effective(runner, "--env", "CartPole-v1", *arguments)
        return RolloutSettings(**found).queue_fragments_max  # type: ignore[arg-type]

    assert (16, 128) == (fragments_max(), fragments_max("--num-envs", "64"))
    assert 5 == fragments_max("--queue-fragments", "5")


def test_generate_tells_why_nothing_starts(runner: CliRunner, tmp_path: Path) -> None:
    arguments = [
        "--env",
        "support.scripted_env:make_broken",
        "--out",
        str(tmp_path),
        "--no-progress",
    ]
    result = runner.invoke(cli, ["generate", *arguments])
    assert 2 == result.exit_code
    assert "no environment starts; build_raised" in result.stderr.splitlines()[-1]


def test_a_space_that_is_not_supported_is_named_in_a_dry_run_too(runner: CliRunner) -> None:
    env = ["--env", "support.learner_environments:wordy"]
    result = runner.invoke(cli, ["rollout", "--dry-run", *env])
    assert (2, "") == (result.exit_code, result.stdout)
    for words in ("no environment starts", "Text(", "at obs.s is not supported"):
        assert words in result.stderr.splitlines()[-1]


def test_a_policy_that_does_not_fit_the_spaces_is_named_in_a_dry_run(runner: CliRunner) -> None:
    env = ["--env", "breadbox_rollout.atari:make", "--env-options", '{"game": "Pong"}']
    result = runner.invoke(cli, ["rollout", "--dry-run", *env, "--policy", "mlp"])
    assert (2, "") == (result.exit_code, result.stdout)
    assert "use the policy 'conv_lstm'" in result.stderr.splitlines()[-1]


def test_generate_ends_at_the_first_frame_that_an_environment_does_not_draw(
    runner: CliRunner, tmp_path: Path
) -> None:
    arguments = ["--env", "support.learner_environments:unseen", "--out", str(tmp_path)]
    result = runner.invoke(cli, ["generate", *arguments, "--no-progress"])
    assert 2 == result.exit_code
    (told,) = [line for line in result.stderr.splitlines() if "frame" in line]
    assert "draws no frames (frame must be uint8[height, width, 3]" in told
    assert told.endswith("use --media none")
    assert [] == [*tmp_path.iterdir()]


def test_generate_without_room_is_one_line_that_names_the_file(tmp_path: Path) -> None:
    """A limit on the size of files stands in for a full disk: both refuse the next bytes."""
    done = subprocess.run(
        ["sh", "-c", 'ulimit -f 4 && exec "$@"', "sh",
         sys.executable, "-m", "breadbox.cli.main", "generate", "--env", "CartPole-v1",
         "--policy", "random", "--media", "none", "--episodes", "1000", "--no-progress",
         "--out", str(tmp_path / "g")],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert 2 == done.returncode, done.stderr
    *log, line = done.stderr.splitlines()
    assert line.startswith(f"Error: {tmp_path}/g/"), done.stderr
    assert "File too large; make room there" in line
    assert "Traceback" not in "".join(log), done.stderr
    assert [] == [*(tmp_path / "g").glob(".partial-*")]


def test_ctrl_c_ends_generate_and_keeps_finished_episodes(tmp_path: Path) -> None:
    options = json.dumps({"script": "..t" + "." * 100_000})
    process = subprocess.Popen(
        [sys.executable, "-m", "breadbox.cli.main", "generate", "--env", SCRIPTED,
         "--env-options", options, "--policy", "random", "--episodes", "9", "--media", "none",
         "--out", str(tmp_path / "out")],
        cwd=Path(__file__).parent.parent,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stderr is not None
    try:
        manifest = tmp_path / "out" / "manifest.jsonl"
        wait_for_file(manifest)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60.0)
    finally:
        process.kill()
    assert 130 == process.returncode
    assert "interrupted; 1 episodes were added to" in errors
    assert "Traceback" not in errors
    assert [] == list((tmp_path / "out").glob(".partial*"))


def test_a_worker_without_a_server_waits_says_so_and_drains_on_sigterm(tmp_path: Path) -> None:
    """The ancestor was killed, and with it everything that was under way."""
    log = tmp_path / "log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "breadbox.cli.main", "rollout", "--env", SCRIPTED,
             "--server", f"unix:{tmp_path}/nobody", "--num-envs", "2"],
            cwd=Path(__file__).parent.parent,
            stderr=errors,
        )  # fmt: skip
    try:
        wait_for_file(log, "there is no such socket")
        wait_for_file(log, "worker: waiting for the server")
        process.send_signal(signal.SIGTERM)
        assert 0 == process.wait(60.0)
    finally:
        process.kill()
        process.wait()
    assert "waiting for a learner" not in log.read_text(), "nobody knows that yet"
    assert "ended after 0 steps" in log.read_text()
    assert "Traceback" not in log.read_text()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Servers for which a worker would run; none does."""
    addresses: list[str] = []

    def run_nothing(clients: Sequence[breadbox.Client], *_: object) -> None:
        for client in clients:
            addresses.append(client.address)
            client.close()

    monkeypatch.setattr("breadbox_rollout.app.run_worker", run_nothing)
    return addresses


@pytest.mark.parametrize(
    ("method", "code", "reason"),
    [
        ("GetBuffer", grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED"),
        ("AppendFragments", grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED"),
        ("GetBuffer", grpc.StatusCode.UNIMPLEMENTED, ""),
    ],
)
def test_what_waiting_does_not_mend_ends_the_worker_before_it_starts(
    method: str, code: grpc.StatusCode, reason: str, runner: CliRunner, started: list[str]
) -> None:
    """A wrong token was a warning every second, beside environments that ran for nothing."""
    fake = FakeService()
    fake.will(method, refuse(code, reason))
    with serving(fake) as address:
        result = runner.invoke(cli, ["rollout", "--env", "CartPole-v1", "--server", address])
    assert (2, []) == (result.exit_code, started)
    assert 1 == len(result.stderr.splitlines())


@pytest.mark.parametrize(("name", "ended"), [("b-1", True), ("a-1", False)])
def test_a_worker_whose_name_its_token_is_not_for_ends_before_it_starts(
    name: str, ended: bool, runner: CliRunner, started: list[str], tmp_path: Path
) -> None:
    (token,) = write_tokens(tmp_path / "tokens", "producer a workers=a-*")
    options = ("--store", f"file://{tmp_path}/store", "--tokens", str(tmp_path / "tokens"))
    with ServerProcess(*options, log=tmp_path / "log") as server:
        arguments = ["--env", "CartPole-v1", "--server", server.address, "--token", token]
        result = runner.invoke(cli, ["rollout", *arguments, "--worker-name", name])

    assert ended == (2 == result.exit_code)
    assert ended == ("token 'a' may not use worker 'b-1-0'; it is for a-*" in result.stderr)
    assert ended == (not started)


def test_a_buffer_that_is_not_there_yet_is_named_and_waited_for(
    runner: CliRunner, started: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeService()
    refused = refuse(grpc.StatusCode.NOT_FOUND, "BUFFER_NOT_FOUND", buffer="pong")
    fake.will("GetBuffer", refused)
    arguments = ["--env", "CartPole-v1", "--buffer", "pong"]
    with serving(fake) as address:
        result = runner.invoke(cli, ["rollout", *arguments, "--server", address])
    assert (0, [address]) == (result.exit_code, started)
    assert "waiting for the server: no buffer is named 'pong'" in caplog.text


def test_a_server_that_lets_the_worker_append_is_not_spoken_of(
    runner: CliRunner, started: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeService()
    malformed = refuse(grpc.StatusCode.INVALID_ARGUMENT, "ARGUMENT_INVALID")
    fake.will("AppendFragments", malformed)
    with serving(fake) as address:
        result = runner.invoke(cli, ["rollout", "--env", "CartPole-v1", "--server", address])
    assert (0, [address]) == (result.exit_code, started)
    assert "waiting" not in caplog.text


def wait_for_file(path: Path, text: str = "") -> None:
    eventually_sync(
        lambda: path.exists() and text in path.read_text(), f"{text!r} in {path}", within_s=60.0
    )


def test_a_factory_that_its_module_does_not_have_is_named(runner: CliRunner) -> None:
    result = runner.invoke(cli, ["rollout", "--env", "json:nothere", "--server", "127.0.0.1:1"])
    assert 2 == result.exit_code
    assert "module 'json' has no 'nothere', and registers no such environment" in result.stderr


def test_an_atari_game_without_its_extra_names_the_extra() -> None:
    program = hiding(["ale_py"]) + "from breadbox.cli.main import main\nmain()\n"
    command = [sys.executable, "-c", program, "rollout", "--env", "ALE/Pong-v5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert 2 == done.returncode
    assert f"'ALE/Pong-v5' needs {how_to_install('atari')}" in done.stderr
