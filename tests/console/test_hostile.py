"""What one producer sends, or one viewer asks, hurts no other page; honest types are shown."""

import http.client
import itertools
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import breadbox
from support.console import console, played
from support.eventually import eventually_sync
from support.server_process import ServerProcess
from support.token_files import write_tokens

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(120)]

STEPS = 4
_ENDED = np.arange(STEPS) == STEPS - 1


def ask(
    url: str, path: str, *, cookie: str = "", body: Any = None
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an answer."""
    host = url.removeprefix("http://").rstrip("/")
    headers = {"cookie": f"breadbox_console={cookie}"} if cookie else {}
    if body is not None:
        headers["content-type"] = "application/json"
        body = json.dumps(body)
    with closing(http.client.HTTPConnection(host, timeout=30)) as connection:
        connection.request("GET" if body is None else "POST", path, body, headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()


def ask_json(url: str, path: str, **how: Any) -> Any:
    """The JSON of an answer that has to be one."""
    status, _, body = ask(url, path, **how)
    assert 200 == status, (path, body[:300])
    return json.loads(body, parse_constant=lambda name: pytest.fail(f"JSON knows no {name}"))


def first_overview(url: str, cookie: str = "") -> Any:
    """The first event of the stream of overviews."""
    host = url.removeprefix("http://").rstrip("/")
    headers = {"cookie": f"breadbox_console={cookie}"} if cookie else {}
    with closing(http.client.HTTPConnection(host, timeout=30)) as connection:
        connection.request("GET", "/api/overview", headers=headers)
        answer = connection.getresponse()
        assert 200 == answer.status
        return json.loads(answer.readline().removeprefix(b"data: "))


@contextmanager
def watched(folder: Path, *arguments: str, token: str = "") -> Iterator[tuple[Any, str]]:
    """A client of a server that takes everything, and the URL of a console of it."""
    store = ("--store", f"file://{folder}/store", "--schema", "any", *arguments)
    with ExitStack() as stack:
        server = stack.enter_context(ServerProcess(*store, log=folder / "server.log"))
        client = stack.enter_context(breadbox.connect(server.address, token=token or None))
        url = stack.enter_context(console(server.address, folder / "console.log"))
        yield client, url


def bfloat16(*shape: int) -> Any:
    torch = pytest.importorskip("torch")
    return torch.full(shape, 1.5, dtype=torch.bfloat16)


def each_step(value: Any) -> np.ndarray[Any, Any]:
    return np.array([value] * STEPS)


UNUSUAL: dict[str, Callable[[], dict[str, Any]]] = {
    "text where a return is": lambda: {"extras": {"episode_return": each_step("x")}},
    "unlike flags": lambda: {
        "terminated": _ENDED.astype(np.uint64),
        "truncated": np.zeros(STEPS, np.int64),
    },
    "no code point": lambda: {
        "extras": {"task": np.frombuffer(b"\xff\xff\xff\xff" * STEPS, "<U1").copy()}
    },
    "half of a pair": lambda: {
        "extras": {"task": each_step("\ud800x"), "note": each_step("\udc00")}
    },
    "a pair in another order of bytes": lambda: {
        "extras": {"tag": each_step("\ud800y").astype(">U2")}
    },
    "complex numbers": lambda: {"extras": {"spectrum": np.ones(STEPS, np.complex64)}},
    "dates": lambda: {"extras": {"when": np.zeros(STEPS, "datetime64[s]")}},
    "spans of time": lambda: {"extras": {"episode_return": np.zeros(STEPS, "timedelta64[s]")}},
    "raw bytes": lambda: {"extras": {"raw": np.zeros(STEPS, "V8")}},
    "raw bytes acted": lambda: {"action": np.zeros(STEPS, "V8")},
    "infinite returns": lambda: {"extras": {"episode_return": np.full(STEPS, np.inf)}},
    "returns beyond float32": lambda: {"reward": np.full(STEPS, 1e300)},
    "an empty observation": lambda: {"obs": np.zeros((STEPS, 0), np.float32)},
    "an empty image": lambda: {"obs": np.zeros((STEPS, 16, 16, 0), np.uint8)},
    "an image of two channels": lambda: {"obs": np.zeros((STEPS, 16, 16, 2), np.uint8)},
    "a long number": lambda: {"episode_id": np.full(STEPS, 2**63, np.uint64)},
    "wide text": lambda: {"extras": {"tag": each_step("x" * 50_000)}},
    "other shapes than before": lambda: {"obs": np.zeros((STEPS, 7, 2), np.float32)},
    "many arrays": lambda: {
        "obs": {f"sensor{at}": np.zeros((STEPS, 2), np.float32) for at in range(600)}
    },
    "odd names": lambda: {
        "worker_id": "<script>é.[0]..%00",
        "extras": {"a.b[0]\\é": np.ones(STEPS), "": np.ones(STEPS)},
    },
}
HONEST: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "bfloat16 reward": lambda: {"reward": bfloat16(STEPS)},
    "bfloat16 log-probability": lambda: {"log_prob": bfloat16(STEPS)},
    "bfloat16 observation": lambda: {"obs": bfloat16(STEPS, 3)},
    "float16 observation": lambda: {"obs": np.full((STEPS, 3), 1.5, np.float16)},
    "uint64 observation": lambda: {"obs": np.full((STEPS, 3), 2**63, np.uint64)},
    "bool observation": lambda: {"obs": np.ones((STEPS, 3), np.bool_)},
    "numbers without axes": lambda: {"obs": np.ones(STEPS, np.float32)},
    "text": lambda: {"extras": {"instruction": each_step("pick é up"), "task": each_step("dig")}},
    "NaN": lambda: {"obs": np.array([[np.nan, np.inf, -np.inf]] * STEPS, np.float32)},
}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, Any], Path]]:
    """The URL of a console that saw fragments of every kind, and its episodes by their kind."""
    folder = tmp_path_factory.mktemp("hostile")
    with watched(folder, "--inline-size-max", "256KiB") as (client, url):
        client.start_session("run")
        for at, (kind, fields) in enumerate((UNUSUAL | HONEST).items()):
            sent: dict[str, Any] = {
                "worker_id": kind,
                "steps": STEPS,
                "ends": (STEPS - 1,),
            } | fields()
            changed = {name: sent.pop(name) for name in [*sent] if name in _ARRAYS}
            fragment = played(0, **sent)
            for name, value in changed.items():
                setattr(fragment, name, value)
            if "obs" in changed:
                fragment.next_obs = next_of(changed["obs"])
            client.append(fragment)
            client.append(played(at, worker_id="well", episode_id=at, steps=STEPS, ends=(3,)))

        def rows() -> dict[str, Any]:
            found = ask_json(url, "/api/buffers/default/episodes")["rows"]
            return {each["worker_id"]: each for each in found}

        wanted = {*HONEST, "well"}
        eventually_sync(lambda: wanted <= rows().keys(), f"a list of {wanted}")
        yield url, rows(), folder / "console.log"


_ARRAYS = ("obs", "action", "reward", "terminated", "truncated", "episode_id", "log_prob")


def next_of(obs: Any) -> Any:
    return {name: leaf[-1] for name, leaf in obs.items()} if isinstance(obs, dict) else obs[-1]


def test_every_page_answers_whatever_a_producer_sent(page: Any) -> None:
    url, rows, log = page
    assert "" == first_overview(url)["problem"]
    assert {"returns", "training"} <= ask_json(url, "/api/buffers/default/learning?by=task").keys()
    for kind, each in rows.items():
        here = f"/api/buffers/default/episodes/{each['number']}"
        assert STEPS == ask_json(url, here)["length"], kind
        for stream in ("obs", "action", "reward", "nothing"):
            assert ask(url, f"{here}/frame/0?stream={stream}")[0] in (200, 404), (kind, stream)
            assert ask(url, f"{here}/picture?stream={stream}")[0] in (200, 404), (kind, stream)
        assert ask(url, f"{here}/file.parquet")[0] in (200, 422), kind
        assert ask(url, f"{here}/file.mp4")[0] in (200, 404), kind
    assert "Traceback" not in log.read_text()


def test_every_kind_of_fragment_has_its_episode_or_a_problem_at_its_worker(page: Any) -> None:
    url, rows, _ = page
    shown = {
        each["name"]: each["problems"] for each in first_overview(url)["buffers"][0]["workers"]
    }
    names = {kind: fields().get("worker_id", kind) for kind, fields in (UNUSUAL | HONEST).items()}

    assert [] == [kind for kind, name in names.items() if name not in rows and not shown.get(name)]


@pytest.mark.parametrize("kind", HONEST)
def test_honest_types_are_shown_and_can_be_downloaded(page: Any, kind: str) -> None:
    url, rows, _ = page
    here = f"/api/buffers/default/episodes/{rows[kind]['number']}"
    told = ask_json(url, here)

    assert (STEPS, "terminated") == (told["length"], told["end"])
    assert (6.0 if kind == "bfloat16 reward" else 4.0) == told["return"]
    if kind.endswith("observation"):
        value = {"bool": 1.0, "uint64": 2.0**63}.get(kind.split()[0], 1.5)
        assert [[value] * STEPS] * 3 == [each["values"] for each in told["series"]["obs"]]
    if kind == "NaN":
        assert [[None] * STEPS] * 3 == [each["values"] for each in told["series"]["obs"]]
    if kind == "text":
        assert ["pick é up"] * STEPS == told["texts"]["extras.instruction"]
        assert "dig" == told["task"]
    assert 200 == ask(url, f"{here}/file.parquet")[0]


def test_what_is_no_text_is_replaced_and_wide_text_names_no_episode(page: Any) -> None:
    _, rows, _ = page

    assert "\ufffd" == rows["no code point"]["task"]
    assert "\ufffdx" == rows["half of a pair"]["task"]
    assert "\ufffdy" == rows["a pair in another order of bytes"]["text"]
    assert "" == rows["wide text"]["text"]


def test_a_file_that_cannot_hold_an_episode_is_refused_with_a_reason(page: Any) -> None:
    url, rows, _ = page
    status, _, body = ask(
        url, f"/api/buffers/default/episodes/{rows['dates']['number']}/file.parquet"
    )

    assert 422 == status
    assert json.loads(body)["error"].startswith("column 'when': cannot be exported")


QUESTIONS = [
    ("/api/buffers/default/episodes?start=inf", 400),
    ("/api/buffers/default/episodes?start=nan", 400),
    ("/api/buffers/default/episodes?start=1e999", 400),
    ("/api/buffers/default/episodes?start=%C3%A9", 400),
    ("/api/buffers/default/episodes?return_min=-inf", 400),
    ("/api/buffers/default/episodes?start=1e300", 200),
    ("/api/buffers/default/episodes?text=%ED%A0%80", 200),
    (f"/api/buffers/default/episodes/{'9' * 5000}", 404),
    (f"/api/buffers/default/episodes/1/frame/{'9' * 5000}", 404),
    ("/api/buffers/%FF/episodes", 404),
    ("/static/%00", 404),
]


@pytest.mark.parametrize(("path", "status"), QUESTIONS)
def test_a_strange_question_is_refused_in_order(page: Any, path: str, status: int) -> None:
    assert status == ask(page[0], path)[0]


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("GET /é HTTP/1.1\r\nhost: localhost", b"400"),
        ("GET /api/buffers/default/episodes?start=é HTTP/1.1\r\nhost: localhost", b"400"),
        ("GET / HTTP/1.1\r\nhost: é", b"400"),
        ("GET /api/session HTTP/1.1\r\nhost: localhost\r\ncookie: breadbox_console=é", b"200"),
        ("GET /static/main.js HTTP/1.1\r\nhost: localhost\r\nrange: bytes=é", b"400"),
    ],
)
def test_bytes_that_are_no_ascii_are_refused_in_order(page: Any, line: str, status: bytes) -> None:
    host, _, port = page[0].removeprefix("http://").rstrip("/").partition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(f"{line}\r\nconnection: close\r\n\r\n".encode("latin-1"))
        assert status == connection.recv(4096).split(b" ")[1]


@pytest.mark.parametrize("body", ["é", "\ud800", "a\nb", "@/etc/passwd", "x" * 5000, "made-up"])
def test_a_server_without_tokens_needs_no_login_and_takes_no_token(page: Any, body: str) -> None:
    status, headers, _ = ask(page[0], "/api/login", body={"token": body})

    assert (401, False) == (status, "set-cookie" in headers)


def test_json_in_json_in_json_is_no_token(page: Any) -> None:
    deep: Any = []
    for _ in range(900):
        deep = [deep]
    text = json.dumps(deep).replace("[[", "[[" * 8).replace("]]", "]]" * 8)
    host = page[0].removeprefix("http://").rstrip("/")
    with closing(http.client.HTTPConnection(host, timeout=30)) as connection:
        connection.request("POST", "/api/login", text, {"content-type": "application/json"})

        assert 400 == connection.getresponse().status


def test_silent_connections_take_no_place_and_end(page: Any) -> None:
    url = page[0]
    host, _, port = url.removeprefix("http://").rstrip("/").partition(":")
    silent = [socket.create_connection((host, int(port)), timeout=30) for _ in range(600)]
    slow = socket.create_connection((host, int(port)), timeout=30)
    slow.sendall(b"POST /api/login HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{")
    try:
        assert "" == first_overview(url)["problem"]
        for each in (silent[0], silent[-1]):
            with_end = pytest.raises(ConnectionError)
            with with_end:
                if not each.recv(1):
                    raise ConnectionError
    finally:
        for each in (*silent, slow):
            each.close()


def login(url: str, token: str) -> tuple[int, str]:
    status, headers, _ = ask(url, "/api/login", body={"token": token})
    found = re.search("breadbox_console=([^;]+)", headers.get("set-cookie", ""))
    return status, found[1] if found else ""


@pytest.fixture
def with_tokens(tmp_path: Path) -> Iterator[tuple[str, Path, dict[str, str]]]:
    file = tmp_path / "tokens"
    names = ("boss", "ann", "bob")
    made = write_tokens(file, "admin boss", "viewer ann", "viewer bob")
    tokens = dict(zip(names, made, strict=True))
    with watched(tmp_path, "--tokens", str(file), token=tokens["boss"]) as (client, url):
        client.start_session("run")
        yield url, file, tokens


def test_a_session_ends_when_its_token_is_revoked_and_no_other_does(with_tokens: Any) -> None:
    url, file, tokens = with_tokens
    cookies = {name: login(url, tokens[name])[1] for name in ("ann", "bob")}
    assert "default" == first_overview(url, cookies["ann"])["buffers"][0]["name"]
    stream = http.client.HTTPConnection(url.removeprefix("http://").rstrip("/"), timeout=60)
    stream.request("GET", "/api/overview", headers={"cookie": f"breadbox_console={cookies['ann']}"})
    following = stream.getresponse()
    ended = threading.Event()

    def follow() -> None:
        following.read()
        ended.set()

    reading = threading.Thread(target=follow)
    reading.start()
    kept = [line for line in file.read_text().splitlines() if " ann" not in line]
    file.write_text("\n".join([*kept, ""]))

    eventually_sync(
        lambda: 401 == ask(url, "/api/buffers/default/episodes", cookie=cookies["ann"])[0],
        "an end of the session",
    )
    assert (401, "") == login(url, tokens["ann"])
    assert not ask_json(url, "/api/session", cookie=cookies["ann"])["is_in"]
    assert ask_json(url, "/api/session", cookie=cookies["bob"])["is_in"]
    assert ended.wait(30), "the revoked page's stream goes on"
    reading.join()
    stream.close()


def test_logins_of_one_token_end_its_oldest_and_no_others(with_tokens: Any) -> None:
    from breadbox_console.access import SESSIONS_OF_TOKEN_MAX

    url, _, tokens = with_tokens
    bob = login(url, tokens["bob"])[1]
    anns = [login(url, tokens["ann"])[1] for _ in range(SESSIONS_OF_TOKEN_MAX + 2)]
    is_in = [ask_json(url, "/api/session", cookie=each)["is_in"] for each in (bob, *anns)]

    assert [True, False, False, *itertools.repeat(True, SESSIONS_OF_TOKEN_MAX)] == is_in
    assert 401 == login(url, "made-up")[0]
