"""Other projects' interfaces on top of Breadbox."""

from collections.abc import Iterator
from contextlib import contextmanager

from breadbox.shared.extras import how_to_install


@contextmanager
def extra(name: str) -> Iterator[None]:
    """If an import in the block fails, add how to install the extra that has the module."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"breadbox_adapters.{name} needs the module {error.name!r}, which is not installed: "
            f"{how_to_install(name)}",
            name=error.name,
        ) from error
