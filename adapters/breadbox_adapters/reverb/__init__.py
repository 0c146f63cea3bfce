"""Reverb's client, writers, datasets and tables, on a server of Breadbox, without TensorFlow.

```python
import breadbox_adapters.reverb as reverb

with reverb.Server([reverb.Table.queue("queue", max_size=100)]) as server:
    client = reverb.Client(f"localhost:{server.port}")
    client.insert([1.0, 2.0], priorities={"queue": 1.0})
    print(list(client.sample("queue")))
```

A table is a buffer with items as chunks. An item is a fragment of one step that holds the whole
trajectory; its key is the chunk's id, which is never used again. `Server` makes tables, and so does
`create_tables` on a running server (`breadbox serve`: for other machines, TLS and tokens).

What is different from Reverb, and why:

- Everything is always durable, so `checkpoint` writes nothing; a server that is restarted on the
  same store has all tables as they were.
- An item has its own copy of its steps: items that overlap take up their sizes in full.
- The server keeps a table's signature with the table's session, as a model of version 0 that
  `stats` shows. Writers check it.
- Data come back in the structure in which they were written, also in a table without a signature;
  named tuples get a type of the same name and fields. Keys of dicts are texts, numbers, or tuples
  of these.
- Datasets are plain iterables of numpy arrays, with `batch`, `take`, `map` and
  `as_numpy_iterator`, and no part of a TensorFlow graph.
- `client.sample` takes `timeout_ms`. A sample or insert that waits logs a warning twice a minute
  that says what it waits for.
- An insert that waits for room is confirmed within two seconds of finding some.
- Priorities above 1e30, negative or NaN, and exponents above 8 are refused before any change.
- Inserts pass while a sample waits for items, whatever the limiter says. Items that leave without
  a sample count as never inserted, so that the others are not sampled more often for them.
- `server_info` knows no episodes.
- There are no extensions of tables, structured writers and pattern datasets: use `create_item`.
"""

from breadbox.model.errors import DeadlineExceededError
from breadbox.model.errors import ReplayBufferError as ReverbError
from breadbox_adapters.reverb import checkpointers, rate_limiters, selectors
from breadbox_adapters.reverb import selectors as item_selectors
from breadbox_adapters.reverb.client import Client, Server
from breadbox_adapters.reverb.items import ReplaySample, SampleInfo, TableNotFoundError
from breadbox_adapters.reverb.sampling import TimestepDataset, TrajectoryDataset
from breadbox_adapters.reverb.tables import Table, TableInfo, create_tables
from breadbox_adapters.reverb.writers import TrajectoryColumn, TrajectoryWriter, Writer

__all__ = [
    "Client",
    "DeadlineExceededError",
    "ReplaySample",
    "ReverbError",
    "SampleInfo",
    "Server",
    "Table",
    "TableInfo",
    "TableNotFoundError",
    "TimestepDataset",
    "TrajectoryColumn",
    "TrajectoryDataset",
    "TrajectoryWriter",
    "Writer",
    "checkpointers",
    "create_tables",
    "item_selectors",
    "rate_limiters",
    "selectors",
]
