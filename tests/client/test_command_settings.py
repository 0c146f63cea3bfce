"""A settings class is a command's options, variables, keys of a file, help and checks at once."""

import enum
import re
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

import click
import pytest
from click.testing import CliRunner, Result
from pydantic import ValidationError

from breadbox.cli.command import PREFIX, RESEMBLING, SIMILAR_MIN, command
from breadbox.cli.main import COMMANDS, load_command
from breadbox.cli.settings import Bytes, JsonObject, Settings, of_one_call, setting
from breadbox.model.sizes import parse_size_bytes, size_name


class Speed(enum.Enum):
    SLOW = "slow"
    FAST = "fast"


class Base(Settings):
    """What another class builds on."""

    place: str = "here"
    """Where it is."""
    count: int = setting(3, ge=1, le=9)
    """How many."""


class Told(Base):
    """What the command below was told."""

    count: int = setting(5, ge=1, le=9)
    out: Path
    """Where it goes."""
    room: Bytes = 2**30
    """What it
    may take."""
    speed: Speed = Speed.SLOW
    """How fast it goes."""
    mode: Literal["off", "on"] = "off"
    """Whether."""
    share: float | None = setting(None, gt=0, lt=1)
    """A part of it."""
    options: JsonObject = setting(default_factory=dict)
    """Of something else."""
    names: tuple[Literal["b", "c", "x", "y"], ...] = setting((), option="name")
    """Of them."""
    has_door: bool = setting(True, option="door")
    """Whether it has one."""
    key: str = setting("", secret=True)
    """Nobody else's."""
    yes: bool = of_one_call(False)
    """Do not ask."""


def told(*arguments: str, **variables: str) -> tuple[Result, Told | None]:
    seen: list[Told] = []

    @command(Told, reads_variable=True)
    def run(settings: Told) -> None:
        seen.append(settings)

    clean = dict.fromkeys(
        [f"BREADBOX_{name}" for name in ("OUT", "ROOM", "SPEED", "SHARE", "NAME", "CONFIG")], None
    )
    result = CliRunner().invoke(run, arguments, env={**clean, **variables})
    return result, seen[0] if seen else None


def settings_of(*arguments: str, **variables: str) -> Told:
    result, settings = told(*arguments, **variables)
    assert settings is not None, result.output
    return settings


def test_a_field_is_an_option_with_its_type_and_default() -> None:
    assert Told(out=Path("x")) == settings_of("--out", "x")
    assert Told(
        out=Path("x"),
        room=5 * 10**8,
        speed=Speed.FAST,
        mode="on",
        share=0.5,
        options={"a": 1},
        names=("b", "c"),
        has_door=False,
        key="k",
        yes=True,
        place="there",
        count=9,
    ) == settings_of(
        *("--out", "x", "--room", "500MB", "--speed", "fast", "--mode", "on", "--share", "0.5"),
        *("--options", '{"a": 1}', "--name", "b", "--name", "c", "--no-door", "--key", "k"),
        *("--yes", "--place", "there", "--count", "9"),
    )


