"""Clients that are made from environment variables."""

import pytest

from breadbox.environment import connect_from_environment, seconds_from_environment
from breadbox.model import errors


def test_nothing_set_is_the_local_server_and_the_default_buffer() -> None:
    with connect_from_environment(environment={}) as client:
        assert ("localhost:50051", "default") == (client.address, client.buffer)
        options = client._context.options  # noqa: SLF001 - tokens are not shown
        assert (None, None, None) == (options.tls, options.token, options.store_url)


def test_every_variable_is_read_and_an_argument_wins() -> None:
    variables = {
        "BREADBOX_SERVER": "elsewhere:1",
        "BREADBOX_BUFFER": "b",
        "BREADBOX_TOKEN": "secret",
        "BREADBOX_TLS": "1",
        "BREADBOX_STORE_URL": "redis://store:6379",
    }
    with connect_from_environment(buffer="mine", environment=variables) as client:
        assert ("elsewhere:1", "mine") == (client.address, client.buffer)
        options = client._context.options  # noqa: SLF001 - tokens are not shown
        assert ("secret", "redis://store:6379") == (options.token, options.store_url)
        assert options.tls is not None
        assert None is options.tls.ca_file


@pytest.mark.parametrize(
    ("variables", "field"),
    [
        ({"BREADBOX_TLS": "perhaps"}, "BREADBOX_TLS"),
        ({"BREADBOX_TLS_CA": "/nowhere.pem"}, "tls.ca_file"),
        ({"BREADBOX_TLS_CERT": "/nowhere.pem"}, "tls"),
        ({"BREADBOX_SERVER": "no-port"}, "address"),
    ],
)
def test_what_cannot_be_is_refused_by_name(variables: dict[str, str], field: str) -> None:
    with pytest.raises(errors.InvalidRequestError) as caught:
        connect_from_environment(environment=variables)
    assert field == caught.value.field


def test_seconds_are_a_number_or_nothing() -> None:
    assert (2.5, None, None) == (
        seconds_from_environment("S", {"S": " 2.5 "}),
        seconds_from_environment("S", {"S": ""}),
        seconds_from_environment("S", {}),
    )
    with pytest.raises(errors.InvalidRequestError, match="S must be a number of seconds"):
        seconds_from_environment("S", {"S": "soon"})
