"""Take pictures of the console from real runs: CartPole, an Atari game, 640x360 frames, tokens.

Usage: python scripts/render_console.py [--seconds 60] [--only NAME]

Starts a server, agents, and consoles of its own, and writes docs/images/console-*.png. Needs the
extras `dev` and `demo`, and Chromium.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import ale_py
import gymnasium
import numpy as np
from PIL import Image, ImageDraw
from playwright.sync_api import Page, sync_playwright

import breadbox
from breadbox.model.types import BufferConfig, SchemaPolicy

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
BREADBOX = [sys.executable, "-m", "breadbox.cli.main"]
HEIGHT, WIDTH = 360, 640
WORDS = re.findall(r"[A-Za-z'-]+[,.;]?", (ROOT / "docs" / "glossary.md").read_text())
VOCABULARY = sorted(set(WORDS))


def cartpole(observation: Any, step: int) -> Any:
    """A renderer: the cart and its pole, of CartPole's four numbers."""
    del step
    position, _, angle, _ = map(float, observation)
    image = Image.new("RGB", (480, 240), "#f7f3ec")
    draw = ImageDraw.Draw(image)
    x, y = 240 + position * 90, 190
    draw.line((0, y + 14, 480, y + 14), fill="#b9b2a6", width=2)
    draw.rectangle((x - 34, y - 14, x + 34, y + 12), fill="#3b3835")
    tip = (x + 130 * np.sin(angle), y - 14 - 130 * np.cos(angle))
    draw.line((x, y - 14, *tip), fill="#c0671c", width=10)
    return np.asarray(image)


def words(token_ids: Sequence[int]) -> list[str]:
    """A detokenizer: words of the glossary."""
    return [f"{VOCABULARY[each]} " for each in token_ids]


def play_atari(client: breadbox.Client) -> None:
    """Breakout, by a policy that follows the ball for as long as it can."""
    gymnasium.register_envs(ale_py)
    env = gymnasium.make("ALE/Breakout-v5", frameskip=4)
    rng = np.random.default_rng(7)
    with breadbox.StepWriter(client, worker_id="atari", buffer="atari") as writer:
        for episode in range(2):
            obs, _ = env.reset(seed=episode)
            for step in range(600):
                red = obs[93:189, 8:152, 0] > 150
                ball, paddle = (
                    red[:, :].any(0).nonzero()[0],
                    (obs[190, 8:152, 0] > 150).nonzero()[0],
                )
                aim = (ball.mean() - paddle.mean()) if ball.size and paddle.size else 0.0
                action = 1 if step % 40 == 0 else 2 if aim > 3 else 3 if aim < -3 else 0
                action = int(rng.integers(4)) if rng.random() < 0.1 else action
                next_obs, reward, terminated, truncated, _ = env.step(action)
                truncated = truncated or step == 599
                writer.add(
                    obs[None],
                    np.array([action]),
                    [float(reward)],
                    next_obs[None],
                    [terminated],
                    [truncated],
                    value=np.array([np.tanh(aim / 40)], np.float32),
                )
                obs = next_obs
                if terminated or truncated:
                    break


def landscape(step: int, heading: float) -> Any:
    """A frame of hills under a sky, 640x360, as from a walker's eyes."""
    rows, columns = np.mgrid[0:HEIGHT, 0:WIDTH].astype(np.float32)
    angle = columns / 160 + heading
    horizon = 190 + 38 * np.sin(angle) + 14 * np.sin(3.1 * angle + 1)
    depth = np.clip((rows - horizon) / (HEIGHT - horizon), 0, 1)
    noise = np.sin(columns * 0.31 + heading * 90) * np.sin(rows * 0.27 + step * 0.5) * 14
    ground = np.stack([60 + 70 * depth, 120 + 60 * depth, 45 + 20 * depth], -1) + noise[..., None]
    sky = np.stack([130 + rows * 0.35, 175 + rows * 0.25, 235 - rows * 0.05], -1)
    return np.where((rows < horizon)[..., None], sky, ground).clip(0, 255).astype(np.uint8)


def play_landscape(client: breadbox.Client, steps: int = 192) -> None:
    """An agent that walks and looks around, with camera, compass and an inventory."""
    rng = np.random.default_rng(3)
    with breadbox.StepWriter(client, worker_id="walker", buffer="walk") as writer:
        heading = 0.0
        obs = {"camera": landscape(0, heading), "compass": np.zeros(2, np.float32)}
        for step in range(1, steps + 1):
            turn = float(np.clip(rng.normal(0.02, 0.03), -0.1, 0.1))
            heading += turn
            compass = np.array([np.sin(heading), np.cos(heading)], np.float32)
            following = {"camera": landscape(step, heading), "compass": compass}
            writer.add(
                {name: leaf[None] for name, leaf in obs.items()},
                np.array([[turn, 1.0]], np.float32),
                [float(step % 48 == 0)],
                {name: leaf[None] for name, leaf in following.items()},
                [False],
                [step == steps],
                extras={"task": np.array(["explore"]), "tag": np.array(["hills"])},
                log_prob=np.array([-((turn - 0.02) ** 2) / 0.0018], np.float32),
            )
            obs = following


