"""Payload stores: one protocol, several places.

A store is named by a URL:

    file:///DIR                                  a directory on this host, best on shared memory
    redis://[USER:PASSWORD@]HOST[:PORT][/DB]     Redis; rediss:// with TLS
    unix:///SOCKET[?db=N]                        Redis on a unix socket
    redis+cluster://HOST[:PORT],HOST[:PORT]      Redis Cluster, by nodes of which one has to
                                                 be up; rediss+cluster:// with TLS
    redis+sentinel://HOST[:PORT],HOST.../NAME    the primary that Sentinels name

Options of redis-py's connections may follow as a query, such as `?ssl_ca_certs=/path`: those of
database, user, timeouts and TLS (`breadbox.stores.common.urls` lists them); any other is refused.
"""

from breadbox.stores.common.base import (
    PRELUDE_BYTES,
    PayloadCustodian,
    PayloadReceiver,
    PayloadStore,
    Segment,
    StoreUsage,
)
from breadbox.stores.common.deadline import Deadline
from breadbox.stores.common.urls import has_secret, redact
from breadbox.stores.factory import open_custodian, open_parts, open_store

__all__ = [
    "PRELUDE_BYTES",
    "Deadline",
    "PayloadCustodian",
    "PayloadReceiver",
    "PayloadStore",
    "Segment",
    "StoreUsage",
    "has_secret",
    "open_custodian",
    "open_parts",
    "open_store",
    "redact",
]
