"""The asyncio client: the same operations as `breadbox.Client`, awaited.

```python
async with breadbox.aio.connect("localhost:50051") as client:
    await client.append(fragment)
    async with client.fetch(fragment_count=32, max_wait_s=30) as lease:
        async for batch in lease.batches(batch_size=8): ...
```

`connect` and `fetch` may also be awaited, for a client or a lease to be closed by hand.

Payloads move in threads, so that the loop never blocks on the store. Cancelling a call cancels it
on the server; a payload that is being moved at that moment is moved to its end in its thread, and
one that was not announced expires by itself.
"""

from breadbox.aio.client import Client as Client
from breadbox.aio.client import connect as connect
from breadbox.aio.entering import Entering as Entering
from breadbox.aio.lease import Lease as Lease
from breadbox.aio.local import local_server as local_server

__all__ = ["Client", "Entering", "Lease", "connect", "local_server"]
