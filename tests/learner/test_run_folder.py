"""The folder of a run: never mixed with another run's, and a clear word where it cannot be used."""

import json
import logging
import resource
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from breadbox.cli.main import cli
from breadbox.model.errors import InvalidRequestError
from breadbox_learner.runs import JsonLines, Progress, RunFolder, RunFolderError
from breadbox_learner.settings import LearnSettings


def open_folder(path: Path | None, **settings: Any) -> RunFolder:
    return RunFolder.open(LearnSettings(run_dir=path, **settings))


def put_run(folder: Path, updates: int = 3) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "checkpoint.safetensors").write_bytes(b"weights")
    (folder / "events.out.tfevents.1.host").write_bytes(b"events")
    lines = [json.dumps({"update": number + 1}) + "\n" for number in range(updates)]
    (folder / "progress.jsonl").write_text("".join(lines))
    (folder / "notes.txt").write_text("mine")


@pytest.mark.parametrize("kept", ["checkpoint.safetensors", "progress.jsonl"])
def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path, kept: str) -> None:
    put_run(tmp_path)
    for name in {"checkpoint.safetensors", "progress.jsonl"} - {kept}:
        (tmp_path / name).unlink()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(InvalidRequestError) as refused:
        open_folder(tmp_path)
    assert "--resume" in str(refused.value)
    assert "--overwrite" in str(refused.value)
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_overwriting_deletes_the_run_and_nothing_else(tmp_path: Path) -> None:
    put_run(tmp_path)
    open_folder(tmp_path, overwrite=True)
    assert ["notes.txt", "settings.yaml"] == sorted(path.name for path in tmp_path.iterdir())


def test_resuming_keeps_the_run(tmp_path: Path) -> None:
    put_run(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    folder = open_folder(tmp_path, resume=True)
    assert b"weights" == folder.read_checkpoint()
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    said = yaml.safe_load(after.pop("settings.yaml"))
    assert (before, True, 0) == (after, said["resume"], said["seed"])


def test_resuming_and_overwriting_contradict_each_other(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="resume"):
        open_folder(tmp_path, resume=True, overwrite=True)


def test_records_of_updates_that_are_made_again_go(tmp_path: Path) -> None:
    """A learner killed at update 5 goes on from the checkpoint of update 2."""
    put_run(tmp_path, updates=5)
    with (tmp_path / "progress.jsonl").open("a") as file:
        file.write('{"update": 6, "retu')  # Killed in the middle of a line.
    folder = open_folder(tmp_path, resume=True)
    folder.drop_records_after(2)
    lines = JsonLines(folder.progress)
    lines.write({"update": 3})
    lines.close()
    written = [json.loads(line) for line in folder.progress.read_text().splitlines()]
    assert [1, 2, 3] == [record["update"] for record in written]


def test_runs_without_a_name_of_their_own_never_share_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert 5 == len({open_folder(None).path for _ in range(5)})


def test_a_folder_that_cannot_be_made_is_one_line_and_exit_status_2(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "run"
    result: Result = CliRunner().invoke(
        cli, ["learn", "--run-dir", str(place), "--server", "127.0.0.1:1", "--reconnect-s", "0"]
    )
    assert (2, 1) == (result.exit_code, len(result.stderr.splitlines())), result.stderr
    assert f"Error: {place}: Not a directory" in result.stderr


def test_a_checkpoint_that_finds_no_room_names_file_and_reason(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    (tmp_path / "checkpoint.partial").symlink_to("/dev/full")
    with pytest.raises(RunFolderError) as full:
        folder.write_checkpoint(b"weights" * 10_000)
    assert f"{folder.checkpoint}: No space left on device" in str(full.value)
    assert not folder.checkpoint.exists()


def test_a_record_that_finds_no_room_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "progress.jsonl").symlink_to("/dev/full")
    others = JsonLines(tmp_path / "other.jsonl")
    with (
        caplog.at_level(logging.ERROR),
        Progress([JsonLines(tmp_path / "progress.jsonl"), others]) as progress,
    ):
        for number in range(3):
            progress.write({"update": number})
    assert 3 == len((tmp_path / "other.jsonl").read_text().splitlines())
    assert 1 == caplog.text.count("No space left on device"), caplog.text


def test_a_line_that_finds_half_its_room_is_taken_back(tmp_path: Path) -> None:
    """What a full disk leaves of a line would make the next one unreadable."""
    path = tmp_path / "progress.jsonl"
    lines = JsonLines(path)
    lines.write({"update": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            lines.write({"update": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    lines.write({"update": 3})
    lines.close()
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert [1, 3] == [record["update"] for record in written]
