"""`breadbox doctor`: check everything between here and the server, with remedies."""

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from itertools import chain

import numpy as np

import breadbox
from breadbox.cli import frame
from breadbox.cli.command import command
from breadbox.cli.connection import Target
from breadbox.diagnosis import idle_text, is_idle
from breadbox.model import errors
from breadbox.model.fragment import Fragment, fragment_of
from breadbox.model.options import split_addresses
from breadbox.model.presets import STORE_FULL_ADVICE
from breadbox.model.types import (
    BufferDescription,
    EpisodeReport,
    FragmentMetadata,
    FragmentReference,
    StoreConfig,
)
from breadbox.payload import write_fragments
from breadbox.reading.batches import load_batch
from breadbox.stores import redact
from breadbox.stores.base import PayloadStore
from breadbox.stores.bulk import is_compiled

PROBE_BYTES = 16 * 2**20
"""Payload that is written, read and deleted to measure the store."""
PROBE_CALLS = 50
CLOCK_SKEW_S_MAX = 2.0
"""Wall clocks further apart than this make logs of two machines hard to put in order."""
LATENCY_S_MAX = 0.02
STANDBY_LAG_S_MAX = 1.0
"""With a larger lag a takeover takes noticeably longer."""
STORE_BYTES_PER_S_MIN = 50e6


class Verdict(Enum):
    """Outcome of a check."""

    GOOD = "good"
    WARNING = "warning"
    BAD = "bad"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check."""

    check: str
    verdict: Verdict
    detail: str
    remedy: str = ""
    """What to do, or empty if all is well."""


_OUTAGE_REMEDY = (
    "The server runs, but its journal or payload store does not answer. Check that the Redis, or "
    "the directory, of its --store and --journal is up, has room on its disk, and is reachable "
    "from the server's machine."
)

_MARKS = {
    Verdict.GOOD: "[green]✓[/]",
    Verdict.WARNING: "[yellow]![/]",
    Verdict.BAD: "[red]✗[/]",
    Verdict.SKIPPED: "[dim]-[/]",
}


@command(Target)
def doctor(target: Target) -> int:
    """Check address, rights, versions, clock, store and speed, and print what to fix.

    Exit code 0: all is well, or there are only warnings; 1: something does not work.
    """
    findings: list[Finding] = []
    console = frame.console()
    with target.connect() as client:
        for finding in chain(_servers(target), examine(client, target.store_url)):
            findings.append(finding)
            if not target.as_json:
                detail = frame.shown(finding.detail)
                line = f"{_MARKS[finding.verdict]} [bold]{finding.check}[/]  {detail}"
                console.print(line, soft_wrap=True)
                if finding.remedy:
                    console.print(f"    → {frame.shown(finding.remedy)}", soft_wrap=True)
    if target.as_json:
        frame.print_json(findings)
    return int(any(finding.verdict is Verdict.BAD for finding in findings))


def examine(client: breadbox.Client, store_url: str | None) -> Iterator[Finding]:
    """Run all checks in the order of their dependence; *store_url* None is the server's store."""
    yield _this_side()
    address = _checked("address", lambda: _address(client))
    yield address
    if address.verdict is Verdict.BAD:
        return
    outage = _checked("journal and store", lambda: _outage(client))
    if outage.verdict is Verdict.BAD:
        yield outage
        return
    yield _checked("permissions", lambda: _permissions(client))
    before = _buffers(client)
    config: StoreConfig | None = None
    try:
        config = client.service.get_store_config()
    except errors.ReplayBufferError as error:
        yield Finding("store", Verdict.BAD, _one_line(error), _remedy(error))
    if config is None:
        return
    if config.journal_epoch:
        detail = f"the server that answers leads, in epoch {config.journal_epoch}"
        yield Finding("journal", Verdict.GOOD, detail)
    for concern in config.store_concerns:
        remedy = "Fix it, and restart the server, which checks this at its start."
        yield Finding("data", Verdict.WARNING, concern, remedy)
    yield _versions(config.server_version)
    yield _clock(client)
    yield _checked("store", lambda: _store(client, store_url or config.store_url))
    yield _checked("calls", lambda: _calls(client))
    for name, after in _buffers(client).items():
        if name in before and is_idle(before[name], after):
            detail, _, remedy = idle_text(after).partition(": ")
            yield Finding("session", Verdict.WARNING, detail, f"{remedy[0].upper()}{remedy[1:]}")


def _buffers(client: breadbox.Client) -> dict[str, BufferDescription]:
    """Return the buffers by name, or none if the server does not answer; another check says so."""
    try:
        return {each.name: each for each in client.list_buffers()}
    except errors.ReplayBufferError:
        return {}


def _checked(check: str, examine_it: Callable[[], Finding]) -> Finding:
    try:
        return examine_it()
    except errors.ReplayBufferError as error:
        return Finding(check, Verdict.BAD, _one_line(error), _remedy(error))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


