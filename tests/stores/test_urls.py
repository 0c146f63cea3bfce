"""Store URLs: which are taken, which refused, and that no password is ever shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breadbox.model.errors import StoreUrlError
from breadbox.stores import open_store
from breadbox.stores.urls import (
    GATEWAY_URL,
    has_secret,
    parse_redis_url,
    parse_store_url,
    redact,
)

SECRET = "hunter2"

WITH_SECRETS = [
    f"redis://:{SECRET}@host:6379/0",
    f"rediss://user:{SECRET}@host",
    f"redis://{SECRET}@host",
    f"unix://:{SECRET}@/run/redis.sock?db=1",
    f"unix:///run/redis.sock?db=1&password={SECRET}",
    f"rediss://host?ssl_password={SECRET}",
    f"redis+cluster://:{SECRET}@host:7000",
    f"redis+cluster://:{SECRET}@a:7000,b:7000",
    f"redis+cluster://:{SECRET}@a:port,b:7000",
    f"redis+sentinel://:{SECRET}@a:1,b:2/main",
    f"redis://:{SECRET}@host:port",
    f"redis://:{SECRET}@[::1",
    f"redis://:{SECRET}@host:99999",
    f"http://u:{SECRET}@host",
    f"file://u:{SECRET}@host/dir",
    f"redis://:a@{SECRET}@host",
]


def test_what_stands_for_the_gateway_is_shown_as_it_is_and_is_no_store_of_a_server() -> None:
    assert GATEWAY_URL == redact(GATEWAY_URL)
    with pytest.raises(StoreUrlError, match="no known kind"):
        parse_store_url(GATEWAY_URL)


def test_a_directory_is_no_redis() -> None:
    with pytest.raises(StoreUrlError, match="is not the URL of a Redis"):
        parse_redis_url("file:///tmp/none")


@pytest.mark.parametrize("url", WITH_SECRETS)
def test_passwords_are_never_shown(url: str) -> None:
    assert SECRET not in redact(url)
    shown: list[object]
    try:
        shown = [repr(parse_store_url(url)), str(parse_store_url(url))]
    except StoreUrlError as error:
        shown = [error, error.__cause__]
    assert not any(SECRET in str(each) for each in shown)


SHOWN = [
    ("redis://:x@host:6379/0?db=3", "redis://:***@host:6379/0?db=3"),
    ("unix:///run/redis.sock?db=1", "unix:///run/redis.sock?db=1"),
    ("file:///dev/shm/breadbox", "file:///dev/shm/breadbox"),
    ("rediss://u:x@host", "rediss://u:***@host"),
    ("redis+cluster://:x@a:1,b:2?db=0", "redis+cluster://:***@a:1,b:2?db=0"),
]


@pytest.mark.parametrize(("url", "shown"), SHOWN)
def test_a_url_without_a_password_has_no_secret_however_it_is_written(url: str, shown: str) -> None:
    assert has_secret(url) is ("***" in shown)
    assert not has_secret("redis:/host")
    assert not has_secret("REDIS://Host:6379")


@pytest.mark.parametrize("url", WITH_SECRETS)
def test_a_url_with_a_password_has_a_secret(url: str) -> None:
    assert has_secret(url)


@pytest.mark.parametrize(("url", "shown"), SHOWN)
def test_the_rest_of_a_url_is_shown(url: str, shown: str) -> None:
    assert shown == redact(url)


@given(st.text(max_size=60))
def test_any_text_is_redacted_and_parsed_or_refused(text: str) -> None:
    redact(text)
    try:
        parse_store_url(text)
    except StoreUrlError:
        return
    assert text.strip().lower().startswith(("file:", "redis", "unix:"))


@pytest.mark.parametrize(
    "url",
    [
        "",
        "redis",
        "redis://",
        "redis:///0",
        "unix://",
        "unix://relative.sock",
        "file://",
        "file://relative",
        "file:relative",
        "file://host/dir",
        "file:///dir?x=1",
        "redis://host:0",
        "s3://bucket",
        "redis+sentinel://host:1",
        "redis+sentinel://host:x/main",
        "redis+cluster://",
        "redis+cluster://a:1,",
        "redis+cluster://,a:1",
        "redis+cluster://a:1,b:x",
        "redis+cluster://a:1,b:0",
        "redis+cluster://a:1,b:70000",
        "redis+cluster://a:1,b:",
        "redis+cluster://a:1,::1",
        "redis+cluster://[::1",
        "redis+cluster://a:1,b:2/1",
        "redis+cluster://a:1,b:2?db=1",
        "redis+sentinel://a:1,b:0/main",
    ],
)
def test_urls_that_cannot_be_used_are_refused_in_one_line(url: str) -> None:
    with pytest.raises(StoreUrlError) as caught:
        open_store(url)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "query",
    [
        *("no_such_option=1", "retry=1", "event_dispatcher=x", "maint_notifications_config=x"),
        *("socket_keepalive_options=1", "decode_responses=1", "protocol=3", "Db=1"),
        *("socket_timeout=soon", "socket_timeout=nan", "socket_timeout=-1", "db=x", "db=-1"),
        *("ssl_cert_reqs=perhaps", "ssl_keyfile=/key", "max_connections=1e9", "socket_timeout="),
    ],
)
@pytest.mark.parametrize("kind", ["rediss", "rediss+cluster", "rediss+sentinel"])
def test_an_option_that_redis_py_would_stumble_over_is_refused_by_name(
    kind: str, query: str
) -> None:
    place = "/main" if "sentinel" in kind else ""
    with pytest.raises(StoreUrlError, match=query.partition("=")[0]) as caught:
        open_store(f"{kind}://:{SECRET}@localhost{place}?{query}")
    assert SECRET not in str(caught.value)


def test_options_of_database_timeouts_and_tls_are_taken() -> None:
    query = "db=3&socket_timeout=2.5&ssl_ca_certs=/ca.pem&ssl_cert_reqs=required&client_name=me"
    assert f"rediss://localhost/?{query}" == parse_store_url(f"rediss://localhost/?{query}").url


def test_sentinels_and_their_primary_are_read() -> None:
    parsed = parse_store_url("redis+sentinel://:p@a:1,b/main/3")
    assert (("a", 1), ("b", 26379)) == parsed.addresses
    assert "main" == parsed.service_name


@pytest.mark.parametrize("scheme", ["redis", "rediss"])
def test_all_nodes_of_a_cluster_are_read_and_redis_py_is_told_the_first(scheme: str) -> None:
    parsed = parse_store_url(f"{scheme}+cluster://u:p@a:1,b,[::1]:3,[::2]?socket_timeout=9")
    assert "cluster" == parsed.kind
    assert (("a", 1), ("b", 6379), ("::1", 3), ("::2", 6379)) == parsed.addresses
    assert f"{scheme}://u:p@a:1?socket_timeout=9" == parsed.url


def test_a_cluster_url_that_begins_with_a_bare_host_gets_the_default_port() -> None:
    assert "redis://[::1]:6379" == parse_store_url("redis+cluster://[::1],b:2").url


def test_sentinels_may_have_addresses_of_version_6() -> None:
    parsed = parse_store_url("redis+sentinel://[::1]:1,[::2]/main")
    assert (("::1", 1), ("::2", 26379)) == parsed.addresses


@pytest.mark.parametrize("unannounced_s", [0.0, -1.0, float("nan")])
def test_a_life_of_nothing_is_refused(unannounced_s: float) -> None:
    with pytest.raises(StoreUrlError):
        open_store("redis://localhost", unannounced_s=unannounced_s)


def test_tiny_pieces_are_refused() -> None:
    with pytest.raises(StoreUrlError):
        open_store("redis://localhost", piece_size_bytes=1000)


@pytest.mark.parametrize(
    "url",
    [
        f"default:{SECRET}@host:6379/0",
        f":{SECRET}@host",
        f"redis:default:{SECRET}@host",
        f"redis:/default:{SECRET}@host/0",
        f"redis:///default:{SECRET}@host/0",
    ],
)
def test_a_password_is_hidden_where_slashes_are_missing_or_too_many(url: str) -> None:
    with pytest.raises(StoreUrlError) as refused:
        parse_store_url(url)

    assert SECRET not in redact(url) + str(refused.value)
    assert has_secret(url)
