"""Goal: whoever types a command, an option, a variable or a call out of running text can do so.

Method: every code span of the pages and of the notebooks' texts is found. A command of ours is
parsed, without running it, by the parser that would run it, and each value is held to the type of
its option; a call, and a name with a dot, is looked up in the library, with its keywords. What
stands for something of the reader's (HOST:PORT, NAME, `...`) fits everywhere.
"""

import ast
import importlib
import importlib.util
import inspect
import re
import shlex
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any

import click
import pytest

import breadbox
from breadbox import errors, mirror, types
from breadbox.cli.main import COMMANDS, load_command
from support.documents import ROOT
from support.spans import Span, spans

pytestmark = pytest.mark.timeout(280)  # The first test imports every command.

SPANS = list(spans())

OF_OTHERS = {
    "--alive": "python -m breadbox_server.maintenance.probe",
    "--ready": "python -m breadbox_server.maintenance.probe",
    "--build-arg": "docker build",
    "--dry-run=client": "kubectl",
    "--help": "every program",
    "--profile": "docker compose",
    "--shm-size": "docker run",
}
"""Options in spans of their own, and which other program takes each."""

OBJECTS: dict[str, Any] = {
    "breadbox": breadbox,
    "client": breadbox.Client,
    "client.service": types.Service,
    "writer": breadbox.StepWriter,
    "appender": breadbox.Appender,
    "lease": types.Lease,
    "mirror": mirror.ReplayMirror,
    "memory": mirror.StepMemory,
}
"""Names that pages use, and what they stand for."""


@cache
def commands() -> dict[tuple[str, ...], click.Command]:
    """Every command of ours, and of our groups."""
    found: dict[tuple[str, ...], click.Command] = {}
    for name in COMMANDS:
        command = load_command(name)
        found[(name,)] = command
        if isinstance(command, click.Group):
            found.update({(name, each): sub for each, sub in command.commands.items()})
    return found


def is_for_the_reader(word: str) -> bool:
    """True if a word stands for something of the reader's, such as NAME or file:///DIR."""
    return "..." in word or re.search(r"(?<![A-Za-z0-9])[A-Z][A-Z_-]*(?![a-z])", word) is not None


def complaint(command: click.Command, words: list[str]) -> str | None:
    """What the command's parser says against words, or None."""
    context = click.Context(command)
    words = [word for word in words if word != "..."]
    if words and words[-1].startswith("--") and "=" not in words[-1]:  # Its value is in the text.
        options = {name: each for each in command.params for name in each.opts}
        option = options.get(words[-1])
        if isinstance(option, click.Option) and not option.is_flag:
            words.append("VALUE")
    try:
        values, rest, _ = command.make_parser(context).parse_args(words)
        if rest:
            return f"takes no {rest}"
        for parameter in command.params:
            given = values.get(parameter.name or "")
            for value in given if isinstance(given, list | tuple) else [given]:
                is_checked = isinstance(value, str) and not is_for_the_reader(value)
                if is_checked and not isinstance(parameter.type, click.Path | click.File):
                    # The parameters of our commands leave it to the settings to convert values.
                    parameter.type.convert(value, parameter, context)
    except click.UsageError as error:
        return error.format_message()
    return None


def shown_commands() -> Iterator[Span]:
    for span in SPANS:
        if re.match(r"(\w+=\S+ )*breadbox( [a-z]|$)", span.text):
            yield span


def words_of(span: Span) -> list[str]:
    words = shlex.split(span.text.split(" && ")[0].split(" | ")[0], comments=True)
    return words[words.index("breadbox") + 1 :]


@pytest.mark.parametrize("span", list(shown_commands()), ids=str)
def test_a_command_in_running_text_is_one_that_its_parser_takes(span: Span) -> None:
    words = words_of(span)
    if not words:
        return
    command = commands().get((words[0],))
    assert command is not None, span
    rest = words[1:]
    if isinstance(command, click.Group) and rest:
        command = commands().get((words[0], rest[0]))
        assert command is not None, span
        rest = rest[1:]
    if not isinstance(command, click.Group):
        assert complaint(command, rest) is None


@pytest.mark.parametrize(
    "span", [span for span in SPANS if re.match(r"--[a-z]", span.text)], ids=str
)
def test_an_option_in_running_text_is_one_of_a_command(span: Span) -> None:
    words = shlex.split(span.text)
    if words[0] in OF_OTHERS:
        return
    said = {
        " ".join(names): complaint(command, words)
        for names, command in commands().items()
        if not isinstance(command, click.Group)
    }
    assert None in said.values(), set(said.values())


def test_options_of_others_are_none_of_ours_and_are_shown() -> None:
    ours = {name for each in commands().values() for option in each.params for name in option.opts}
    shown = {word for span in SPANS for word in span.text.split()}
    assert set() == OF_OTHERS.keys() & ours
    assert set() == OF_OTHERS.keys() - shown, "exceptions that no page needs"


