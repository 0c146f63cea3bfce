"""Start a private server, for use from the running loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Unpack

from breadbox.aio.client import Client, connect
from breadbox.local import POLL_S, ServerOptions, own_server


@asynccontextmanager
async def local_server(**options: Unpack[ServerOptions]) -> AsyncIterator[Client]:
    """Run a private server as `breadbox.local_server` does, and yield a client of the running loop.

    ```python
    async with breadbox.aio.local_server() as client:
        await client.start_session("first-run")
    ```
    """
    with own_server(options) as server:
        try:
            give_up_at = server.launch()
            while not server.is_ready(give_up_at):  # noqa: ASYNC110 - it is in another process
                await asyncio.sleep(POLL_S)
            server.forget_files()
            async with connect(server.address) as client:
                yield client
        finally:
            # In a thread: stopping may take seconds, and the loop must go on.
            await asyncio.to_thread(server.stop)
