"""Writes docs/reference: Python, commands, settings, metrics, errors; --check compares."""

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
from prometheus_client import CollectorRegistry

from breadbox.cli.main import COMMANDS, CONTEXT, load_command
from breadbox.model import errors
from breadbox.model.types import EpisodeEnd
from breadbox.payload.limits import EXPANDED_BYTES_MAX, EXPANDED_BYTES_MAX_VARIABLE
from breadbox.v1 import errors_pb2
from breadbox.wire import status
from breadbox_rollout.environments.failures import FailureKind
from breadbox_rollout.metrics import WorkerCollector, WorkerCounts
from breadbox_server.access.authorization import Role
from breadbox_server.core.model.events import DiscardReason, EvictionReason, LeaseEnd
from breadbox_server.core.model.inputs import AdmissionOutcome
from breadbox_server.metrics.metrics import Metrics, WaitingFor
from breadbox_server.rpc import status as server_status

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts import gen_python_reference  # noqa: E402 - this file is run by its path

FOLDER = ROOT / "docs" / "reference"
MARK = "<!-- Written by scripts/gen_reference.py: change the code, then `make reference`. -->"
SHOWN_TYPES = (str, int, float, Path)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; what its cells hold is text, not markup, but for code."""
    lines = [heads, ["---"] * len(heads), *([cell(text) for text in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def cell(text: str) -> str:
    """Text for one cell of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def first_paragraph(thing: object) -> str:
    """What the docstring of a class or function begins with."""
    return (inspect.getdoc(thing) or "").split("\n\n")[0]


# Commands --------------------------------------------------------------------------------------


def commands() -> str:
    """Every command, with its options."""
    parts = [
        f"# Command line\n\n{MARK}\n",
        "A flag wins over its environment variable, that over the file of `--config`, and that "
        "over the default. "
        "A command that needs an extra which is not installed says so.\n",
    ]
    for name, (_, extra, _) in COMMANDS.items():
        parts += command_parts(load_command(name), f"breadbox {name}", extra, level=2)
    return "\n".join(parts)


def command_parts(command: click.Command, path: str, extra: str, level: int) -> Iterator[str]:
    """Heading, help and options of a command, and of the commands in it."""
    context = click.Context(command, info_name=path, **CONTEXT)
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"{'#' * level} {path}\n"
    yield f"`{path} {usage}`" + (f", with the extra `{extra}`" if extra else "") + "\n"
    said = inspect.cleandoc(command.help or command.short_help or "")
    # Click's mark of lines that stay as they are.
    yield re.sub(r"\x08\n((?:.+\n)+)", r"```text\n\1```\n", said + "\n")
    options = [
        each for each in command.params if isinstance(each, click.Option) and not each.hidden
    ]
    if options:
        rows = [(flags(option), default_of(option, context), about(option)) for option in options]
        yield table(("option", "default", "what"), rows)
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from command_parts(inner, f"{path} {name}", "", level + 1)


def flags(option: click.Option) -> str:
    """How it is given."""
    names = [*option.opts, *option.secondary_opts]
    if option.is_flag or option.count:
        return f"`{', '.join(names)}`"
    if isinstance(option.type, click.Choice):
        kind = " | ".join(str(choice) for choice in option.type.choices)
    else:
        kind = option.metavar or option.type.name.upper().removesuffix(" RANGE")
    return f"`{', '.join(names)} {kind}`"


def default_of(option: click.Option, context: click.Context) -> str:
    """What holds if it is not given; empty for nothing."""
    if isinstance(option.show_default, str):
        return option.show_default
    value: Any = option.get_default(context, call=False)
    if option.required:
        return "required"
    if option.is_flag:
        if not option.secondary_opts:
            return ""
        return f"`{(option.opts if value else option.secondary_opts)[0]}`"
    shown = isinstance(value, SHOWN_TYPES) and str(value) != ""
    return f"`{value}`" if shown else ""


def about(option: click.Option) -> str:
    """What it does, with its range and its variable."""
    parts = [option.help or ""]
    if text := range_of(option):
        parts.append(f"{text[:1].upper()}{text[1:]}.")
    names = [option.envvar] if isinstance(option.envvar, str) else (option.envvar or [])
    parts += [f"`{name}`." for name in names]
    return " ".join(part.rstrip() for part in parts if part)


