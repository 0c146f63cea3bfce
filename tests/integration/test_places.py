"""Where clients look for a server: past proxies, at its name's address, by IPv6 alone."""

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import breadbox
from breadbox_server.maintenance import probe
from support.callers import KINDS, make_caller
from support.fragments import large_fragment
from support.namespaces import run_or_skip, with_ipv6_alone, with_own_mounts
from support.server_process import ServerProcess, plain_environment

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
PROXIES = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:1")
BREADBOX = (sys.executable, "-m", "breadbox.cli.main")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    options = ("--store", f"file://{tmp_path}/store", "--gateway")
    with ServerProcess(*options, log=tmp_path / "log", environment=PROXIES) as process:
        yield process


@pytest.fixture
def proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy for the web that is not there, and nothing that is excepted from it."""
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy", "grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name, url in PROXIES.items():
        monkeypatch.setenv(name, url)


@pytest.mark.usefixtures("proxies")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "dns:///localhost"])
async def test_no_client_asks_the_proxy_of_the_web_for_a_server(
    host: str, kind: str, server: ServerProcess
) -> None:
    address = f"{host}:{server.address.rpartition(':')[2]}"
    async with make_caller(kind, address, reconnect_s=0.0) as caller:
        assert ["default"] == [each.name for each in await caller.call("list_buffers")]


@pytest.mark.usefixtures("proxies")
def test_payloads_and_probes_and_commands_pass_the_proxy_of_the_web_by(
    server: ServerProcess,
) -> None:
    with breadbox.connect(server.address, store_url="gateway:", reconnect_s=0.0) as client:
        client.start_session("s")
        assert client.append(large_fragment(0)).outcome is breadbox.AdmissionOutcome.ADMITTED
    assert ("SERVING", "") == probe.probe(server.address)
    doctor = subprocess.run(
        [*BREADBOX, "doctor", "--server", server.address],
        env=_environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert 0 == doctor.returncode, doctor.stdout


def _environment(**more: str) -> dict[str, str]:
    return {**plain_environment(), "PYTHONPATH": str(ROOT / "tests"), **more}


@pytest.mark.timeout(120)
def test_a_server_that_moved_under_its_name_is_found_before_a_call_gives_up(
    tmp_path: Path,
) -> None:
    """In a mount namespace /etc/hosts is the name's authority; `reconnect_s` is the default's half.

    The client has resolved the name a moment before, and asks again as soon as nobody answers.
    """
    script = textwrap.dedent("""
        import subprocess, sys
        from pathlib import Path
        import breadbox
        from support.server_process import ServerProcess

        folder = Path(sys.argv[1])
        hosts = folder / "hosts"

        def point(host):
            hosts.write_text(f"127.0.0.1 localhost\\n{host} breadbox-server\\n")

        def server(listen):
            options = ("--store", f"file://{folder}/store", "--allow-plaintext")
            return ServerProcess(*options, log=folder / "log", listen=listen)

        point("127.0.0.2")
        subprocess.check_call(["mount", "--bind", str(hosts), "/etc/hosts"])
        with server("127.0.0.2:0") as first:
            port = first.address.rpartition(":")[2]
            client = breadbox.connect(f"breadbox-server:{port}", reconnect_s=15.0)
            client.start_session("run")
        point("127.0.0.3")
        with server(f"127.0.0.3:{port}"):
            print("found", [each.name for each in client.list_buffers()])
    """)
    command = with_own_mounts(sys.executable, "-c", script, str(tmp_path))
    done = run_or_skip(command, environment=_environment(), within_s=100)
    assert "found ['default']\n" == done.stdout, done.stderr


@pytest.mark.timeout(240)
def test_everything_that_starts_on_this_machine_starts_where_its_loopback_has_ipv6_alone(
    tmp_path: Path,
) -> None:
    script = textwrap.dedent("""
        import asyncio, os, re, subprocess, sys, urllib.request
        from pathlib import Path
        import breadbox, breadbox.aio, breadbox.testing
        from support.server_process import ServerProcess

        def host(client):
            return client.address.rpartition(":")[0]

        with breadbox.local_server() as client:
            client.list_buffers()
            print("local_server", host(client))

        async def main():
            async with breadbox.aio.local_server() as client:
                await client.list_buffers()
                print("aio.local_server", host(client))

        asyncio.run(main())
        with breadbox.testing.start_server() as server:
            print("start_server", server.address.rpartition(":")[0])

        run = [sys.executable, "-m", "breadbox.cli.main"]
        serve = [*run, "serve", "--ephemeral", "--metrics-listen", "[::1]:0"]
        server = subprocess.Popen(serve, stdout=subprocess.PIPE, text=True)
        line = server.stdout.readline()
        print("serve", re.search("serving on (\\\\S+)", line)[1])
        with urllib.request.urlopen(re.search("metrics=(\\\\S+)", line)[1]) as page:
            print("metrics", page.status)
        silent = {"stdout": subprocess.DEVNULL}
        print("doctor", subprocess.call([*run, "doctor"], **silent))
        probe = [sys.executable, "-m", "breadbox_server.maintenance.probe"]
        print("probe", subprocess.call(probe))
        everywhere = {**os.environ, "BREADBOX_LISTEN": "0.0.0.0:50051"}
        print("probe of a server on all addresses", subprocess.call(probe, env=everywhere))
        console = subprocess.Popen([*run, "console"], stdout=subprocess.PIPE, text=True)
        url = console.stdout.readline().split()[1]
        print("console", url)
        for each in (console, server):
            each.terminate()
            each.wait(30)
    """)
    command = with_ipv6_alone(sys.executable, "-c", script, str(tmp_path))
    done = run_or_skip(command, environment=_environment(), within_s=220)
    assert done.stdout.splitlines() == [
        "local_server [::1]",
        "aio.local_server [::1]",
        "start_server [::1]",
        "serve [::1]:50051",
        "metrics 200",
        "doctor 0",
        "probe 0",
        "probe of a server on all addresses 0",
        "console http://[::1]:8400/",
    ], done.stderr
