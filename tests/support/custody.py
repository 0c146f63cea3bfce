"""Which journals' payloads a fake store keeps: the rule of `PayloadCustodian.take`, once."""

from breadbox.stores.base import Custody, StoreSharedError, StoreTakenError


class KnownJournals:
    """Latest epochs of the journals whose payloads a store keeps."""

    def __init__(self) -> None:
        self.epochs: dict[str, int] = {}

    def check(self, custody: Custody | None, *, is_alone: bool = False) -> None:
        """Refuse what is not this custody's to do, and learn its epoch."""
        if custody is None:
            return
        if custody.epoch:
            if self.epochs.get(custody.journal, 0) > custody.epoch:
                raise StoreTakenError
            self.epochs[custody.journal] = custody.epoch
        if is_alone and set(self.epochs) - {custody.journal}:
            raise StoreSharedError

    def forget_others(self, custody: Custody | None) -> None:
        """Keep what this custody's journal has left."""
        mine = "" if custody is None else custody.journal
        self.epochs = {name: epoch for name, epoch in self.epochs.items() if name == mine}