def range_of(option: click.Option) -> str:
    """Least and greatest value, if it has any."""
    if not isinstance(option.type, click.IntRange | click.FloatRange):
        return ""
    above = "above" if option.type.min_open else "at least"
    below = "below" if option.type.max_open else "at most"
    bounds = [(above, option.type.min), (below, option.type.max)]
    return ", ".join(f"{word} {bound:,}" for word, bound in bounds if bound is not None)


# Settings --------------------------------------------------------------------------------------

UNITS = {
    "_s": "seconds",
    "_bytes": "bytes",
    "_chunks": "chunks",
    "_fragments": "fragments",
    "_steps": "steps",
    "_steps_max": "steps",
    "_episodes": "episodes",
    "_updates": "updates",
    "_s_max": "seconds",
    "staleness_max": "model versions",
    "uses_max": "deliveries of a chunk",
}
"""Units that the end of a setting's name says."""


def settings() -> str:
    """Every setting of the processes that run for long, in tables of names and values."""
    parts = [
        f"# Settings\n\n{MARK}\n",
        "Every setting of server, worker, learner and console is a flag, an environment variable, "
        "and a key of the YAML file that `--config` names: `--lease-s 60`, `BREADBOX_LEASE_S=60`, "
        "`lease_s: 60`. A flag wins over the variable, the variable over the file. "
        "[Commands](cli.md) says what each setting does.\n",
        f"One more variable holds for every process: `{EXPANDED_BYTES_MAX_VARIABLE}` (bytes; "
        f"default {EXPANDED_BYTES_MAX:,}) bounds what the compressed arrays of one payload may "
        "expand to.\n",
    ]
    for name in ("serve", "rollout", "learn", "console"):
        command = load_command(name)
        context = click.Context(command, info_name=name, **CONTEXT)
        rows = [
            (f"`{option.envvar}`", flags(option), default_of(option, context), unit_of(option))
            for option in command.params
            if isinstance(option, click.Option) and isinstance(option.envvar, str)
        ]
        parts += [
            f"## breadbox {name}\n",
            table(("variable", "flag", "default", "unit, range"), sorted(rows)),
        ]
    return "\n".join(parts)


def unit_of(option: click.Option) -> str:
    """Unit and range of its values, where there are any."""
    name = str(option.name)
    ends = (each for each in sorted(UNITS, key=len, reverse=True) if name.endswith(each))
    unit = "bytes, or with KiB, MiB, GiB" if flags(option).endswith(" SIZE`") else ""
    parts = [unit or UNITS.get(next(ends, ""), ""), range_of(option)]
    return ", ".join(part for part in parts if part)


# Metrics ---------------------------------------------------------------------------------------


LABEL_VALUES: Mapping[tuple[str, str], Sequence[str]] = {
    (f"breadbox_{name}", label): [each.value for each in kind]
    for name, label, kind in (
        ("fragments", "outcome", AdmissionOutcome),
        ("fragments_discarded", "reason", DiscardReason),
        ("chunks_evicted", "reason", EvictionReason),
        ("leases_ended", "end", LeaseEnd),
        ("waiters", "reason", WaitingFor),
        ("clients", "role", Role),
        ("episodes", "end", EpisodeEnd),
        ("rollout_failures", "kind", FailureKind),
    )
} | {
    ("breadbox_fetch_wait_seconds", "outcome"): ["granted", "elapsed"],
    ("breadbox_journal_snapshots", "outcome"): ["made", "failed"],
    ("breadbox_gateway_bytes", "direction"): ["in", "out"],
}
"""Values of a metric's label, where they are a closed set."""