def test_a_field_is_a_variable_and_a_key_and_flags_win_over_both(tmp_path: Path) -> None:
    file = tmp_path / "told.yaml"
    file.write_text(
        "out: from-file\nroom: 1.5 GiB\nspeed: fast\nshare: 0.25\nname: [x, y]\ndoor: false\n"
        "options: {depth: {a: 1}}\ncount: null\nmode: 'on'\n"
    )
    found = settings_of("--share", "0.75", BREADBOX_CONFIG=str(file), BREADBOX_SPEED="slow")
    assert (
        Told(
            out=Path("from-file"),
            room=3 * 2**29,
            share=0.75,
            names=("x", "y"),
            has_door=False,
            options={"depth": {"a": 1}},
            mode="on",
        )
        == found
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("epoch: 1", "names unknown options: epoch; see"),
        ('"yes": true', "names unknown options: yes"),
        ("has_door: true", "names unknown options: has_door"),
        ("count: many", "count must be a valid integer, got 'many'"),
        ("count: 1.5", "count must be a valid integer, got '1.5'"),
        ("count: true", "count must be a valid integer, got 'True'"),
        ("count: 10", "count must be less than or equal to 9, got '10'"),
        ("count: [1]", "count must be a valid integer, got [1]"),
        ("room: a lot", "room must be a size such as 8GiB, 500MB or 1048576, got 'a lot'"),
        ("speed: warp", "speed must be 'slow' or 'fast', got 'warp'"),
        ("options: 3", "options must be a JSON object such as"),
        ("- a list", "must be a mapping"),
        ("a: [", "is not YAML, line 2"),
        ("!!python/object/apply:os.system ['true']", "is not YAML"),
    ],
)
def test_what_is_wrong_in_a_file_is_told_with_its_name(
    tmp_path: Path, text: str, words: str
) -> None:
    file = tmp_path / "told.yaml"
    file.write_text(f"{text}\n")
    result, settings = told("--out", "x", "--config", str(file))
    assert (2, None) == (result.exit_code, settings)
    assert f"--config {file}" in result.stderr
    assert words in result.stderr
    assert 1 == len(result.stderr.splitlines())


def test_a_file_that_others_may_write_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "told.yaml"
    file.write_text("count: 1\n")
    file.chmod(0o666)
    result, _ = told("--out", "x", "--config", str(file))
    assert f"chmod o-w {file}" in result.stderr