_REMEDIES: dict[type[errors.ReplayBufferError], str] = {
    errors.TlsError: "SECURITY.md says how the certificates of both sides belong together.",
    errors.DeadlineExceededError: "A process accepts connections there: check if it is a Breadbox "
    "that runs and is not stopped, and the load of its machine. --deadline-s waits longer.",
    errors.StandbyError: "Check that a server leads, and give the addresses of all, with commas, "
    "in --server or BREADBOX_SERVER.",
    errors.UnavailableError: "Start `breadbox serve`, or name its address with --server: in a "
    "container the service's name, not localhost. Check firewalls and, with TLS, --tls-ca.",
    errors.UnauthenticatedError: "Give a token that the server knows: BREADBOX_TOKEN, or --token.",
    errors.PermissionDeniedError: "Use a token of a role that may do this.",
    errors.NotSupportedError: "The process there is no Breadbox, or a much older one.",
    errors.StoreFullError: STORE_FULL_ADVICE,
    errors.StoreError: "The payload store must be reachable from here too: check the address and "
    "the password that the server returns (--store or --client-store of `breadbox serve`). If it "
    "has another address here, give that as --store-url.",
}
"""Remedy of each error, special kinds before general ones."""


def _remedy(error: errors.ReplayBufferError) -> str:
    found = (text for kind, text in _REMEDIES.items() if isinstance(error, kind))
    return next(found, "Read the server's log.")


def _servers(target: Target) -> Iterator[Finding]:
    addresses = split_addresses(target.server)
    if len(addresses) == 1:
        return
    seen: list[str] = []
    leaders = away = 0
    behind_s = 0.0
    epoch = 0
    for address in addresses:
        try:
            with target.model_copy(update={"server": address}).connect() as client:
                client.list_buffers()
        except errors.StandbyError as error:
            leader = f"of {error.leader}" if error.leader else "of no known leader"
            lag = f"{error.lag_turns} turns and {error.lag_s:.1f} s behind"
            seen.append(f"{address} is a standby {leader}, {lag}")
            behind_s, epoch = max(behind_s, error.lag_s), max(epoch, error.epoch)
        except errors.UnauthenticatedError:
            seen.append(f"{address} knows no such token")
        except (errors.UnavailableError, errors.DeadlineExceededError):
            seen.append(f"{address} does not answer")
            away += 1
        else:
            seen.append(f"{address} leads")
            leaders += 1
    detail = "; ".join(seen) + (f"; epoch {epoch}" if epoch else "")
    if leaders == 0:
        remedy = "Start a server there with --standby, or give the address of the one that leads."
        yield Finding("servers", Verdict.BAD, detail, remedy)
    elif leaders > 1:
        remedy = "They are servers of different journals: give only those of one."
        yield Finding("servers", Verdict.BAD, detail, remedy)
    elif away:
        remedy = "Start it again: without it there is no standby for the others."
        yield Finding("servers", Verdict.WARNING, detail, remedy)
    elif behind_s > STANDBY_LAG_S_MAX:
        remedy = "Check its log, its CPU, and the network between it and the journal."
        yield Finding("servers", Verdict.WARNING, detail, remedy)
    else:
        yield Finding("servers", Verdict.GOOD, detail)


def _this_side() -> Finding:
    try:
        grpc_version = version("grpcio")
    except PackageNotFoundError:
        grpc_version = "?"
    detail = (
        f"breadbox {breadbox.__version__}, Python {platform.python_version()}, "
        f"grpcio {grpc_version}, {os.cpu_count()} cores, {platform.system()}"
    )
    if not is_compiled:
        detail += "; no compiled receiver, so Python that works beside a load all but stops it"
        remedy = "Install from source, where there is a C compiler: pip --no-binary breadbox."
        return Finding("this side", Verdict.WARNING, detail, remedy)
    return Finding("this side", Verdict.GOOD, detail)


def _address(client: breadbox.Client) -> Finding:
    buffers = client.list_buffers()
    names = ", ".join(description.name for description in buffers)
    detail = f"{client.address} answers; buffers: {names or 'none'}"
    return Finding("address", Verdict.GOOD, detail)


def _outage(client: breadbox.Client) -> Finding:
    outage = next((buffer.state.outage for buffer in client.list_buffers()), "")
    if outage:
        return Finding("journal and store", Verdict.BAD, outage, _OUTAGE_REMEDY)
    return Finding("journal and store", Verdict.GOOD, "they answer the server")


