"""A payload store that only remembers ids: what the server sees of one, without bytes."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterable, Sequence

from breadbox.model.errors import StoreFullError, StoreUnavailableError
from breadbox.model.types import PayloadReference
from breadbox.stores.base import Confirmation, Custody, StoreUsage
from support.custody import KnownJournals


class FakeCustodian:
    """Implements `PayloadCustodian` over two sets of ids.

    Tests write with `write`, take the store away with `is_down`, and hold a confirmation in
    mid-flight by clearing `may_confirm`.
    """

    def __init__(self) -> None:
        self.unannounced: set[str] = set()
        self.kept: set[str] = set()
        self.deleted: list[str] = []
        self.confirm_trips: list[int] = []
        self.keep_trips: list[int] = []
        self.read_trips: list[int] = []
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.bodies: dict[str, bytes] = {}
        """Of payloads that rode along."""
        self.is_full = False
        self.delete_trips: list[int] = []
        self.is_down = False
        self.loses_answers = False
        """Whether confirmations happen and nobody hears of it."""
        self.is_closed = False
        self.starts = 1
        """Counted up by a test that lets the store come back."""
        self.known_journals = KnownJournals()
        self._custody: Custody | None = None
        self.may_confirm = asyncio.Event()
        self.may_confirm.set()
        self.confirming = asyncio.Event()

    def write(self, size_bytes: int = 100) -> PayloadReference:
        """What a client's write leaves behind."""
        payload_id = secrets.token_hex(16)
        self.unannounced.add(payload_id)
        return PayloadReference(payload_id, size_bytes)

    def lose_everything(self) -> None:
        """What an emptied store has left."""
        self.unannounced.clear()
        self.kept.clear()
        self.bodies.clear()

    async def take(self, custody: Custody) -> None:
        self._check_up()
        self.known_journals.check(custody)
        self._custody = custody

    async def journals(self) -> set[str]:
        self._check_up()
        return set(self.known_journals.epochs)

    async def forget_other_journals(self) -> None:
        self._check_up()
        self.known_journals.forget_others(self._custody)

    async def ping(self) -> None:
        self._check_up()

    async def confirm(self, references: Sequence[PayloadReference]) -> list[Confirmation]:
        self.confirming.set()
        await self.may_confirm.wait()
        self._check_up()
        self.known_journals.check(self._custody)
        self.confirm_trips.append(len(references))
        answers = []
        for reference in references:
            if reference.payload_id in self.unannounced:
                self.unannounced.discard(reference.payload_id)
                self.kept.add(reference.payload_id)
            answers.append(Confirmation(reference.payload_id in self.kept))
        if self.loses_answers:
            raise StoreUnavailableError("the fake store's answer was lost")
        return answers

    async def keep(self, payloads: Sequence[tuple[PayloadReference, bytes]]) -> None:
        self.confirming.set()
        await self.may_confirm.wait()
        self._check_up()
        self.known_journals.check(self._custody)
        self.keep_trips.append(len(payloads))
        if self.is_full:
            raise StoreFullError("the fake store is full")
        for reference, body in payloads:
            self.kept.add(reference.payload_id)
            self.bodies[reference.payload_id] = body
        if self.loses_answers:
            raise StoreUnavailableError("the fake store's answer was lost")

    async def read(self, references: Sequence[PayloadReference]) -> list[bytes]:
        self._check_up()
        self.read_trips.append(len(references))
        await self.may_read.wait()
        return [self.bodies.get(each.payload_id, b"") for each in references]

    async def delete(self, references: Sequence[PayloadReference]) -> None:
        self._check_up()
        self.known_journals.check(self._custody)
        await self._delete([reference.payload_id for reference in references])

    async def present(self, references: Sequence[PayloadReference]) -> list[bool]:
        self._check_up()
        there = self.kept | self.unannounced
        return [reference.payload_id in there for reference in references]

    async def missing(self, references: Sequence[PayloadReference]) -> list[PayloadReference]:
        there = await self.present(references)
        return [each for each, is_there in zip(references, there, strict=True) if not is_there]

    async def confirmed(self) -> AsyncIterator[str]:
        self._check_up()
        for payload_id in sorted(self.kept):
            yield payload_id

    async def delete_ids(self, payload_ids: Iterable[str]) -> None:
        self._check_up()
        self.known_journals.check(self._custody, is_alone=True)
        await self._delete(payload_ids)

    async def _delete(self, payload_ids: Iterable[str]) -> None:
        ids = list(payload_ids)
        self.delete_trips.append(len(ids))
        self.deleted.extend(ids)
        self.kept.difference_update(ids)
        self.unannounced.difference_update(ids)
        for payload_id in ids:
            self.bodies.pop(payload_id, None)

    async def sweep_unannounced(self) -> int:
        self._check_up()
        return 0

    async def incarnation(self) -> str:
        self._check_up()
        return str(self.starts)

    async def concerns(self) -> tuple[str, ...]:
        return ()

    async def usage(self) -> StoreUsage:
        self._check_up()
        return StoreUsage(
            used_bytes=100 * len(self.kept | self.unannounced),
            limit_bytes=10_000,
            capacity_bytes_max=0,
        )

    async def close(self) -> None:
        self.is_closed = True

    def _check_up(self) -> None:
        if self.is_down:
            raise StoreUnavailableError("the fake store is down")
