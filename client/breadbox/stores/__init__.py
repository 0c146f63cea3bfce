"""Payload stores: one protocol, several places.

A store is named by a URL:

    file:///DIR                                  a directory on this host, best on shared memory
    redis://[USER:PASSWORD@]HOST[:PORT][/DB]     Redis; rediss:// with TLS
    unix:///SOCKET[?db=N]                        Redis on a unix socket
    redis+cluster://HOST[:PORT],HOST[:PORT]      Redis Cluster, by nodes of which one has to
                                                 be up; rediss+cluster:// with TLS
    redis+sentinel://HOST[:PORT],HOST.../NAME    the primary that Sentinels name

Options of redis-py's connections may follow as a query, such as `?ssl_ca_certs=/path`: those of
database, user, timeouts and TLS (`breadbox.stores.urls` lists them); any other is refused.
"""

from typing import Final

from breadbox.model.errors import StoreUrlError
from breadbox.stores.base import (
    PRELUDE_BYTES,
    Foreseen,
    PartsStore,
    PayloadCustodian,
    PayloadReceiver,
    PayloadStore,
    Segment,
    StoreUsage,
)
from breadbox.stores.deadline import Deadline
from breadbox.stores.files import FileCustodian, FileStore
from breadbox.stores.keys import PIECE_SIZE_BYTES_MIN
from breadbox.stores.urls import has_secret, parse_store_url, redact

__all__ = [
    "PRELUDE_BYTES",
    "Deadline",
    "Foreseen",
    "PayloadCustodian",
    "PayloadReceiver",
    "PayloadStore",
    "Segment",
    "StoreUsage",
    "has_secret",
    "open_custodian",
    "open_store",
    "redact",
]


UNANNOUNCED_S_DEFAULT: Final = 600.0
"""Life of a payload between its write and its announcement: long enough for a server restart."""


SILENCE_S_DEFAULT: Final = 10.0
"""Silence that ends a call on a store; that of a client's calls follows its `deadline_s`."""


def open_store(
    url: str,
    *,
    unannounced_s: float = UNANNOUNCED_S_DEFAULT,
    piece_size_bytes: int = 0,
    deadline: Deadline | None = None,
    must_exist: bool = False,
) -> PartsStore:
    """Open the store at `url` for writing and reading; only a cluster is connected to before use.

    Args:
        url: See the package's docstring.
        unannounced_s: Seconds until a written payload expires unless it is confirmed; over 0.
        piece_size_bytes: Size of pieces that Redis cuts payloads into; at least 64 KiB, 0: default.
        deadline: By when a cluster must have answered, and the default silence later; None is 10 s.
        must_exist: True to refuse a file:// URL without a store, for URLs that another party chose.

    Raises:
        StoreUrlError: The URL, or its options, cannot be used.
        StoreUnavailableError: The file:// directory cannot be made, or no cluster node answers.
    """
    parsed = parse_store_url(url)
    if not unannounced_s > 0:
        raise StoreUrlError(f"unannounced_s must be over 0, not {unannounced_s}")
    if piece_size_bytes and piece_size_bytes < PIECE_SIZE_BYTES_MIN:
        raise StoreUrlError(
            f"piece_size_bytes must be 0 or at least {PIECE_SIZE_BYTES_MIN}, not {piece_size_bytes}"
        )
    if parsed.kind == "file":
        silence_s = (deadline or Deadline(SILENCE_S_DEFAULT)).silence_s
        return FileStore(parsed.directory, silence_s=silence_s, must_exist=must_exist)
    # Imported here: redis-py takes long to load, and a directory store does not need it.
    from breadbox.stores.redis.factory import open_redis_store

    return open_redis_store(
        parsed,
        unannounced_s=unannounced_s,
        piece_size_bytes=piece_size_bytes,
        deadline=deadline or Deadline(SILENCE_S_DEFAULT),
    )


def open_custodian(
    url: str, *, unannounced_s: float = UNANNOUNCED_S_DEFAULT, answer_s: float = 5.0
) -> PayloadCustodian:
    """Open the store at `url` for confirming and deleting; file:// sweeps after `unannounced_s`."""
    parsed = parse_store_url(url)
    if parsed.kind == "file":
        return FileCustodian(parsed.directory, unannounced_s=unannounced_s, answer_s=answer_s)
    from breadbox.stores.redis.custodian import RedisCustodian
    from breadbox.stores.redis.factory import open_redis_async

    client = open_redis_async(url, answer_s=answer_s)
    return RedisCustodian(client, is_cluster=parsed.kind == "cluster")