def write_tokens(client: breadbox.Client) -> None:
    """Sequences of a model of word pairs, whose later half a newer version wrote."""
    rng = np.random.default_rng(5)
    ids = np.array([VOCABULARY.index(each) for each in WORDS])
    after: dict[int, Any] = {}
    for one, next_one in pairwise(ids):
        after.setdefault(int(one), []).append(int(next_one))
    client.service.publish_model("run", 1, buffer="tokens")
    for index in range(6):
        token, tokens, log_probs = int(rng.choice(ids)), [], []
        for _ in range(128):
            choices = after.get(token, [int(rng.choice(ids))])
            log_probs.append(-float(np.log(len(choices) / choices.count(choices[0]))))
            token = int(rng.choice(choices))
            tokens.append(token)
        ended = np.arange(128) == 127
        client.append(
            breadbox.Fragment(
                worker_id="writer",
                fragment_index=index,
                session_id="run",
                model_version_min=0,
                model_version_max=1,
                model_version=(np.arange(128) >= 64).astype(np.int64),
                obs=np.array([0, *tokens[:-1]], np.int64),
                action=np.array(tokens, np.int64),
                reward=np.where(ended, index / 6, 0).astype(np.float32),
                terminated=ended,
                truncated=np.zeros(128, np.bool_),
                first=np.arange(128) == 0,
                episode_id=np.full(128, index, np.int64),
                next_obs=np.int64(tokens[-1]),
                log_prob=np.array(log_probs, np.float32),
            ),
            buffer="tokens",
        )


@contextmanager
def running(*arguments: str, awaited: str = "") -> Iterator[str]:
    """Run a command inside the block; gives its first line if one is awaited."""
    out = subprocess.PIPE if awaited else subprocess.DEVNULL
    process = subprocess.Popen(
        [*BREADBOX, *arguments], stdout=out, text=True, cwd=Path(__file__).parent
    )
    try:
        line = ""
        while awaited and awaited not in line:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, f"breadbox {arguments[0]} ended"
        yield line
    finally:
        process.terminate()
        process.wait(30)


def shoot(page: Page, name: str, *, height: int = 900) -> None:
    """Write a picture of the page, in 256 colours at most."""
    page.set_viewport_size({"width": 1400, "height": height})
    page.wait_for_timeout(1500)
    taken = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    path = IMAGES / f"console-{name}.png"
    taken.quantize(192, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")


def look(page: Page, url: str, seconds: float, only: str) -> None:
    """Take each picture."""
    if only in ("", "cartpole"):
        page.goto(f"{url}#/overview/default")
        page.get_by_role("region", name="Buffer default").wait_for()
        page.wait_for_timeout(seconds * 1000)
        shoot(page, "overview", height=1300)
        page.goto(f"{url}#/episodes/default")
        page.get_by_role("link", name="#").first.wait_for()
        shoot(page, "episodes", height=800)
        # A learner that is fast uses episodes up; those of one worker are kept from here on.
        page.goto(f"{url}#/episodes/default?worker=cart-0")
        page.wait_for_timeout(20_000)
        page.get_by_role("button", name="Worst that can be watched").click()
        page.wait_for_timeout(2000)
        page.get_by_role("link", name="#").first.click()
        page.get_by_role("img", name="(rendered)").wait_for()
        for _ in range(9):  # Within the frames that are loaded.
            page.keyboard.press("ArrowRight")
        shoot(page, "cartpole", height=1100)
        page.goto(f"{url}#/learning/default")
        page.get_by_text("Return of episodes").wait_for()
        page.wait_for_timeout(12_000)
        shoot(page, "learning", height=1100)
    for buffer, name in (("atari", "atari"), ("walk", "640x360"), ("tokens", "tokens")):
        if only not in ("", name):
            continue
        page.goto(f"{url}#/episodes/{buffer}")
        page.get_by_role("link", name="#").first.click()
        page.get_by_label("At the cursor").get_by_text("reward").wait_for()
        if buffer == "tokens":
            page.get_by_role("button", name="Show actions as tokens").click()
        else:
            for _ in range(9):
                page.keyboard.press("Shift+ArrowRight")
        shoot(page, name, height=1100)


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="for which CartPole is learnt")
    parser.add_argument("--only", default="", help="cartpole, atari, 640x360 or tokens")
    chosen = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        breadbox.local_server(uses_max=3, staleness_max=6) as client,
        sync_playwright() as playwright,
    ):
        for buffer in ("atari", "walk", "tokens"):
            client.create_buffer(
                buffer, BufferConfig(capacity_chunks=64, schema=SchemaPolicy.RAGGED)
            )
            client.start_session("run", buffer=buffer)
        to_server = ("--server", client.address)
        views = ("--renderer", "render_console:cartpole")
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page()
        console = ("console", *to_server, "--console-listen", "127.0.0.1:0")
        if chosen.only in ("", "cartpole"):
            run_dir = ("--run-dir", f"{folder}/run")
            with (
                running("learn", *to_server, *run_dir),
                running(
                    "rollout",
                    *to_server,
                    "--env",
                    "CartPole-v1",
                    "--num-envs",
                    "8",
                    "--worker-name",
                    "cart",
                ),
                running(*console, *views, awaited="console:") as line,
            ):
                look(page, line.split()[1], chosen.seconds, "cartpole")
        tokens = ("--detokenizer", "render_console:words")
        with running(*console, *tokens, awaited="console:") as line:
            play_atari(client)
            play_landscape(client)
            write_tokens(client)
            for name in ("atari", "640x360", "tokens"):
                if chosen.only in ("", name):
                    look(page, line.split()[1], chosen.seconds, name)
        browser.close()


if __name__ == "__main__":
    main()
