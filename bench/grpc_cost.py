"""What a call costs on the locked grpcio beside the newest one: `make bench-grpcio`.

A bare asyncio server and callers, in processes of their own, on either release in turns. Where the
newest is as cheap, it says so: the bound in pyproject.toml (`tool.uv`) may go.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import grpc

from bench.processes import cpu_s

METHOD = "/bench.Cost/Call"
CALLERS = 64
AS_CHEAP = 1.05
"""Up to so many times the locked release's processor time per call a newer one is as cheap."""
_ROOT = Path(__file__).parents[1]


def locked_version() -> str:
    """Return the release of grpcio in uv.lock."""
    packages = tomllib.loads((_ROOT / "uv.lock").read_text())["package"]
    return next(str(each["version"]) for each in packages if each["name"] == "grpcio")


def _install(requirement: str, into: Path) -> str:
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "--upgrade", "--target", into, requirement], check=True)
    (found,) = metadata.distributions(name="grpcio", path=[str(into)])
    return found.version


def _started(folder: Path, *words: str) -> "subprocess.Popen[str]":
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{_ROOT}"}
    command = [sys.executable, "-m", "bench.grpc_cost", *words]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def _said(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def cost_us(folder: Path, seconds: float) -> float:
    """Return the server's microseconds of processor time per call, on the grpcio in a folder."""
    with _started(folder, "--serve") as server:
        with _started(folder, "--call", _said(server), "--seconds", str(seconds)) as callers:
            _said(callers)
            before_s = cpu_s(server.pid)
            count = int(_said(callers))
            used_s = cpu_s(server.pid) - before_s
        server.terminate()
    return used_s / count * 1e6


async def _serve() -> None:
    async def answer(data: bytes, context: Any) -> bytes:
        return data

    handler: Any = grpc.unary_unary_rpc_method_handler(answer)
    service, _, name = METHOD[1:].partition("/")
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {name: handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


async def _call(address: str, seconds: float) -> None:
    count = 0

    async def call_on(until: float) -> None:
        nonlocal count
        while asyncio.get_running_loop().time() < until:
            await call(b"x" * 200)
            count += 1

    async with grpc.aio.insecure_channel(address) as channel:
        call: Any = channel.unary_unary(METHOD)
        await call(b"")
        print("ready", flush=True)
        async with asyncio.TaskGroup() as group:
            until = asyncio.get_running_loop().time() + seconds
            for _ in range(CALLERS):
                group.create_task(call_on(until))
    print(count, flush=True)


def main() -> None:
    """Measure, or be one of what is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--release", default="grpcio", help="beside the locked one; grpcio==1.85.1")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--call", metavar="ADDRESS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(_serve())
    elif options.call:
        asyncio.run(_call(options.call, options.seconds))
    else:
        _compare(options.release, options.rounds, options.seconds)


def _compare(release: str, rounds: int, seconds: float) -> None:
    with tempfile.TemporaryDirectory(prefix="breadbox-bench-") as folder:
        folders: dict[str, Path] = {}
        for requirement in (f"grpcio=={locked_version()}", release):
            place = Path(folder) / str(len(folders))
            folders[_install(requirement, place)] = place
        if len(folders) == 1:
            print("the locked grpcio is the newest")
            return
        found: dict[str, list[float]] = {version: [] for version in folders}
        for number in range(rounds):
            for version in sorted(folders, reverse=bool(number % 2)):
                found[version].append(cost_us(folders[version], seconds))
    medians = {version: statistics.median(each) for version, each in found.items()}
    locked, newer = medians
    ratio = medians[newer] / medians[locked]
    for version, median_us in medians.items():
        print(f"grpcio {version}: {median_us:.0f} µs of the server's processor per call")
    verdict = "as cheap: the bound in pyproject.toml may go" if ratio <= AS_CHEAP else "dearer"
    print(f"{newer} takes {ratio:.2f} times what {locked} does: {verdict}")


if __name__ == "__main__":
    main()
