"""Whether the appends of a client go by a stream, which nobody can tell from outside."""

import inspect
import itertools
from typing import Any

from support.fragments import vector_fragment

APPENDS_MAX = 2000


def is_open(client: Any) -> bool:
    """Whether the next append goes by a stream."""
    streams = client._interpreter._append_streams  # noqa: SLF001 - nobody else knows
    return any(each.stream is not None and each.stream.usage.credit is not None for each in streams)


async def open_stream(client: Any, worker_id: str) -> int:
    """Append until a stream is open; gives how many fragments that took."""
    for index in itertools.count():
        assert index < APPENDS_MAX, "no stream was opened"
        made = client.append(vector_fragment(index, worker_id=worker_id))
        if inspect.isawaitable(made):
            await made
        if is_open(client):
            return index + 1
    raise AssertionError


def open_stream_sync(client: Any, worker_id: str) -> int:
    """The same, of a blocking client."""
    opening = open_stream(client, worker_id)
    try:
        opening.send(None)
    except StopIteration as stop:
        return int(stop.value)
    raise AssertionError("a blocking client awaits nothing")
