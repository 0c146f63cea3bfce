"""Appends of a test, as a call of AppendFragments carries them out."""

from typing import Any

from breadbox_server.core.model.ids import BufferName
from breadbox_server.core.model.inputs import Appended, Fragment
from breadbox_server.driver import Driver


async def append(
    driver: Driver, buffer: BufferName, fragments: list[Fragment], **options: Any
) -> list[Appended | None]:
    """Append fragments, with options of `Appends.append`; return what became of each."""
    results, _ = await driver.appends.append(buffer, fragments, **options)
    return results