def test_a_variable_in_running_text_is_one_that_is_read() -> None:
    sources = [
        path.read_text()
        for folder in (
            "client",
            "server",
            "rollout_worker",
            "learner",
            "offline",
            "console",
            "tests",
        )
        for path in (ROOT / folder).rglob("*.py")
    ]
    beside = ("docker-compose.yml", "Makefile", ".env.example")
    read = "\n".join([*sources, *((ROOT / name).read_text() for name in beside)])
    options = {
        f"BREADBOX_{name.upper().removeprefix('--').replace('-', '_')}"
        for command in commands().values()
        for option in command.params
        for name in (*option.opts, *option.secondary_opts)
    }
    unread = {
        f"{span}: {name}"
        for span in SPANS
        for name in re.findall(r"BREADBOX_[A-Z][A-Z_]+[A-Z]", span.text)
        if name not in options and name not in read
    }
    assert set() == unread


def test_a_target_or_a_script_in_running_text_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    missing = []
    for span in SPANS:
        words = span.text.split()
        if words[0] == "make" and len(words) > 1:
            named = next((word for word in words[1:] if re.fullmatch(r"[a-z-]+", word)), None)
            missing += [str(span)] if named and named not in targets and named != "-s" else []
        if re.fullmatch(r"(\S*/)?python(3\S*)?", words[0]) and len(words) > 1:
            path = f"{words[2].replace('.', '/')}" if words[1] == "-m" else words[1]
            is_there = any(
                (ROOT / root / f"{path}{ending}").exists()
                for root in ("", "tests", "client", "server")
                for ending in ("", ".py")
            )
            missing += (
                [] if is_there or words[1:3] in (["-m", "pytest"], ["-m", "venv"]) else [str(span)]
            )
    assert [] == missing


def looked_up(node: ast.expr) -> Any:
    """What a dotted name stands for, None if it begins with nothing that we know."""
    if isinstance(node, ast.Name):
        homes = (types, mirror, errors, breadbox) if node.id[0].isupper() else ()
        home = next((each for each in homes if node.id in {*vars(each), *names_of(each)}), None)
        return OBJECTS.get(node.id) if home is None else getattr(home, node.id)
    if not isinstance(node, ast.Attribute):
        return None
    owner, name = looked_up(node.value), ast.unparse(node)
    if owner is None or name in OBJECTS:
        return OBJECTS.get(name)
    if inspect.ismodule(owner) and not hasattr(owner, node.attr):
        assert importlib.util.find_spec(f"{owner.__name__}.{node.attr}"), f"there is no {name}"
        return importlib.import_module(f"{owner.__name__}.{node.attr}")
    assert hasattr(owner, node.attr) or node.attr in attributes_of(owner), f"there is no {name}"
    return getattr(owner, node.attr, None)


def names_of(module: ModuleType) -> list[str]:
    """Public names, without those that are deprecated."""
    return getattr(module, "__all__", [])


def attributes_of(owner: Any) -> set[str]:
    """Attributes that an object of this class has: its fields, and those that it sets."""
    if not inspect.isclass(owner):
        return set()
    source = "".join(inspect.getsource(each) for each in owner.__mro__[:-1])
    fields = getattr(owner, "__dataclass_fields__", {})
    return {*fields, *re.findall(r"self\.(\w+)(?:: [^=\n]+)? =", source)}


def shown_calls() -> Iterator[Span]:
    types_of_ours = [name for name in vars(types) if name[0].isalpha()]
    known = "|".join([*OBJECTS, *breadbox.__all__, *mirror.__all__, *types_of_ours])
    for span in SPANS:
        if re.match(rf"(?:with |async with |import )?(?:{known})[.(]", span.text):
            yield span


@pytest.mark.parametrize("span", list(shown_calls()), ids=str)
def test_a_call_in_running_text_names_what_there_is(span: Span) -> None:
    text = span.text.removeprefix("async ").removeprefix("with ").rstrip(":")
    if message := re.fullmatch(r"breadbox\.v1\.(\w+)", text):
        contract = "".join(path.read_text() for path in (ROOT / "protos").rglob("*.proto"))
        assert re.search(rf"^message {message[1]} ", contract, re.MULTILINE)
        return
    if text.startswith("import "):
        compile(text, str(span), "exec")
        return
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError:
        return  # A form, such as `help(...)` in part; names are still looked up by another span.
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            looked_up(node)
        if isinstance(node, ast.Call):
            called = looked_up(node.func)
            if called is None or inspect.ismodule(called):
                continue
            parameters = inspect.signature(called).parameters
            takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
            for keyword in node.keywords:
                assert takes_any or keyword.arg is None or keyword.arg in parameters, span


def test_the_check_sees_what_is_wrong() -> None:
    update, serve = commands()[("buffers", "update")], commands()[("serve",)]
    assert complaint(update, ["NAME", "--full-policy", "evict"]) is None
    assert "evict_oldest" in (complaint(update, ["NAME", "--full-policy", "evict_oldest"]) or "")
    assert "--storage" in (complaint(serve, ["--storage", "redis://HOST"]) or "")
    with pytest.raises(AssertionError, match="there is no client"):
        looked_up(ast.parse("client.fetch_all", mode="eval").body)
