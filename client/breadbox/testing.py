"""For tests of code that uses Breadbox: fixtures of pytest, and a server that can be killed.

pytest finds the fixtures by itself where Breadbox is installed:

```python
def test_my_producer(breadbox_client):
    breadbox_client.start_session("s")
    my_producer(server=breadbox_client.address, buffer=breadbox_client.buffer)
    assert breadbox_client.get_buffer().state.fragment_count == 8
```

Where a test is to kill and restart a server, it starts its own:

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
    """A server for all tests of the session, with payloads in memory; gone when they are done."""
    with start_server() as server:
        yield server


@pytest.fixture
def breadbox_client(breadbox_server: ServerProcess) -> "Iterator[Client]":
    """A client of `breadbox_server`, of a buffer that this test has for itself."""
    from breadbox.client import connect

    with connect(breadbox_server.address, buffer=f"test-{uuid4().hex}") as client:
        client.create_buffer(client.buffer)
        yield client
        client.delete_buffer(client.buffer)
