"""Store URLs: which kinds there are, and how to show one without its password."""

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

from breadbox.model.errors import StoreUrlError

GATEWAY_URL = "gateway:"
"""URL that the server returns to clients whose payloads pass through it."""

_REDIS_SCHEMES = ("redis", "rediss", "unix")
_CLUSTER_SCHEMES = {"redis+cluster": "redis", "rediss+cluster": "rediss"}
_SENTINEL_SCHEMES = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}
STORE_URLS = (
    "file:///DIR",
    "redis://HOST:PORT/DB",
    "rediss://HOST:PORT/DB",
    "unix:///SOCKET",
    "redis+cluster://HOST:PORT,HOST:PORT",
    "redis+sentinel://HOST:PORT,HOST:PORT/NAME",
)
"""What store URLs there are, for helps and errors."""
_MANY_HOSTS = re.compile(
    rf"(?i:({'|'.join(map(re.escape, (*_CLUSTER_SCHEMES, *_SENTINEL_SCHEMES)))}))://"
    r"((?:[^/?#]*@)?)([^/?#@]*)(.*)",
    re.DOTALL,
)
"""Scheme, credentials, hosts and the rest of a URL that may name several hosts."""
_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:\[\]]+))(?::([0-9]{1,5}))?")
"""One of these hosts: an address of version 6 in brackets, or a name; and a port."""
_CUT_CREDENTIALS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)[^/?#]+[/?#].*@(.*)", re.DOTALL)
"""A URL with an @ behind its host, where a password with / ? or # was cut."""
_HAS_PLACE = re.compile(r"(?i:file|unix):|/|[A-Za-z][A-Za-z0-9+.-]*://[^/?#]")
"""Beginning of a file's name, in which an @ may be, or of a URL with credentials in their place."""
_REDIS_OPTIONS = {
    **dict.fromkeys(("db", "max_connections", "health_check_interval"), r"[0-9]{1,9}"),
    **dict.fromkeys(("socket_timeout", "socket_connect_timeout"), r"[0-9]{1,9}(\.[0-9]{1,9})?"),
    **dict.fromkeys(("username", "password", "client_name", "socket_keepalive"), ".*"),
    **dict.fromkeys(("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile"), ".+"),
    **dict.fromkeys(("ssl_password", "ssl_check_hostname", "ssl_ciphers"), ".+"),
    "ssl_cert_reqs": "none|optional|required",
}
"""Options of redis-py that a URL may have, and their form: its author may not be trusted."""
_HIDDEN = "***"
_CLUSTER_PORT = 6379
_SENTINEL_PORT = 26379


@dataclass(frozen=True, slots=True, repr=False)
class StoreUrl:
    """A store URL, taken apart. `repr` and `str` never hold a password."""

    kind: str
    """One of: file, redis, cluster, sentinel."""
    url: str
    """URL as redis-py takes it: redis:// or rediss://, with the first host alone."""
    directory: str = ""
    """Absolute path that only this host reaches, or empty for a store that other hosts reach too.
    A server holds it for itself, and has its journal there."""
    addresses: tuple[tuple[str, int], ...] = ()
    """For cluster and sentinel: hosts and ports of nodes, of which any may be unreachable."""
    service_name: str = ""
    """For sentinel: the name of the monitored primary."""

    def __str__(self) -> str:
        return redact(self.url)

    def __repr__(self) -> str:
        return f"StoreUrl({redact(self.url)!r})"


def redact(url: str) -> str:
    """Return `url` with every password replaced, for logs and errors. Never fails."""
    if url == GATEWAY_URL:
        return url
    if (cut := _CUT_CREDENTIALS.fullmatch(url)) is not None:
        scheme, rest = cut.groups()
        return f"{scheme}{_HIDDEN}@{redact(scheme + rest).removeprefix(scheme)}"
    if "@" in url and not _HAS_PLACE.match(url):
        # Slashes are missing, or there is one too many: what reads as something else may be secret.
        return f"{_HIDDEN}@{redact(url.rpartition('@')[2])}"
    try:
        parts = urlsplit(url)
        netloc = _redact_netloc(parts.netloc)
        query = urlencode(
            [
                (name, _HIDDEN if "password" in name.lower() else value)
                for name, value in parse_qsl(parts.query, keep_blank_values=True)
            ],
            safe="*/",
        )
    except ValueError:
        scheme = re.match(r"[A-Za-z][A-Za-z0-9+.-]*(?=:)", url)
        return f"{scheme[0] if scheme else 'unreadable'}:{_HIDDEN}"
    shown = f"{parts.scheme}://{netloc}{parts.path}" if parts.scheme else parts.path
    return shown + (f"?{query}" if query else "") + (f"#{parts.fragment}" if parts.fragment else "")


def has_secret(url: str) -> bool:
    """Whether `redact` hides something of `url`: a password, or what may be one."""
    return redact(url).count(_HIDDEN) > url.count(_HIDDEN)


def parse_store_url(url: str) -> StoreUrl:
    """Parse a store URL, or raise StoreUrlError, which hides passwords."""
    if _CUT_CREDENTIALS.fullmatch(url) is not None:
        raise StoreUrlError(
            f"store URL {redact(url)!r} has an @ behind its host; write / ? # and @ in a user, "
            "password or option as %2F %3F %23 and %40"
        )
    if not unquote(url).isprintable():
        # What a server names is sent on as it stands, perhaps to something that is no Redis.
        raise StoreUrlError(f"store URL {redact(url)!r} holds unprintable characters")
    if (found := _MANY_HOSTS.fullmatch(url)) is not None:
        _check_known_options(url, found[4])
        return _parse_many_hosts(url, *found.groups())
    try:
        parts = urlsplit(url)
        names_port_0 = parts.port == 0
    except ValueError as error:
        raise StoreUrlError(f"store URL {redact(url)!r} is malformed: {_reason(error)}") from None
    if names_port_0:
        raise StoreUrlError(f"store URL {redact(url)!r} names port 0")
    if parts.scheme == "file":
        return _parse_file(url, parts)
    if parts.scheme in _REDIS_SCHEMES:
        _check_known_options(url, url)
        return _parse_redis(url, parts)
    raise StoreUrlError(
        f"store URL {redact(url)!r} is of no known kind; use {', '.join(STORE_URLS)}"
    )


def parse_redis_url(url: str) -> StoreUrl:
    """Parse the URL of a Redis, or raise StoreUrlError."""
    parsed = parse_store_url(url)
    if parsed.kind not in ("redis", "cluster", "sentinel"):
        raise StoreUrlError(f"{redact(url)!r} is not the URL of a Redis")
    return parsed


def _parse_file(url: str, parts: SplitResult) -> StoreUrl:
    if parts.netloc not in ("", "localhost"):
        raise StoreUrlError(
            f"store URL {redact(url)!r} names a host; file:// is for this host: file:///DIR"
        )
    directory = unquote(parts.path)
    if not directory.startswith("/") or "\0" in directory or parts.query or parts.fragment:
        raise StoreUrlError(f"store URL {redact(url)!r} needs an absolute path: file:///DIR")
    return StoreUrl(kind="file", url=f"file://{quote(directory)}", directory=directory)


def _check_known_options(url: str, behind_hosts: str) -> None:
    """Refuse options that redis-py would take for what they are not."""
    query = behind_hosts.partition("#")[0].partition("?")[2]
    options = parse_qsl(query, keep_blank_values=True)
    for name, value in options:
        form = _REDIS_OPTIONS.get(name)
        if form is None:
            # Behind an @ that was cut, a password may stand in an option's name.
            shown = _HIDDEN if "@" in name else name
            raise StoreUrlError(
                f"store URL {redact(url)!r} has the option {shown!r}; there are "
                f"{', '.join(_REDIS_OPTIONS)}"
            )
        if not re.fullmatch(form, value):
            raise StoreUrlError(f"store URL {redact(url)!r} has no value that {name} can have")
        if name.startswith("ssl_") and Path(value).is_fifo():
            # redis-py would wait for its writer.
            raise StoreUrlError(f"store URL {redact(url)!r} has {name} that is a pipe, not a file")
    if "ssl_keyfile" in dict(options) and "ssl_certfile" not in dict(options):
        raise StoreUrlError(f"store URL {redact(url)!r} has ssl_keyfile without ssl_certfile")


def _parse_redis(url: str, parts: SplitResult) -> StoreUrl:
    if parts.scheme == "unix":
        if not parts.path.startswith("/"):
            raise StoreUrlError(f"store URL {redact(url)!r} needs a path: unix:///SOCKET")
        return StoreUrl(kind="redis", url=url)
    if not parts.hostname:
        raise StoreUrlError(f"store URL {redact(url)!r} names no host")
    return StoreUrl(kind="redis", url=url)


def _parse_many_hosts(url: str, scheme: str, credentials: str, hosts: str, rest: str) -> StoreUrl:
    scheme = scheme.lower()
    is_cluster = scheme in _CLUSTER_SCHEMES
    default_port = _CLUSTER_PORT if is_cluster else _SENTINEL_PORT
    addresses = tuple(_address(url, item, default_port) for item in hosts.split(","))
    host, port = addresses[0]
    netloc = f"{credentials}[{host}]:{port}" if ":" in host else f"{credentials}{host}:{port}"
    try:
        parts = urlsplit(f"{(_CLUSTER_SCHEMES | _SENTINEL_SCHEMES)[scheme]}://{netloc}{rest}")
    except ValueError as error:
        raise StoreUrlError(f"store URL {redact(url)!r} is malformed: {_reason(error)}") from None
    if is_cluster:
        databases = {parts.path.strip("/"), dict(parse_qsl(parts.query)).get("db", "0")}
        if not databases <= {"", "0"}:
            raise StoreUrlError(f"store URL {redact(url)!r} names a database; a cluster has only 0")
        return StoreUrl(kind="cluster", url=urlunsplit(parts), addresses=addresses)
    service_name, _, database = parts.path.lstrip("/").partition("/")
    if not service_name:
        raise StoreUrlError(f"store URL {redact(url)!r} needs the name of the primary: .../NAME")
    return StoreUrl(
        kind="sentinel",
        url=urlunsplit(parts._replace(path=f"/{database or 0}")),
        addresses=addresses,
        service_name=unquote(service_name),
    )


def _address(url: str, text: str, default_port: int) -> tuple[str, int]:
    found = _ADDRESS.fullmatch(text)
    port = int(found[3] or default_port) if found else 0
    if found is None or not 0 < port < 1 << 16:
        raise StoreUrlError(f"store URL {redact(url)!r} needs hosts as in HOST:PORT,HOST:PORT")
    return found[1] or found[2], port


def _redact_netloc(netloc: str) -> str:
    user_info, at, hosts = netloc.rpartition("@")
    if not at:
        return netloc
    user, colon, _ = user_info.partition(":")
    return f"{user}:{_HIDDEN}@{hosts}" if colon else f"{_HIDDEN}@{hosts}"


def _reason(error: ValueError) -> str:
    """Return what is wrong without the URL, whose password urllib may repeat."""
    return "its port is not a number" if "ort" in str(error) else "it cannot be read as a URL"
