"""Stores that batches are loaded from."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from breadbox.stores import PayloadStore, open_store
from breadbox.stores.reading import InlineStore
from support.fake_store import FakeStore


@pytest.fixture(params=["fake", "file", "riding"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PayloadStore]:
    store: PayloadStore = FakeStore()
    if request.param == "file":
        store = open_store(f"file://{tmp_path}/store")
    elif isinstance(store, FakeStore) and request.param == "riding":
        # As if all that is written there came along with a reply.
        store = InlineStore(store.payloads.unannounced, store)
    yield store
    store.close()
