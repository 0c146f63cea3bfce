"""Goal: `breadbox import` and `breadbox export` lose nothing, and buffers mix by ratio.

Method: a real server in a process of its own.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

import breadbox
import breadbox.testing
from breadbox.cli.main import cli
from breadbox.mirror import ReplayMirror
from breadbox.model.errors import BufferNotFoundError, TreeMismatchError
from breadbox.model.types import BufferConfig, SchemaPolicy
from breadbox_offline.episodes.episode import Episode
from breadbox_offline.errors import (
    OfflineDataError,
    SpaceMismatchError,
    UnsupportedDatasetError,
)
from breadbox_offline.files.dataset import Dataset
from breadbox_offline.files.writers import write_episodes
from breadbox_offline.main import export_episodes, import_episodes
from breadbox_offline.service import (
    append_episodes,
    ensure_demo_buffer,
    join_session,
    read_buffer,
)
from breadbox_offline.training.mixing import BufferMixer
from breadbox_policies import PolicyModule, make_policy, policy_weights
from support.rllib_cases import make_toy_episode
from support.sequences import sequence

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with breadbox.testing.start_server() as server:
        yield server.address


@pytest.fixture
def client(address: str) -> Iterator[breadbox.Client]:
    with breadbox.connect(address) as client:
        yield client


def toys(count: int) -> list[Episode]:
    return [
        make_toy_episode(str(i), 3 + i, terminated=i % 2 == 0, truncated=i % 2 == 1)
        for i in range(count)
    ]


def put(client: breadbox.Client, buffer: str, count: int) -> None:
    client.create_buffer(buffer, BufferConfig(uses_max=100))
    destination = join_session(client, client.get_buffer(buffer))
    append_episodes(client, toys(count), destination, step_count=4)


def test_an_import_adds_to_a_session_that_others_use_only_when_told_to(
    client: breadbox.Client, address: str, tmp_path: Path
) -> None:
    written = tmp_path / "in.parquet"
    write_episodes(toys(4), written)
    client.create_buffer("used", BufferConfig(schema=SchemaPolicy.RAGGED))
    client.start_session("run", buffer="used")
    options = [str(written), "--server", address, "--buffer", "used"]
    refused = CliRunner().invoke(cli, ["import", *options])
    assert (2, 0) == (refused.exit_code, client.get_buffer("used").state.fragment_count)
    assert f"session 'run' is in use: a learner (process {os.getpid()} on" in refused.output
    assert "--take-over" in refused.output

    told = CliRunner().invoke(cli, ["import", *options, "--take-over"])
    described = client.get_buffer("used")
    assert (0, "run") == (told.exit_code, described.session_id), told.output
    assert described.state.fragment_count > 0


def test_an_import_adds_to_what_another_import_has_just_brought(
    client: breadbox.Client, address: str, tmp_path: Path
) -> None:
    write_episodes(toys(4), tmp_path / "in.parquet")
    counts = []
    for _ in range(2):
        options = ["--server", address, "--buffer", "both"]
        done = CliRunner().invoke(cli, ["import", str(tmp_path / "in.parquet"), *options])
        assert 0 == done.exit_code, done.output
        counts.append(client.get_buffer("both").state.fragment_count)
    assert [counts[0], 2 * counts[0]] == counts


def test_a_dataset_goes_in_and_comes_out_again(address: str, tmp_path: Path) -> None:
    written = tmp_path / "in.parquet"
    write_episodes(toys(10), written)
    options = ["--server", address, "--buffer", "round-trip", "--step-count", "5", "--json"]
    result = CliRunner().invoke(import_episodes, [str(written), *options], catch_exceptions=False)
    assert 0 == result.exit_code
    counts = json.loads(result.output)
    assert (10, 75, 15, 0) == (
        counts["episodes"],
        counts["steps"],
        counts["fragments"],
        counts["dropped_steps"],
    )
    out = tmp_path / "out.parquet"
    options = ["--server", address, "--buffer", "round-trip", "--out", str(out)]
    options.append("--overwrite")
    for _ in range(2):  # exporting uses nothing up
        result = CliRunner().invoke(export_episodes, options, catch_exceptions=False)
        assert "10 episodes, 75 steps" in result.output
    back = list(Dataset(str(out)).episodes())
    for before, after in zip(toys(10), back, strict=True):
        assert before.observations.tolist() == after.observations.tolist()
        assert (before.terminated, before.truncated) == (after.terminated, after.truncated)


def test_a_buffer_goes_into_a_minari_dataset(
    client: breadbox.Client, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    minari = pytest.importorskip("minari", reason="needs the extra breadbox[minari]")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    put(client, "to-minari", 8)
    options = ["--server", address, "--buffer", "to-minari", "--out", "minari:toys-v0", "--json"]
    result = CliRunner().invoke(export_episodes, options, catch_exceptions=False)
    assert {"out": "minari:toys-v0", "episodes": 8, "steps": 52} == json.loads(result.output)
    assert (8, 52) == (
        minari.load_dataset("toys-v0").total_episodes,
        minari.load_dataset("toys-v0").total_steps,
    )
    assert 0 == client.get_buffer("to-minari").state.lease_count
    again = ["--server", address, "--buffer", "to-minari-again", "--step-count", "4"]
    result = CliRunner().invoke(import_episodes, ["minari:toys-v0", *again], catch_exceptions=False)
    assert "8 episodes with 52 steps: 13 fragments" in result.output


def test_spaces_of_an_environment_are_for_minari_datasets_only(
    address: str, tmp_path: Path
) -> None:
    out = str(tmp_path / "a.parquet")
    options = ["--server", address, "--out", out]
    result = CliRunner().invoke(export_episodes, [*options, "--env", "CartPole-v1"])
    assert isinstance(result.exception, UnsupportedDatasetError)
    assert f"{out}: --env is for --out minari:NAME only" == str(result.exception)


def test_a_file_that_is_there_is_replaced_only_when_asked(
    client: breadbox.Client, address: str, tmp_path: Path
) -> None:
    put(client, "kept", 2)
    out = tmp_path / "x.parquet"
    out.write_text("precious")
    arguments = ["--server", address, "--buffer", "kept", "--out", str(out)]
    refused = CliRunner().invoke(export_episodes, arguments)

    assert isinstance(refused.exception, UnsupportedDatasetError)
    assert "--overwrite" in str(refused.exception)
    assert "precious" == out.read_text()

    replaced = CliRunner().invoke(export_episodes, [*arguments, "--overwrite"])

    assert (0, 2) == (replaced.exit_code, len(list(Dataset(str(out)).episodes())))


def test_an_environment_of_the_current_folder_gives_its_spaces(
    client: breadbox.Client,
    address: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("minari", reason="needs minari, of the extra breadbox[minari]")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "poles_of_this_test.py").write_text(
        "import gymnasium\n"
        "gymnasium.register('Here-v0', 'gymnasium.envs.classic_control:CartPoleEnv')\n"
    )
    put(client, "here", 2)
    result = CliRunner().invoke(
        export_episodes,
        [
            *("--server", address, "--buffer", "here"),
            *("--out", "minari:toys/here-v0", "--env", "poles_of_this_test:Here-v0"),
        ],
    )

    # The toys do not fit its spaces, which tells that it was found.
    assert isinstance(result.exception, SpaceMismatchError)


def test_importing_again_adds_another_worker(client: breadbox.Client) -> None:
    description = ensure_demo_buffer(client, "twice", capacity_chunks=1000)
    for _ in range(2):
        destination = join_session(client, client.get_buffer("twice"))
        append_episodes(client, toys(4), destination, step_count=3)
    assert "" == description.session_id
    assert 12 == client.get_buffer("twice").state.chunk_count
    assert 8 == len(list(read_buffer(client, "twice")))


def test_recurrent_states_come_out_as_they_went_in(client: breadbox.Client) -> None:
    client.create_buffer("recurrent", BufferConfig(uses_max=100))
    (episode,) = toys(1)  # of three steps, in fragments of one
    hidden = np.arange(2, dtype=np.float32)
    episode.in_states = {t: (hidden + t, {"cell": hidden - t}) for t in range(3)}
    destination = join_session(client, client.get_buffer("recurrent"))
    counts = append_episodes(client, [episode], destination, step_count=1)
    (back,) = read_buffer(client, "recurrent")
    assert (0, [0, 1, 2]) == (counts.assumed_state_count, list(back.in_states))
    for t, (held, cells) in back.in_states.items():
        assert ([t, t + 1], [-t, 1 - t]) == (held.tolist(), cells["cell"].tolist())


def test_an_unfinished_read_gives_the_lease_back(client: breadbox.Client) -> None:
    put(client, "early", 6)
    episodes = read_buffer(client, "early")
    next(episodes)
    assert 1 == client.get_buffer("early").state.lease_count
    episodes.close()
    assert 0 == client.get_buffer("early").state.lease_count


def test_an_empty_buffer_has_no_episodes_and_an_absent_one_is_an_error(
    client: breadbox.Client,
) -> None:
    ensure_demo_buffer(client, "empty", capacity_chunks=10)
    assert [] == list(read_buffer(client, "empty"))
    config = BufferConfig.preset("groups", fragments_per_chunk=1)
    client.create_buffer("completions", config)
    session = client.start_session("completions", buffer="completions")
    client.append(sequence(session_id=session.session_id), buffer="completions")
    with pytest.raises(OfflineDataError, match="buffer 'completions' holds sequences"):
        list(read_buffer(client, "completions"))
    with pytest.raises(BufferNotFoundError):
        list(read_buffer(client, "absent"))


@pytest.mark.parametrize("name", ["x.parquet", "x.msgpack"])
def test_an_export_that_finds_no_room_says_so_and_gives_everything_back(
    client: breadbox.Client, address: str, tmp_path: Path, name: str
) -> None:
    buffer = f"no-room-{name}"
    put(client, buffer, 8)
    (tmp_path / f".{name}.unfinished").symlink_to("/dev/full")
    out = str(tmp_path / name)
    result = CliRunner().invoke(
        export_episodes, ["--server", address, "--buffer", buffer, "--out", out]
    )
    assert isinstance(result.exception, UnsupportedDatasetError)
    assert f"{out}: cannot be written: No space left on device" == str(result.exception)
    assert 0 == client.get_buffer(buffer).state.lease_count
    assert [] == list(tmp_path.iterdir())


def test_an_export_to_a_place_that_cannot_be_is_named(
    client: breadbox.Client, address: str, tmp_path: Path
) -> None:
    put(client, "no-place", 8)
    (tmp_path / "file").write_text("")
    out = str(tmp_path / "file" / "x.parquet")
    result = CliRunner().invoke(
        export_episodes, ["--server", address, "--buffer", "no-place", "--out", out]
    )
    assert isinstance(result.exception, UnsupportedDatasetError)
    assert f"{out}: cannot be written: " in str(result.exception)


def test_an_export_of_nothing_is_an_error_and_leaves_no_folder(
    client: breadbox.Client, address: str, tmp_path: Path
) -> None:
    ensure_demo_buffer(client, "nothing", capacity_chunks=10)
    out = tmp_path / "no" / "such" / "x.parquet"
    result = CliRunner().invoke(
        export_episodes, ["--server", address, "--buffer", "nothing", "--out", str(out)]
    )
    assert isinstance(result.exception, OfflineDataError)
    assert f"{out}: nothing was written: buffer 'nothing' holds no chunk" == str(result.exception)
    assert [] == list(tmp_path.iterdir())


def test_an_import_says_what_it_leaves_out(address: str, tmp_path: Path) -> None:
    written = tmp_path / "in.parquet"
    write_episodes(toys(10), written)  # of 75 steps
    with breadbox.connect(address) as client:
        client.create_buffer("tails", BufferConfig(uses_max=100))
    options = ["--server", address, "--buffer", "tails", "--step-count"]
    result = CliRunner().invoke(import_episodes, [str(written), *options, "40"])
    assert 0 == result.exit_code
    assert result.stderr.startswith(
        "Warning: the last 35 of 75 steps did not fill a fragment of 40 and were left out: the "
    )

    result = CliRunner().invoke(import_episodes, [str(written), *options, "1000"])
    assert isinstance(result.exception, OfflineDataError)
    assert (
        f"{written}: nothing was imported: its 75 steps do not fill a fragment of 1000; "
        "--step-count can be 75 at most"
    ) == str(result.exception)

    write_episodes([], tmp_path / "none.parquet")
    result = CliRunner().invoke(import_episodes, [str(tmp_path / "none.parquet"), *options, "5"])
    assert isinstance(result.exception, OfflineDataError)
    assert "nothing was imported: it holds no episode" in str(result.exception)


@pytest.mark.parametrize("is_imported_first", [True, False])
def test_a_writer_and_an_import_share_a_buffer_and_no_step_is_lost(
    client: breadbox.Client, address: str, tmp_path: Path, *, is_imported_first: bool
) -> None:
    written, buffer = tmp_path / "in.parquet", f"shared-{is_imported_first}".lower()
    episodes = toys(10)  # of 75 steps
    for episode in episodes:
        episode.extra_model_outputs = {}
    write_episodes(episodes, written)
    ensure_demo_buffer(client, buffer, capacity_chunks=1000)
    client.start_session("s", buffer=buffer)

    def imported() -> None:
        options = ["--server", address, "--buffer", buffer, "--step-count", "32", "--json"]
        result = CliRunner().invoke(
            import_episodes, [str(written), *options, "--take-over"], catch_exceptions=False
        )
        counts = json.loads(result.output)
        assert (75, 3, 0) == (counts["steps"], counts["fragments"], counts["dropped_steps"])

    def played() -> None:
        with breadbox.StepWriter(client, buffer=buffer) as writer:
            for episode in episodes:
                for t, (action, reward) in enumerate(
                    zip(episode.actions, episode.rewards, strict=True)
                ):
                    is_last = t == len(episode) - 1
                    writer.add(
                        episode.observations[t][None],
                        action[None],
                        [reward],
                        episode.observations[t + 1][None],
                        [episode.terminated and is_last],
                        [episode.truncated and is_last],
                    )
            writer.flush(max_wait_s=30)
            assert 75 == writer.counts.sent

    for produce in (imported, played) if is_imported_first else (played, imported):
        produce()
    with ReplayMirror(client, buffer=buffer, capacity_steps=1000) as mirror:
        mirror.catch_up(30)
        held = mirror.at(np.arange(150))
        assert 150 == len(mirror)
    for column in ("episode_return", "episode_length"):
        one, other = np.split(held.extras[column], 2)
        np.testing.assert_allclose(one, other)
    assert [len(each) for each in episodes] == [
        int(each) for each in held.extras["episode_length"][:75] if each
    ]


def test_a_mixed_batch_has_another_fragment_in_place_of_the_short_end_of_an_import(
    client: breadbox.Client,
) -> None:
    ensure_demo_buffer(client, "with-tail", capacity_chunks=1000)
    destination = join_session(client, client.get_buffer("with-tail"))
    append_episodes(client, toys(10), destination, step_count=10)  # 75 steps
    with BufferMixer(client, {"with-tail": 1.0}).fetch(8, max_wait_s=10) as lease:
        assert 75 == sum(fragment.step_count for fragment in lease.fragments())
        batch, sources = lease.load_batch(seed=0)
    assert ((8, 10), 8) == (batch.reward.shape, len(sources))
    assert 7 == len(np.unique(batch.obs.reshape(8, -1), axis=0))


def cartpole_weights(folder: Path) -> Path:
    path = folder / "weights.safetensors"
    save_file(dict(policy_weights(cartpole_policy())), path)
    return path


def cartpole_policy() -> PolicyModule:
    env = gymnasium.make("CartPole-v1")
    try:
        return make_policy("mlp", env.observation_space, env.action_space)
    finally:
        env.close()


def run_breadbox(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "breadbox.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")},
    )
    assert 0 == done.returncode, done.stderr


def test_recordings_mix_with_what_rollout_workers_send(
    client: breadbox.Client, address: str, tmp_path: Path
) -> None:
    """The way through docs/offline.md: recordings have no log-probabilities, workers do."""
    recordings = tmp_path / "recordings"
    run_breadbox(
        *("generate", "--env", "CartPole-v1", "--weights-file", str(cartpole_weights(tmp_path))),
        *("--episodes", "12", "--workers", "1", "--media", "none", "--out", str(recordings)),
    )
    run_breadbox("import", str(recordings), "--server", address, "--buffer", "recorded")
    client.create_buffer("online", BufferConfig(uses_max=100))
    client.start_session("online-session", buffer="online")
    client.publish("online-session", 1, policy_weights(cartpole_policy()), buffer="online")
    run_breadbox(
        *("rollout", "--server", address, "--buffer", "online", "--env", "CartPole-v1"),
        *("--num-envs", "4", "--steps-max", "600"),
    )
    mixer = BufferMixer(client, {"recorded": 0.5, "online": 0.5})
    with mixer.fetch(8, max_wait_s=10) as lease:
        batch, sources = lease.load_batch(device="cpu", seed=0)
        assert (4, 4) == (sources.count("recorded"), sources.count("online"))
        assert (8, 32, 4) == tuple(batch.obs.shape)
        assert (8, 32) == tuple(batch.reward.shape)
        assert (None, {"episode_return", "episode_length"}) == (batch.log_prob, set(batch.extras))
        assert (8, 32) == tuple(batch.value.shape)  # Recordings keep it.
        few, _ = lease.load_batch(columns=["reward"])
        assert few.obs is None
        with pytest.raises(TreeMismatchError, match="log_prob"):
            lease.load_batch(columns=["log_prob"])
    with BufferMixer(client, {"online": 1.0}).fetch(4, max_wait_s=10) as lease:
        whole, _ = lease.load_batch()
        assert whole.log_prob is not None
        assert "episode_return" in whole.extras


def test_buffers_mix_by_their_shares(client: breadbox.Client) -> None:
    put(client, "demo-part", 8)
    put(client, "online-part", 8)
    mixer = BufferMixer(client, {"demo-part": 0.25, "online-part": 0.75})
    with mixer.fetch(8, max_wait_s=10) as lease:
        batch, sources = lease.load_batch(seed=3)
        assert (8, 4) == batch.reward.shape
        assert (2, 6) == (sources.count("demo-part"), sources.count("online-part"))
        assert 8 == len(list(lease.fragments()))
    assert 0 == client.get_buffer("demo-part").state.lease_count


def test_what_fails_while_mixed_gives_all_back(client: breadbox.Client) -> None:
    put(client, "mix-a", 8)
    put(client, "mix-b", 8)
    mixer = BufferMixer(client, {"mix-a": 0.5, "mix-b": 0.5})
    with pytest.raises(KeyError), mixer.fetch(4, max_wait_s=10):
        raise KeyError("the learner failed")
    for name in ("mix-a", "mix-b"):
        state = client.get_buffer(name).state
        assert (0, 0) == (state.lease_count, state.counters.get("used_chunk_count", 0))