def test_a_mistake_on_the_command_line_is_not_laid_to_the_file(tmp_path: Path) -> None:
    file = tmp_path / "told.yaml"
    file.write_text("count: 2\n")
    result, _ = told("--out", "x", "--config", str(file), "--count", "many")
    assert "many" in result.stderr
    assert str(file) not in result.stderr


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Base(count=0), "greater than or equal to 1"),
        (lambda: Told(out=Path(), count=10), "less than or equal to 9"),
        (lambda: Told(out=Path(), share=0.0), "greater than 0"),
        (lambda: Told(out=Path(), names=("z",)), "'b', 'c', 'x' or 'y'"),  # type: ignore[arg-type]
        (lambda: Told(out=Path(), share=1.0), "less than 1"),
        (lambda: Told(out=Path(), share=float("nan")), "finite number"),
        (lambda: Told(out=Path(), mode="warp"), "'off' or 'on'"),  # type: ignore[arg-type]
    ],
)
def test_code_is_refused_what_the_command_line_is(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        make()


def test_settings_are_written_as_they_are_read_and_without_secrets(tmp_path: Path) -> None:
    given = Told(out=Path("x"), options={"a": 1}, names=("b",), key="swordfish", speed=Speed.FAST)
    file = tmp_path / "told.yaml"
    file.write_text(given.as_yaml())
    assert "swordfish" not in given.as_yaml() + repr(given)
    again = settings_of("--config", str(file), "--key", "swordfish")
    assert given == again


def test_help_has_what_stands_below_the_field_its_default_and_its_range() -> None:
    result, _ = told("--help")
    said = " ".join(result.stdout.split())
    for words in (
        "--room SIZE What it may take. [env var: BREADBOX_ROOM; default: 1GiB]",
        "--count INTEGER RANGE How many. [env var: BREADBOX_COUNT; default: 5; 1<=x<=9]",
        "--door / --no-door Whether it has one. [env var: BREADBOX_DOOR; default: door]",
        "--speed [slow|fast] How fast it goes.",
        "--yes Do not ask. --",
    ):
        assert words in said


def options_of(found: click.Command) -> list[click.Option]:
    if isinstance(found, click.Group):
        return [option for inner in found.commands.values() for option in options_of(inner)]
    return [option for option in found.params if isinstance(option, click.Option)]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_size_of_every_command_takes_the_same_units(name: str) -> None:
    for option in options_of(load_command(name)):
        if option.name and option.name.endswith(("_bytes", "memory_max", "memory_limit", "_size")):
            assert option.type.name == "size", option.opts


@pytest.mark.parametrize("size_bytes", [0, 1, 1000, 1024, 3 * 2**29, 8 * 2**30, 2**40, 10**15])
def test_a_size_is_named_as_it_is_read(size_bytes: int) -> None:
    assert size_bytes == parse_size_bytes(size_name(size_bytes))


@pytest.mark.parametrize(
    ("arguments", "variables", "line"),
    [
        (("--count", "0"), {}, "--count must be greater than or equal to 1, got '0'; see"),
        ((), {"BREADBOX_SHARE": "1"}, "BREADBOX_SHARE must be less than 1, got '1'; see"),
        ((), {"BREADBOX_NAME": "b z"}, "BREADBOX_NAME must be 'b', 'c', 'x' or 'y', got 'z'; see"),
        (("--share", "inf"), {}, "--share must be a finite number, got 'inf'; see"),
    ],
)
def test_a_wrong_value_is_told_with_where_it_is_from(
    arguments: tuple[str, ...], variables: dict[str, str], line: str
) -> None:
    result, _ = told("--out", "x", *arguments, **variables)
    assert (2, f"Error: {line} 'run --help'\n") == (result.exit_code, result.stderr)


def test_a_value_that_nobody_gave_is_told_by_its_flag() -> None:
    result, _ = told(BREADBOX_OUT="")
    assert "Error: --out is missing; see 'run --help'\n" == result.stderr


def test_a_variable_of_several_values_has_them_with_spaces_between() -> None:
    assert ("b", "c") == settings_of("--out", "x", BREADBOX_NAME=" b  c ").names


def test_no_error_shows_a_secret(tmp_path: Path) -> None:
    file = tmp_path / "told.yaml"
    file.write_text("key: [swordfish]\n")
    result, _ = told("--out", "x", "--config", str(file))
    assert "key must be a valid string; see" in result.stderr
    assert "swordfish" not in result.stderr
    with pytest.raises(ValidationError) as caught:
        Told(key="swordfish", count=0)  # type: ignore[call-arg]
    assert "swordfish" not in str(caught.value)


@pytest.mark.parametrize(
    ("mistyped", "meant"),
    [("BREADBOX_SPED", "BREADBOX_SPEED"), ("BREADBOX_OPTION", "BREADBOX_OPTIONS")],
)
def test_a_mistyped_variable_is_refused_with_the_name_that_was_meant(
    mistyped: str, meant: str
) -> None:
    result, settings = told("--out", "x", **{mistyped: "fast"})
    assert settings is None
    assert f"the variable {mistyped} is unknown; did you mean {meant}?" in result.output


@pytest.mark.parametrize(
    "name", ["BREADBOX_SERVICE_HOST", "BREADBOX_PORT_50051_TCP", "BREADBOX_TAG", "OUTS"]
)
def test_variables_that_resemble_no_setting_are_ignored(name: str) -> None:
    assert Told(out=Path("x")) == settings_of("--out", "x", **{name: "tcp://10.0.0.1:50051"})


def test_no_variable_of_a_command_or_of_the_composition_counts_as_mistyped_elsewhere() -> None:
    of_commands = {path: variables_of(each) for path, each in all_commands()}
    root = Path(__file__).resolve().parents[2]
    shipped = [*root.glob("docker-compose.yml"), root / ".env.example", root / "Makefile"]
    shipped += [each for each in (root / "deploy").rglob("*") if each.suffix in (".yaml", ".yml")]
    named = {
        each
        for path in shipped
        for each in re.findall(r"BREADBOX_([A-Z_]*[A-Z])", path.read_text())
    }
    resembling = {
        name
        for known in of_commands.values()
        for name in (named | set().union(*of_commands.values())) - known
        if get_close_matches(name, known, cutoff=SIMILAR_MIN)
    }
    assert sorted(RESEMBLING) == sorted(resembling)


def all_commands() -> Iterator[tuple[str, click.Command]]:
    for name in COMMANDS:
        found = load_command(name)
        members = found.commands if isinstance(found, click.Group) else {"": found}
        for member, each in members.items():
            yield f"{name} {member}", each


def variables_of(found: click.Command) -> set[str]:
    return {
        each.envvar.removeprefix(PREFIX) for each in found.params if isinstance(each.envvar, str)
    } - {"CONFIG"}
