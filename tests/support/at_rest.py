"""What a server still counts or holds for callers of which none is left."""

from breadbox_server.admission.append_queue import AppendQueue
from breadbox_server.admission.payloads import DeletionQueue
from breadbox_server.admission.quotas import Quotas
from breadbox_server.core.buffers import BufferSet
from breadbox_server.driver import Driver
from breadbox_server.reading.read_leases import ReadLeases
from breadbox_server.reading.watchers import Watchers


def left_over(driver: Driver) -> dict[str, object]:
    """What is not at rest, by name; empty if everything is."""
    reading = driver.reading
    found: dict[str, object] = {
        "fetches in progress": driver.core.waiting_count,
        **_of_queue(driver.appends.queue),
        **_of_room(driver.core.buffers),
        **_of_quotas(driver.appends.quotas, driver),
        **_of_deletions(driver.deletions, held_back=reading.leases),
        **_of_leases(reading.leases),
        **_of_watchers("watching", reading._watchers),
        **_of_watchers("reading", reading._readers),
        **_of_watchers("watching groups' ends", reading._group_watchers),
        **_of_watchers("claiming", reading.claims.waiting),
    }
    return {name: value for name, value in found.items() if value}


def _of_queue(queue: AppendQueue) -> dict[str, object]:
    order = queue.precedence
    return {
        "learners' calls ahead": order._ahead,
        "appends not looked at": sum(not step.done() for step, _ in order._new),
        "fragments held up by learners": queue._unread_count,
        "bytes held up by learners": queue._unread_bytes,
        "fragments not answered": queue.pending_count,
        "inline bytes": queue.inline_bytes,
        "queued appends": len(queue._pending),
        "waiting appends": queue.waiting_count,
        "waiting fragments": queue._waiting_fragments,
        "waiting inline bytes": queue._waiting_inline_bytes,
    }


def _of_room(buffers: BufferSet) -> dict[str, object]:
    states = buffers._shared.states.values()
    return {
        # Those that are kept are given up in time by themselves.
        "positions": sum(len(each.queue.by_caller) - len(each.queue.kept) for each in states),
        "reservations": sum(len(each.room.reservations) for each in states),
    }


def _of_quotas(quotas: Quotas, driver: Driver) -> dict[str, object]:
    referred = {each.payload.payload_id for each in driver.core.buffers.fragments()}
    charged: dict[str, int] = {}
    for account, size_bytes in quotas._owners.values():
        charged[account.name] = charged.get(account.name, 0) + size_bytes
    accounts = quotas._accounts.values()
    return {
        "bytes of appends in progress": {
            each.name: each.pending_bytes for each in accounts if each.pending_bytes
        },
        "bytes held of no payload": {
            each.name: each.held_bytes - charged.get(each.name, 0)
            for each in accounts
            if each.held_bytes != charged.get(each.name, 0)
        },
        "payloads charged that nothing refers to": len(quotas._owners.keys() - referred),
    }


def _of_deletions(deletions: DeletionQueue, held_back: ReadLeases) -> dict[str, object]:
    known = {each.payload_id for each in deletions._payloads}
    known |= {name for name, each in held_back._pinned.items() if each.kept is not None}
    return {
        "payloads being confirmed": len(deletions._confirming),
        "payloads leaving that nobody deletes": len(deletions._leaving - known),
    }


def _of_leases(leases: ReadLeases) -> dict[str, object]:
    kept = [each.kept for each in leases._pinned.values() if each.kept is not None]
    pinned = {payload_id for each in leases._leases.values() for payload_id in each.payload_ids}
    return {
        "bytes kept for no lease": leases.kept_bytes - sum(each.size_bytes for each in kept),
        "payloads pinned by no lease": len(leases._pinned.keys() - pinned),
        "holders without a lease": [
            holder
            for holder in {*leases._leases_of, *leases._kept_bytes_of}
            if holder not in {each.holder for each in leases._leases.values()}
        ],
    }


def _of_watchers(what: str, watchers: Watchers) -> dict[str, object]:
    return {
        f"callers {what}": len(watchers),
        f"buffers of callers {what}": list(watchers._of),
        f"holders of callers {what}": list(watchers._of_holder),
    }
