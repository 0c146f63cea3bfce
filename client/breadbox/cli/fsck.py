"""`breadbox fsck`: whether a payload store holds what the journal says, whole and nothing else."""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click
import numpy as np

from breadbox.cli import frame
from breadbox.errors import (
    PayloadCorruptError,
    PayloadFormatError,
    PayloadMissingError,
    ReplayBufferError,
)
from breadbox.payload.format import Head
from breadbox.payload.receive import Placement, receive
from breadbox.stores import open_store
from breadbox.types import PayloadReference


@click.command()
@click.option(
    "--store",
    envvar="BREADBOX_STORE",
    show_envvar=True,
    required=True,
    metavar="URL",
    help="Payload store, as the server has it.",
)
@click.option(
    "--journal",
    envvar="BREADBOX_JOURNAL",
    show_envvar=True,
    default="auto",
    metavar="URL",
    help="As the server has it; auto: beside the payloads.",
)
@click.option(
    "--repair",
    is_flag=True,
    help="Delete payloads that no book knows, and those that fail their checksums; the server "
    "drops what refers to the latter when it starts.",
)
@click.option("--no-checksums", is_flag=True, help="Do not read every payload.")
@click.option(
    "--settle-s",
    type=click.FloatRange(0, 3600),
    default=5.0,
    show_default=True,
    help="Look again after so long at what looks wrong, since a server may be at work; 0: none is.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def fsck(
    store: str, journal: str, repair: bool, no_checksums: bool, settle_s: float, as_json: bool
) -> None:
    """Compare books and store: the server's journal, and the payloads that are really there.

    Reported are missing payloads (in the books and not in the store), orphans (in the store and
    in no book) and corrupt ones (damaged, or of a format version that this Breadbox cannot read).
    Payloads that are leaving, such as those of a lease that has expired, are none of these: the
    server deletes them.

    With --repair, orphans and damaged payloads are deleted; those of another format version are
    kept. The books are the server's alone: what refers to a missing payload, a deleted one
    included, is dropped and counted by the server when it starts.

    Exit code 0: they agree. 1: they do not, and the counts say how. 2: they could not be compared.
    """
    # By name: the library does not depend on the server, which may not be installed.
    server = import_module("breadbox_server.fsck")
    try:
        found: Any = server.examine(store, journal, settle_s=settle_s, repair=repair)
    except ReplayBufferError as error:
        _fail(str(error))
    except (server.StartError, server.JournalError) as error:
        _fail(str(error))
    try:
        damaged, unreadable = _corrupt(store, () if no_checksums else [*found.books.values()])
        deleted = []
        if repair and damaged:
            # Once more: a payload is deleted for its own damage, not for one moment's.
            deleted = _corrupt(store, [found.books[each] for each in damaged])[0]
            server.delete(store, deleted)
    except ReplayBufferError as error:
        _fail(str(error))
    corrupt = [*damaged, *unreadable]
    report = {
        "books": len(found.books),
        "book_bytes": found.book_bytes,
        "kept": found.kept_count,
        "missing": len(found.missing),
        "orphans": len(found.orphans),
        "leaving": found.leaving_count,
        "corrupt": len(corrupt),
        "deleted": found.deleted_count,
        "deleted_corrupt": len(deleted),
    }
    if as_json:
        frame.print_json(report)
    else:
        _print(report, found, corrupt)
    wrong = report["missing"] + report["orphans"] - report["deleted"] + report["corrupt"]
    sys.exit(1 if wrong else 0)


def _corrupt(store_url: str, references: Sequence[PayloadReference]) -> tuple[list[str], list[str]]:
    """Ids of payloads that are damaged, and of those that are of another format version."""
    damaged, unreadable = [], []
    store = open_store(store_url)
    try:
        for reference in references:
            try:
                receive(store, [reference], _everything)
            except PayloadMissingError:
                continue  # Released meanwhile, or counted as missing already.
            except PayloadCorruptError:
                damaged.append(reference.payload_id)
            except PayloadFormatError:
                unreadable.append(reference.payload_id)
    finally:
        store.close()
    return damaged, unreadable


def _everything(position: int, head: Head) -> list[Placement]:
    """Memory for every array of a payload."""
    del position
    return [
        Placement(index, np.empty(stored.shape, stored.dtype))
        for index, stored in enumerate(head.layout.arrays)
    ]


def _print(report: dict[str, int], found: Any, corrupt: Sequence[str]) -> None:
    console = frame.console()
    console.print(
        f"books: {report['books']} payloads, {frame.size_text(report['book_bytes'])}; "
        f"store: {report['kept']} payloads"
    )
    for name, ids in (
        ("missing", [each.payload_id for each in found.missing]),
        ("orphans", found.orphans),
        ("corrupt", corrupt),
    ):
        shown = f": {', '.join(ids[:5])}{' ...' if len(ids) > 5 else ''}" if ids else ""
        console.print(f"{name}: {len(ids)}{shown}", highlight=False)
    if report["leaving"]:
        console.print(f"leaving: {report['leaving']}; of leases that have expired, for instance")
    if report["deleted"]:
        console.print(f"deleted {report['deleted']} orphans")
    if report["deleted_corrupt"]:
        console.print(f"deleted {report['deleted_corrupt']} damaged payloads")
    if report["missing"] or report["deleted_corrupt"]:
        console.print("the server drops what refers to missing payloads when it starts")


def _fail(text: str) -> None:
    click.echo(f"Error: {' '.join(text.split())}", err=True)
    sys.exit(2)
