"""Names of an earlier version that still work, and where they are now."""

import warnings
from typing import Any, Final

TO_SERVICE: Final = frozenset(
    {"append_fragments", "fetch_fragments", "get_prepared_fragments", "get_store_config"}
    | {"load_weights", "publish_model", "read_fragments", "release_lease", "renew_lease"}
)
"""Methods of a client that are on its `service` since 0.1."""


def moved(client: Any, name: str) -> Any:
    """Return a method of a client by its earlier name, with a DeprecationWarning.

    Raises:
        AttributeError: There was no such method.
    """
    if name not in TO_SERVICE:
        raise AttributeError(f"{type(client).__name__!r} object has no attribute {name!r}")
    # Level 3: the caller of the client's __getattr__.
    text = f"client.{name} is client.service.{name} now; the old name goes with the next version"
    warnings.warn(text, DeprecationWarning, stacklevel=3)
    return getattr(client.service, name)
