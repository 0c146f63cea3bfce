"""`breadbox fsck`: whether a payload store holds what the journal says, whole and nothing else."""

from collections.abc import Sequence

import numpy as np

from breadbox.cli import frame
from breadbox.cli.base import Bug, Unusable
from breadbox.cli.command import command
from breadbox.cli.settings import Settings, of_one_call, setting
from breadbox.model.errors import PayloadCorruptError, PayloadFormatError, PayloadMissingError
from breadbox.model.types import PayloadReference
from breadbox.payload.format import Head
from breadbox.payload.receive import Placement, receive
from breadbox.stores import open_store
from breadbox_server.base.errors import BugError
from breadbox_server.journal.storage.interface import JournalError
from breadbox_server.maintenance.fsck import Findings, delete, examine
from breadbox_server.settings import Settings as ServeSettings
from breadbox_server.settings import default_store_url


class FsckSettings(Settings):
    """What is compared, and what is done about it."""

    store: str = setting("", secret=True, metavar="URL", shown="as of serve")
    """Payload store, as the server has it."""
    journal: str = setting("auto", secret=True, metavar="URL")
    """As the server has it; auto: beside the payloads."""
    repair: bool = of_one_call(False)
    """Delete payloads that the journal does not know, and those that fail their checksums; the
    server drops what refers to the latter when it starts."""
    no_checksums: bool = of_one_call(False)
    """Do not read every payload."""
    settle_s: float = of_one_call(5.0, ge=0, le=3600)
    """Look again after so long at what looks wrong, since a server may be at work; 0: none is."""
    as_json: bool = of_one_call(False, option="json")
    """Print one JSON object."""


@command(FsckSettings, reads_variable=True, shares_file_of=ServeSettings)
def fsck(settings: FsckSettings) -> int:
    """Compare the server's journal with the payloads that are really in the store.

    Both are found as `breadbox serve` finds them: by the same options, variables and file.

    Reported are missing payloads (in the journal and not in the store), orphans (in the store and
    not in the journal) and corrupt ones (damaged, or of a format version that this Breadbox cannot
    read). Payloads that are leaving, such as those of a lease that has expired, are none of these:
    the server deletes them.

    With --repair, orphans and damaged payloads are deleted; those of another format version are
    kept. Only the server changes the journal: when it starts, it drops and counts what refers to a
    missing payload, a deleted one included.

    Exit code 0: they agree. 1: they do not, and the counts say how. 2: they could not be compared.
    70: not for a bug of Breadbox.
    """
    store = settings.store or default_store_url(is_ephemeral=False)
    repair = settings.repair
    try:
        found = examine(store, settings.journal, settle_s=settings.settle_s, repair=repair)
    except JournalError as error:
        raise Unusable(str(error)) from error
    except BugError as error:
        raise Bug(str(error)) from error
    damaged, unreadable = _corrupt(
        store, () if settings.no_checksums else [*found.referred.values()]
    )
    deleted = []
    if repair and damaged:
        # Once more: a payload is deleted for its own damage, not for one moment's.
        deleted = _corrupt(store, [found.referred[each] for each in damaged])[0]
        delete(store, deleted)
    corrupt = [*damaged, *unreadable]
    report = {
        "books": len(found.referred),
        "book_bytes": found.referred_bytes,
        "kept": found.kept_count,
        "missing": len(found.missing),
        "orphans": len(found.orphans),
        "leaving": found.leaving_count,
        "corrupt": len(corrupt),
        "deleted": found.deleted_count,
        "deleted_corrupt": len(deleted),
    }
    if settings.as_json:
        frame.print_json(report)
    else:
        _print(report, found, corrupt)
    wrong = report["missing"] + report["orphans"] - report["deleted"] + report["corrupt"]
    return 1 if wrong else 0


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


def _print(report: dict[str, int], found: Findings, corrupt: Sequence[str]) -> None:
    console = frame.console()
    console.print(
        f"journal: {report['books']} payloads, {frame.size_text(report['book_bytes'])}; "
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
