"""What the console costs, and how fast it is: `python -m bench.console_cost [--minutes 1]`.

A server with a steady producer and learner; ten pages open and closed in turns. Prints the server's
processor time and the latencies of both with and without pages, the time from an append to its
row on a page, the time from a key press to the next frame of an episode of 640x360, and a page's
memory over time. Needs the extra `dev`, and Chromium.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil
from playwright.sync_api import Page, sync_playwright

import breadbox
from breadbox.model.types import BufferConfig

PAGES = 10
RATE = 50.0
"""Fragments appended per second, and fetched in batches of 8."""
FRAME_STEPS = 1000


def fragment(
    index: int, worker: str = "w0", *, steps: int = 32, obs: Any = None
) -> breadbox.Fragment:
    """A fragment that ends its episode, of 16 numbers a step."""
    last = np.arange(steps) == steps - 1
    obs = np.full((steps, 16), index, np.float32) if obs is None else obs
    return breadbox.Fragment(
        worker_id=worker,
        fragment_index=index,
        session_id="run",
        model_version_min=0,
        model_version_max=0,
        obs=obs,
        action=np.zeros(steps, np.int64),
        reward=np.ones(steps, np.float32),
        terminated=last,
        truncated=np.zeros(steps, np.bool_),
        first=np.arange(steps) == 0,
        episode_id=np.full(steps, index, np.int64),
        next_obs=obs[-1],
    )


class Load:
    """A producer and a learner at a steady rate, each call of which is timed."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._stop = threading.Event()
        self.append_ms: list[float] = []
        self.fetch_ms: list[float] = []
        self._threads = [threading.Thread(target=each) for each in (self._produce, self._learn)]

    def __enter__(self) -> "Load":
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for each in self._threads:
            each.join()

    def taken(self) -> tuple[list[float], list[float]]:
        """Return the latencies since the last call, of appends and of fetches."""
        found = self.append_ms, self.fetch_ms
        self.append_ms, self.fetch_ms = [], []
        return found

    def _produce(self) -> None:
        with breadbox.connect(self._address) as client:
            index = 0
            while not self._stop.is_set():
                started = time.perf_counter()
                client.append(fragment(index))
                self.append_ms.append(1000 * (time.perf_counter() - started))
                index += 1
                self._stop.wait(max(0, 1 / RATE - (time.perf_counter() - started)))

    def _learn(self) -> None:
        with breadbox.connect(self._address) as client:
            while not self._stop.is_set():
                if client.get_buffer().state.chunk_count < 64:
                    self._stop.wait(0.1)
                    continue
                started = time.perf_counter()
                with client.fetch(fragment_count=8, max_wait_s=5):
                    pass
                self.fetch_ms.append(1000 * (time.perf_counter() - started))
                self._stop.wait(8 / RATE)


class Pages:
    """What open pages ask of a console, half of overviews and half of lists, without a browser.

    A browser beside them would take the processor time that is measured.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._listen if at % 2 else self._list) for at in range(PAGES)
        ]

    def __enter__(self) -> "Pages":
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for each in self._threads:
            each.join()

    def _listen(self) -> None:
        with urllib.request.urlopen(f"{self._url}api/overview") as news:
            while not self._stop.is_set():
                news.readline()

    def _list(self) -> None:
        while not self._stop.wait(1.0):
            with urllib.request.urlopen(f"{self._url}api/buffers/default/episodes") as answer:
                answer.read()


@contextmanager
def console(address: str) -> Iterator[str]:
    """Serve the console inside the block; gives its URL."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "breadbox.cli.main", "console", "--server", address),
            *("--console-listen", "127.0.0.1:0"),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split()[1]
    finally:
        process.terminate()
        process.wait(30)


def cost(address: str, server: psutil.Process, *, rounds: int, round_s: float) -> None:
    """Compare rounds with ten open pages with rounds without a console, in turns."""
    found: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}

    def measure(load: Load, *, is_open: bool) -> None:
        load.taken()
        before, started = sum(server.cpu_times()[:2]), time.monotonic()
        time.sleep(round_s)
        used = (sum(server.cpu_times()[:2]) - before) / (time.monotonic() - started)
        append_ms, fetch_ms = load.taken()
        found[is_open].append((used, statistics.median(append_ms), statistics.median(fetch_ms)))

    with Load(address) as load:
        time.sleep(3)
        for _ in range(rounds):
            measure(load, is_open=False)
            with console(address) as url, Pages(url):
                time.sleep(3)
                measure(load, is_open=True)
    rows = (("server, of a core", 0), ("append, median ms", 1), ("fetch, median ms", 2))
    for name, place in rows:
        without, opened = ([each[place] for each in found[is_open]] for is_open in (False, True))
        pairs = [b / a if place else b - a for a, b in zip(without, opened, strict=True)]
        print(
            f"{name}: {statistics.median(without):.3f}, with {PAGES} pages "
            f"{statistics.median(opened):.3f}; {'ratio' if place else 'more'} by round "
            f"{', '.join(f'{each:.3f}' for each in pairs)}; median {statistics.median(pairs):.3f}"
        )


