"""Provide pytest fixtures, and a server that can be killed, for tests of code that uses Breadbox.

pytest finds the fixtures by itself if Breadbox is installed:

```python
def test_my_producer(breadbox_client):
    breadbox_client.start_session("s")
    my_producer(server=breadbox_client.address, buffer=breadbox_client.buffer)
    assert breadbox_client.get_buffer().state.fragment_count == 8
```

A test that kills and restarts a server starts its own:

```python
with breadbox.testing.start_server() as server, breadbox.connect(server.address) as client:
    client.start_session("s")
    server.restart()
```

Needs the extra `breadbox[server]`, and pytest.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from breadbox.local import ServerProcess, start_server

if TYPE_CHECKING:
    from breadbox.client import Client

__all__ = ["ServerProcess", "breadbox_client", "breadbox_server", "start_server"]


@pytest.fixture(scope="session")
def breadbox_server() -> Iterator[ServerProcess]:
    """A server for all tests of the pytest session, with payloads in memory."""
    with start_server() as server:
        yield server


@pytest.fixture
def breadbox_client(breadbox_server: ServerProcess) -> "Iterator[Client]":
    """A client of `breadbox_server` with a buffer for this test alone."""
    from breadbox.client import connect

    with connect(breadbox_server.address, buffer=f"test-{uuid4().hex}") as client:
        client.create_buffer(client.buffer)
        yield client
        client.delete_buffer(client.buffer)
