"""Records real frames, Atari games from ale-py, and tries every codec on them.

`python -m bench.frames` plays Pong, Breakout and Seaquest at random for a while and prints, per
game and codec, what it saves and how fast it encodes and decodes.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from breadbox.payload.codecs import decode_into, encode, parse_codec

GAMES = ("Pong", "Breakout", "Seaquest")
CODECS = ("raw", "lz4", "zstd:1", "zstd:3", "zstd:9", "h264", "h264:23")

_WARM_UP_STEPS = 200


@dataclass(frozen=True)
class Trial:
    """What one codec made of one recording."""

    game: str
    frames: str
    codec: str
    ratio: float
    """Encoded bytes to raw bytes."""
    encode_mb_per_s: float
    decode_mb_per_s: float
    error: float
    """Mean absolute difference per byte; 0 for lossless."""


def record(game: str, *, steps: int, seed: int = 0) -> dict[str, NDArray[np.uint8]]:
    """Play at random; uint8 frames as users send them: RGB[T, 210, 160, 3] and grey[T, 84, 84]."""
    import ale_py
    import gymnasium

    gymnasium.register_envs(ale_py)
    environment = gymnasium.make(f"ALE/{game}-v5", frameskip=4)
    rng = np.random.default_rng(seed)
    assert isinstance(environment.action_space, gymnasium.spaces.Discrete)
    action_count = int(environment.action_space.n)
    environment.reset(seed=seed)
    colour = []
    for step in range(_WARM_UP_STEPS + steps):
        action = rng.integers(action_count)
        frame, _, terminated, truncated, _ = environment.step(action)
        if step >= _WARM_UP_STEPS:
            colour.append(frame)
        if terminated or truncated:
            environment.reset()
    environment.close()
    return {"rgb 210x160": np.stack(colour), "grey 84x84": np.stack([*map(_small_grey, colour)])}


def trials(recordings: Mapping[str, Mapping[str, NDArray[np.uint8]]]) -> Iterator[Trial]:
    """Try every codec on every recording."""
    for game, variants in recordings.items():
        for name, frames in variants.items():
            for codec in CODECS:
                yield _try(game, name, frames, codec)


def _try(game: str, name: str, frames: NDArray[np.uint8], codec: str) -> Trial:
    start = time.perf_counter()
    encoded = encode(frames, "|u1", parse_codec(codec))
    encode_s = time.perf_counter() - start
    decoded = np.empty_like(frames)
    start = time.perf_counter()
    decode_into(decoded, encoded.buffer, encoded.codec, encoded.parameters)
    decode_s = time.perf_counter() - start
    megabytes = frames.nbytes / 1e6
    return Trial(
        game=game,
        frames=name,
        codec=codec,
        ratio=len(encoded.buffer) / frames.nbytes,
        encode_mb_per_s=megabytes / max(encode_s, 1e-9),
        decode_mb_per_s=megabytes / max(decode_s, 1e-9),
        error=float(np.abs(frames.astype(np.int16) - decoded).mean()),
    )


def _small_grey(frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """84x84 by averaging, as the usual Atari preprocessing does."""
    grey: Any = frame @ np.array([0.299, 0.587, 0.114])
    rows = np.array_split(grey, 84, axis=0)
    columns = [np.array_split(row.mean(axis=0), 84) for row in rows]
    return np.array([[cell.mean() for cell in row] for row in columns]).astype(np.uint8)


@click.command()
@click.option("--steps", default=128, show_default=True, help="Frames per game.")
@click.option("--save", type=click.Path(path_type=Path), help="Write the frames to this .npz too.")
def main(steps: int, save: Path | None) -> None:
    """Record Atari frames and try every codec on them."""
    recordings = {game: record(game, steps=steps) for game in GAMES}
    if save is not None:
        arrays: dict[str, Any] = {
            f"{game} {name}": array
            for game, each in recordings.items()
            for name, array in each.items()
        }
        np.savez_compressed(save, **arrays)
    table = Table("game", "frames", "codec", "size", "encode MB/s", "decode MB/s", "mean error")
    for trial in trials(recordings):
        table.add_row(
            trial.game,
            trial.frames,
            trial.codec,
            f"{trial.ratio:.1%}",
            f"{trial.encode_mb_per_s:,.0f}",
            f"{trial.decode_mb_per_s:,.0f}",
            f"{trial.error:.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