def _permissions(client: breadbox.Client) -> Finding:
    """Try a malformed call of each role, which is refused before it changes anything."""
    empty = ""
    names = [buffer.name for buffer in client.list_buffers()]
    # The token may be for some buffers only: the server lists those.
    buffer = "default" if "default" in names or not names else names[0]
    attempts: dict[str, Callable[[], object]] = {
        "append": lambda: client.service.append_fragments([], buffer=buffer),
        "report episodes": lambda: client.report_episodes(list[EpisodeReport](), buffer=buffer),
        "fetch": lambda: client.service.fetch_fragments(0, buffer=buffer),
        "publish": lambda: client.service.publish_model(empty, 0, buffer=buffer),
        "change buffers": lambda: client.delete_buffer(f"{buffer}/"),
    }
    denied = []
    for what, attempt in attempts.items():
        try:
            attempt()
        except errors.PermissionDeniedError:
            denied.append(what)
        except errors.ReplayBufferError:
            continue  # Refused for its content, so the call itself is allowed.
    if not denied:
        return Finding("permissions", Verdict.GOOD, f"may {', '.join(attempts)}, in {buffer}")
    return Finding(
        "permissions",
        Verdict.WARNING,
        f"may not {', '.join(denied)}, in {buffer}",
        "If this process has to, use a token of another role.",
    )


def _versions(server_version: str) -> Finding:
    ours = breadbox.__version__
    if ours == server_version:
        return Finding("versions", Verdict.GOOD, f"both sides are {ours}")
    return Finding(
        "versions",
        Verdict.WARNING,
        f"the library is {ours}, the server {server_version}",
        "Install the same version on both sides; the wire contract is compatible within v1.",
    )


def _clock(client: breadbox.Client) -> Finding:
    before_s = time.time()
    server_s = client.service.get_store_config().server_unix_s
    after_s = time.time()
    if server_s is None:
        return Finding("clock", Verdict.SKIPPED, "the server does not report its time")
    skew_s = server_s - (before_s + after_s) / 2
    uncertainty_s = (after_s - before_s) / 2
    detail = f"the server's is {skew_s:+.3f} s (± {uncertainty_s:.3f}) from this one"
    if abs(skew_s) - uncertainty_s > CLOCK_SKEW_S_MAX:
        remedy = "Run NTP on both. Leases do not depend on it; logs and metrics do."
        return Finding("clock", Verdict.WARNING, detail, remedy)
    return Finding("clock", Verdict.GOOD, detail)


def _store(client: breadbox.Client, store_url: str) -> Finding:
    store = client.store
    fragment = _probe_fragment()
    write_s, read_s = _round_trip(store, fragment)
    per_s = fragment.size_bytes / max(write_s, read_s)
    detail = (
        f"{redact(store_url)}: wrote at {frame.size_text(fragment.size_bytes / write_s)}/s, "
        f"read at {frame.size_text(fragment.size_bytes / read_s)}/s"
    )
    if per_s < STORE_BYTES_PER_S_MIN:
        remedy = (
            "Slow, although it is shared memory: this host is busy."
            if store_url.startswith("file:///dev/shm/")
            else "Slow: put the store nearer, or on shared memory (file:///dev/shm/...), or "
            'compress with codecs="lz4".'
        )
        return Finding("store", Verdict.WARNING, detail, remedy)
    return Finding("store", Verdict.GOOD, detail)


def _probe_fragment() -> Fragment:
    step_count = 16
    pixels = np.random.default_rng(0).integers(
        0, 256, (step_count, PROBE_BYTES // step_count), np.uint8
    )
    return fragment_of(
        *("doctor", "doctor", 0),
        obs=pixels,
        action=np.zeros(step_count, np.int64),
        reward=np.zeros(step_count),
        next_obs=pixels[0],
    )


def _round_trip(store: PayloadStore, fragment: Fragment) -> tuple[float, float]:
    started_at = time.perf_counter()
    (payload,) = write_fragments(store, [fragment])
    written_at = time.perf_counter()
    metadata = FragmentMetadata(
        worker_id=fragment.worker_id,
        fragment_index=0,
        session_id=fragment.session_id,
        model_version_min=0,
        model_version_max=0,
        payload=payload,
        step_count=fragment.step_count,
    )
    try:
        batch = load_batch(store, [FragmentReference(metadata, 0, 0, 1)])
        read_at = time.perf_counter()
        if not np.array_equal(batch.obs[0], fragment.obs):
            raise errors.PayloadCorruptError("the payload read is not the one written")
    finally:
        store.delete_many([payload])
    return written_at - started_at, read_at - written_at


def _calls(client: breadbox.Client) -> Finding:
    durations_s = []
    for _ in range(PROBE_CALLS):
        started_at = time.perf_counter()
        client.list_buffers()
        durations_s.append(time.perf_counter() - started_at)
    median_s = statistics.median(durations_s)
    detail = (
        f"{median_s * 1e3:.2f} ms in the middle, {max(durations_s) * 1e3:.1f} ms at most, of "
        f"{PROBE_CALLS}; {1 / median_s:,.0f} per second one after the other"
    )
    if median_s > LATENCY_S_MAX:
        remedy = "Far away, or busy: append in batches (breadbox.Appender), fetch ahead."
        return Finding("calls", Verdict.WARNING, detail, remedy)
    return Finding("calls", Verdict.GOOD, detail)
