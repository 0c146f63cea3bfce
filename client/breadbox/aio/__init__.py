"""The asyncio client: the same operations as `breadbox.Client`, awaited.

```python
async with breadbox.aio.connect("localhost:50051") as client:
    await client.append(fragment)
    async with client.fetch(fragment_count=32, max_wait_s=30) as lease:
        async for batch in lease.batches(batch_size=8): ...
```

`connect` and `fetch` may also be awaited; the caller then closes the client or the lease.

Payloads move in threads, so that the loop never blocks on the store. Cancelling a call cancels it
on the server. A thread that is moving a payload at that moment finishes it, and a payload that was
not announced expires by itself.
"""

from breadbox import client as _client
from breadbox import lease as _lease
from breadbox import service as _service
from breadbox.aio.client import Client as Client
from breadbox.aio.client import connect as connect
from breadbox.aio.lease import Lease as Lease
from breadbox.aio.lease import Ticket as Ticket
from breadbox.aio.local import local_server as local_server
from breadbox.aio.service import Service as Service
from breadbox.transport.aio.entering import Entering as Entering

__all__ = ["Client", "Entering", "Lease", "Service", "Ticket", "connect", "local_server"]

# Docstrings are written once, in the blocking client; `help()` shows them here, too.
connect.__doc__ = _client.connect.__doc__
for _kind, _documented in (
    (Client, _client.Client),
    (Lease, _lease.Lease),
    (Service, _service.Service),
    (Ticket, _lease.Ticket),
):
    for _name, _member in vars(_kind).items():
        if not _name.startswith("_"):
            _same = "store" if _name == "open_store" else _name
            _member.__doc__ = getattr(_documented, _same).__doc__
