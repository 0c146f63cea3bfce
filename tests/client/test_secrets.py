"""A token that a command was given stands in nothing that it prints."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from breadbox.cli.main import load_command
from breadbox.model.options import ClientOptions
from breadbox.model.types import StoreConfig
from breadbox_server.settings import Settings

TOKEN = "bbx_this-is-the-secret"


@pytest.mark.parametrize("command", ["learn", "rollout"])
def test_a_dry_run_does_not_show_the_token(command: str) -> None:
    arguments = ["--dry-run", "--server", "127.0.0.1:1", "--env", "CartPole-v1"]
    done = CliRunner().invoke(load_command(command), arguments, env={"BREADBOX_TOKEN": TOKEN})

    assert 0 == done.exit_code, done.output
    assert TOKEN not in done.output


def test_options_and_store_settings_do_not_show_their_secrets() -> None:
    url = "redis://user:this-is-the-secret@redis:6379/0"
    options = ClientOptions(token=TOKEN, store_url=url)
    store = StoreConfig(store_url=url, unannounced_s=1, piece_size_bytes=0, server_version="1")

    assert "this-is-the-secret" not in repr(options) + repr(store)


@pytest.mark.parametrize("option", ["--store", "--journal"])
def test_a_server_told_a_password_as_an_argument_warns_and_does_not_repeat_it(
    option: str, tmp_path: Path
) -> None:
    url = "redis://:this-is-the-secret@127.0.0.1:1/0?socket_connect_timeout=1"
    arguments = ["--store", f"file://{tmp_path}", "--listen", "127.0.0.1:0", option, url]
    done = CliRunner().invoke(load_command("serve"), arguments)

    assert 0 != done.exit_code
    assert f"the password in {option} stands in the process list" in done.output
    assert "this-is-the-secret" not in done.output


def test_settings_of_a_server_do_not_show_their_secrets() -> None:
    url = "redis://:this-is-the-secret@redis:6379/0"

    assert "this-is-the-secret" not in repr(Settings(store=url, client_store=url, journal=url))
