"""A server that means harm, or somebody in the middle who answers for it: what a client refuses."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration

import breadbox
from breadbox.model.errors import PayloadCorruptError, StoreError, StoreUrlError
from breadbox.model.types import PayloadReference
from breadbox.stores import open_store
from breadbox.v1 import replay_buffer_service_pb2 as pb
from support.fake_service import FakeService, serving
from support.fragments import vector_fragment

SECRET = b"what nobody may read or change"


@pytest.fixture
def fake() -> FakeService:
    return FakeService()


@pytest.fixture
def client(fake: FakeService) -> Iterator[breadbox.Client]:
    with serving(fake) as address, breadbox.connect(address, reconnect_s=0.0) as connected:
        yield connected


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder of the user's that is no store."""
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    (folder / "notes").write_bytes(SECRET)
    return folder


def names(fake: FakeService, url: str) -> None:
    """Let the server say that payloads live there."""
    told = pb.GetStoreConfigResponse(store_url=url, unannounced_duration=Duration(seconds=600))
    fake.will("GetStoreConfig", *[told] * 4)


def seen_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("named", ["", "new/and/deeper", "notes"])
def test_a_directory_in_which_nobody_made_a_store_is_left_as_it_is(
    fake: FakeService, client: breadbox.Client, home: Path, named: str
) -> None:
    names(fake, f"file://{home}/{named}".rstrip("/"))
    with pytest.raises(StoreUrlError, match="there is no payload store in"):
        client.append(vector_fragment(0))

    assert ["notes"] == seen_in(home)
    assert SECRET == (home / "notes").read_bytes()


def test_a_directory_that_others_may_write_is_left_as_it_is(
    fake: FakeService, client: breadbox.Client, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    open_store(f"file://{store}").close()
    store.chmod(0o777)
    before = seen_in(store)
    names(fake, f"file://{store}")
    with pytest.raises(StoreError, match="other users may write it"):
        client.append(vector_fragment(0))

    assert before == seen_in(store)


@pytest.mark.parametrize("payload_id", ["../../home/notes", "/etc/passwd", "0" * 31, "A" * 32])
def test_a_payload_by_any_other_name_than_an_id_is_not_read(
    fake: FakeService, client: breadbox.Client, home: Path, tmp_path: Path, payload_id: str
) -> None:
    open_store(f"file://{tmp_path}/store").close()
    names(fake, f"file://{tmp_path}/store")
    with pytest.raises(PayloadCorruptError, match="out of bounds"):
        client.service.load_weights(PayloadReference(payload_id, len(SECRET)))


def test_a_link_in_a_store_is_not_followed(
    fake: FakeService, client: breadbox.Client, home: Path, tmp_path: Path
) -> None:
    open_store(f"file://{tmp_path}/store").close()
    names(fake, f"file://{tmp_path}/store")
    payload_id = "ab" * 16
    (tmp_path / "store" / "payloads" / "ab" / payload_id).symlink_to(home / "notes")
    with pytest.raises(PayloadCorruptError, match="is no file"):
        client.service.load_weights(PayloadReference(payload_id, len(SECRET)))


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:x%0D%0ADELETE%20/%20HTTP/1.1%0D%0A@127.0.0.1:1/0",
        "redis://127.0.0.1:1/0?client_name=x%0D%0A",
        "unix:///run/some%00.sock",
        "http://169.254.169.254/latest",
        "ftp://127.0.0.1/",
        "file://elsewhere/dir",
    ],
)
def test_a_url_that_could_mean_something_to_another_service_is_refused(
    fake: FakeService, client: breadbox.Client, url: str
) -> None:
    names(fake, url)
    with pytest.raises(StoreUrlError):
        client.append(vector_fragment(0))


def test_a_store_that_the_user_names_is_taken_whatever_the_server_says(
    fake: FakeService, home: Path, tmp_path: Path
) -> None:
    own = f"file://{tmp_path}/own"
    open_store(own).close()
    names(fake, f"file://{home}")
    with (
        serving(fake) as address,
        breadbox.connect(address, reconnect_s=0.0, store_url=own) as client,
        pytest.raises(breadbox.ReplayBufferError),
    ):
        client.append(vector_fragment(0))

    assert ["notes"] == seen_in(home)
    assert fake.requests("AppendFragments"), "the payload was written, and announced"