def visible(client: breadbox.Client, page: Page, url: str) -> None:
    """Time from the call of an append to its row on the list of episodes."""
    page.goto(f"{url}#/episodes/default")
    page.get_by_text("episodes seen").wait_for()
    taken = []
    for at in range(10):
        started = time.monotonic()
        client.append(fragment(0, f"seen-{at}"))
        page.get_by_role("link", name=f"seen-{at} #").wait_for()
        taken.append(time.monotonic() - started)
        time.sleep(0.37)
    print(f"append to row: median {statistics.median(taken):.2f} s, most {max(taken):.2f} s")


def scrub(client: breadbox.Client, page: Page, url: str) -> None:
    """Time from a key press to the next frame, over an episode of 640x360."""
    client.create_buffer("film", BufferConfig(capacity_chunks=64))
    client.start_session("run", buffer="film")
    rng = np.random.default_rng(1)
    texture = rng.integers(0, 60, (360, 640, 3), np.uint8)
    for index in range(FRAME_STEPS // 50):
        frames = np.stack([np.roll(texture, 4 * (50 * index + at), 1) for at in range(50)])
        part = fragment(index, "film", steps=50, obs=frames)
        is_end = index == FRAME_STEPS // 50 - 1
        part.terminated[-1] = is_end
        part.first[0] = index == 0
        part.episode_id[:] = 0
        client.append(part, buffer="film")
    page.goto(f"{url}#/episodes/film")
    page.get_by_text("1,000").first.wait_for()
    page.get_by_role("link", name="film #0").click()
    page.get_by_text(f"step 1 of {FRAME_STEPS}").wait_for()
    page.wait_for_timeout(2000)
    taken = page.evaluate(
        """async () => {
          const pause = (ms) => new Promise((done) => setTimeout(done, ms));
          const slider = document.querySelector("input[type=range]");
          const on = new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true });
          const next = () => document.body.dispatchEvent(on);
          const far = (at) => {
            slider.value = (377 * at) % slider.max;
            slider.dispatchEvent(new Event("input"));
          };
          const timed = async (move, count, pause_ms) => {
            const taken = [];
            for (let at = 1; at <= count; at += 1) {
              const started = performance.now();
              move(at);
              while (document.querySelector("figure[aria-busy]")) await pause(0);
              await document.querySelector("figure img").decode();
              taken.push(performance.now() - started);
              await pause(pause_ms);
            }
            return taken;
          };
          return { next: await timed(next, 300, 66), far: await timed(far, 50, 500) };
        }"""
    )
    for move, each in taken.items():
        each.sort()
        print(
            f"{move} frame of 640x360: median {each[len(each) // 2]:.0f} ms, "
            f"95 % {each[int(0.95 * len(each))]:.0f} ms, most {each[-1]:.0f} ms"
        )


def memory(address: str, page: Page, url: str, minutes: float) -> None:
    """Watch a page's memory while much happens."""
    page.goto(f"{url}#/overview")
    session = page.context.new_cdp_session(page)
    sizes = []
    with Load(address):
        for _ in range(max(2, int(minutes * 6))):
            page.wait_for_timeout(10_000)
            session.send("HeapProfiler.collectGarbage")
            sizes.append(page.evaluate("performance.memory.usedJSHeapSize") / 2**20)
    print(f"a page's memory over {minutes:g} min: {', '.join(f'{each:.1f}' for each in sizes)} MiB")


def main() -> None:
    """Measure all of it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-s", type=float, default=15.0)
    parser.add_argument("--minutes", type=float, default=10.0, help="of a page's memory")
    chosen = parser.parse_args()
    with (
        breadbox.local_server(capacity_chunks=1024) as client,
        sync_playwright() as playwright,
    ):
        client.start_session("run")
        server = next(iter(psutil.Process().children()))
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--no-sandbox", "--enable-precise-memory-info"],
        )
        print(f"server: {' '.join(server.cmdline()[:5])}")
        with console(client.address) as url:
            page = browser.new_page()
            visible(client, page, url)
            scrub(client, page, url)
        cost(client.address, server, rounds=chosen.rounds, round_s=chosen.round_s)
        with console(client.address) as url:
            memory(client.address, browser.new_page(), url, chosen.minutes)
        browser.close()


if __name__ == "__main__":
    main()
