"""Presets: limits for a kind of learner, in Python and on the command line."""

from pathlib import Path

import pytest
from click.testing import CliRunner

import breadbox
from breadbox.cli.command import command
from breadbox.cli.commands.buffers import LimitSettings
from breadbox.cli.settings import fields_of
from breadbox.model.errors import InvalidRequestError
from breadbox.model.presets import PRESETS, UNLIMITED
from breadbox.model.types import AssemblyPolicy, BufferConfig, FullPolicy, SchemaPolicy
from breadbox_server import settings as server
from breadbox_server.core.model.config import BufferConfig as CoreConfig
from breadbox_server.settings import Settings
from support.server_process import ServerProcess


def shown(settings: type) -> str:
    (preset,) = [each for each in fields_of(settings) if each.name == "preset"]
    return preset.help


def test_the_help_of_both_commands_is_one_text() -> None:
    assert shown(LimitSettings) == shown(Settings)


@pytest.mark.parametrize("name", PRESETS)
def test_the_help_says_what_a_preset_sets(name: str) -> None:
    _, _, text = shown(Settings).partition(f"{name}: ")
    said = text.partition(".  ")[0].split(". ")[0]
    base = {"prioritised": "off-policy", "stack": "queue"}.get(name)
    if base:
        assert said.startswith("the same with ")
        own = {k: v for k, v in PRESETS[name].items() if PRESETS[base].get(k) != v}
    else:
        own = dict(PRESETS[name])
    for limit, value in own.items():
        option = limit.replace("_", "-")
        if value == UNLIMITED:
            assert f"{option} without end" in said or f"{option} and uses-max without end" in said
        else:
            assert f"{option} {value}" in said


def test_the_preset_on_policy_is_what_there_is_without_one() -> None:
    default = CoreConfig()
    for limit, value in PRESETS["on-policy"].items():
        there = getattr(default, limit)
        assert value == getattr(there, "value", there)


@pytest.mark.parametrize("name", PRESETS)
def test_each_preset_makes_limits_that_a_server_takes(name: str) -> None:
    config = server.Settings(store="file:///tmp/none").default_config
    assert config == CoreConfig()
    made = BufferConfig.preset(name, capacity_chunks=10)
    assert 10 == made.capacity_chunks
    enums = {"full_policy": FullPolicy, "schema": SchemaPolicy, "assembly": AssemblyPolicy}
    for limit, value in PRESETS[name].items():
        if limit != "capacity_chunks":
            assert enums.get(limit, lambda each: each)(value) == getattr(made, limit)


def test_a_preset_that_is_none_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(InvalidRequestError, match="preset must be one of on-policy, off-policy"):
        BufferConfig.preset("best")


def parsed(*arguments: str) -> BufferConfig:
    """What `buffers create` would ask for."""
    made: list[LimitSettings] = []
    result = CliRunner().invoke(command(LimitSettings, "create")(made.append), ["b", *arguments])
    assert 0 == result.exit_code, result.output
    return made[0].config()


def test_what_is_given_wins_over_the_preset_wherever_it_is_given(tmp_path: Path) -> None:
    assert BufferConfig() == parsed()
    assert BufferConfig.preset("queue") == parsed("--preset", "queue")
    given = parsed("--preset", "off-policy", "--uses-max", "1")
    assert BufferConfig.preset("off-policy", uses_max=1) == given
    file = tmp_path / "limits.yaml"
    file.write_text("preset: prioritised\nstaleness_max: 7\n")
    expected = BufferConfig.preset("prioritised", staleness_max=7)
    assert expected == parsed("--config", str(file))
    expected = BufferConfig.preset("stack", staleness_max=7)
    assert expected == parsed("--config", str(file), "--preset", "stack")


@pytest.mark.integration
def test_a_server_and_a_buffer_with_presets(tmp_path: Path) -> None:
    with (
        ServerProcess(
            *("--store", f"file://{tmp_path}/store", "--preset", "prioritised"),
            *("--capacity-chunks", "100"),
            log=tmp_path / "log",
        ) as process,
        breadbox.connect(process.address) as client,
    ):
        default = client.get_buffer().config
        for limit in ("sampler", "priority_exponent", "uses_max", "staleness_max", "schema"):
            expected = getattr(BufferConfig.preset("prioritised"), limit)
            assert expected == getattr(default, limit)
        assert (100, "oldest_first") == (default.capacity_chunks, default.remover)
        made = client.create_buffer("line", BufferConfig.preset("queue", remover="newest_first"))
        assert ("oldest_first", "newest_first") == (made.config.sampler, made.config.remover)
        assert (FullPolicy.BLOCK, 1) == (made.config.full_policy, made.config.uses_max)


def test_a_limit_that_there_is_not_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidRequestError, match=r"^use_max is no limit; .*uses_max"):
        BufferConfig.preset("off-policy", use_max=3)