def series() -> str:
    """Every metric of every process."""
    registry = CollectorRegistry()
    Metrics(registry)
    nothing = WorkerCounts(
        step_count=0,
        fragments={},
        failures={},
        blocked_s=0.0,
        waiting_fragment_count=0,
        live_env_count=0,
    )
    places = {
        "Of the server": families(registry),
        "Of a rollout worker": WorkerCollector(lambda: nothing).collect(),
    }
    parts = [
        f"# Metrics\n\n{MARK}\n",
        "For Prometheus, under these names; [what they mean together](../operate.md#metrics).\n",
        "Where fragments end:\n",
        table(
            ("a fragment", "counted by"),
            [
                ("refused on arrival", "`breadbox_fragments_total`, by `outcome`"),
                (
                    "given up before its chunk was complete",
                    "`breadbox_fragments_discarded_total`, by `reason`",
                ),
                (
                    "left the buffer with its chunk after `uses_max` uses",
                    '`breadbox_chunks_evicted_total{reason="used_up"}`',
                ),
                (
                    "left the buffer with its chunk before that",
                    "`breadbox_chunks_evicted_total`, the other values of `reason`",
                ),
                (
                    "dropped by the worker, or refused",
                    "`breadbox_rollout_fragments_total`, by `outcome`",
                ),
            ],
        ),
    ]
    for place, found in places.items():
        rows = [
            (
                f"`{each.name}{'_total' * (each.type == 'counter')}`",
                each.type,
                labels_of(each),
                each.documentation,
            )
            for each in found
            if each.name.startswith("breadbox_")
        ]
        parts += [f"## {place}\n", table(("name", "kind", "labels", "what"), sorted(rows))]
    parts.append(
        "The server also shows its own processor time, memory and open files, as `process_...`.\n"
    )
    return "\n".join(parts)


def families(registry: CollectorRegistry) -> Iterator[Any]:
    """What a registry would show; with the labels, which nothing is known to have yet."""
    for collector in list(registry._collector_to_names):  # noqa: SLF001 - names without samples, too
        for family in collector.collect():
            shown: Any = family
            if hasattr(collector, "_labelnames"):
                shown._labelnames = collector._labelnames  # noqa: SLF001 - likewise
            yield shown


def labels_of(family: Any) -> str:
    """Names of its labels, with their values where these are a closed set."""
    shown = []
    for name in getattr(family, "_labelnames", ()):
        values = LABEL_VALUES.get((family.name, name), ())
        shown.append(f"`{name}`" + f" ({', '.join(values)})" * bool(values))
    return ", ".join(shown)


# Errors ----------------------------------------------------------------------------------------


def failures() -> str:
    """Every error of the library, and what it was on the wire."""
    told: dict[str, list[str]] = {}
    for row in server_status.TABLE.values():
        reason = errors_pb2.ErrorReason.Name(row.reason)
        failure = status.Failure(row.code, "", reason=reason, retry_delay_s=row.retry_delay_s)
        name = type(status.error_of(failure)).__name__
        text = f"`{row.code.name}` `{reason}`"
        if text not in told.setdefault(name, []):
            told[name].append(text)
    kinds = [
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if kind.__module__ == errors.__name__
    ]
    rows = [
        (
            f"`{kind.__name__}`",
            first_paragraph(kind),
            ", ".join(sorted(told.get(kind.__name__, []))),
            ", ".join(f"`{base.__name__}`" for base in kind.__bases__),
        )
        for kind in kinds
    ]
    return "\n".join(
        [
            f"# Errors\n\n{MARK}\n",
            "All errors are in `breadbox.errors` and derive from `breadbox.ReplayBufferError`; "
            "each message names the remedy. Clients in other languages get the code of gRPC, and "
            "the reason in the `google.rpc.ErrorInfo` of the call's status.\n",
            table(("error", "when", "on the wire", "is a"), rows),
        ]
    )


PAGES: dict[str, Callable[[], str]] = {
    **{name: partial(make, MARK) for name, make in gen_python_reference.PAGES.items()},
    "cli.md": commands,
    "settings.md": settings,
    "metrics.md": series,
    "errors.md": failures,
}


def main() -> int:
    """Write the pages, or with --check return 1 if one is stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    stale = 0
    for name, make in PAGES.items():
        path, text = FOLDER / name, make()
        if check and (not path.exists() or path.read_text() != text):
            print(f"docs/reference/{name} is stale; run make reference")
            stale = 1
        elif not check:
            path.write_text(text)
    return stale


if __name__ == "__main__":
    sys.exit(main())
