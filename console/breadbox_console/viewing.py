"""Load what a page shows of one episode: its arrays as series, pictures, texts and files."""

import asyncio
import io
import math
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from breadbox.model.errors import PayloadMissingError, ReplayBufferError
from breadbox.model.fragment import Fragment
from breadbox.model.trees import field_of, is_within, leaves, row
from breadbox.model.types import ArrayType, FragmentReference
from breadbox.payload.dtypes import BFLOAT16, parse_dtype
from breadbox_console.arrays import NUMBERS, finite, numbers, plain, text_of
from breadbox_console.episodes import Episode, SeenFragment, Span, key_of
from breadbox_console.overview import BufferHistory, ChunkLife
from breadbox_console.watch import VECTOR_MAX, WatchedBuffer

IMAGE_SIDE_MIN: Final = 8
"""Smallest side of an array that counts as an image."""
POINTS_MAX: Final = 8000
"""Most steps of an episode that series cover; longer ones are thinned out."""
WINDOW_STEPS: Final = 4
"""Steps whose frames are loaded together: the first of them waits for all."""
CACHE_BYTES: Final = 256 * 2**20
"""Most bytes of loaded frames that are kept."""
STEP_BYTES_MAX: Final = 64 * 2**20
"""Most bytes of an array's step that is shown."""
DOWNLOADS_MAX: Final = 2
"""Files that are written at a time; the next download waits."""
VIDEO_FPS: Final = 30
_LANE: Final = ("chunk_id", "version_min", "version_max", "appended_at", "staleness")
PNG_BYTES_MAX: Final = 256 * 2**10
"""Most bytes of pixels that are sent as they are: PNG takes 20 times as long as JPEG."""
JPEG_SIDE_MAX: Final = 65_000

Pixels = NDArray[np.uint8]
Renderer = Callable[[Any, int], Any]
"""Makes a picture, uint8[H, W, 3], of an observation (a tree without a step axis) and its step."""
Detokenizer = Callable[[Sequence[int]], Sequence[str]]
"""Makes the text of each token."""


Parts = Iterator[tuple[Span, Fragment]]
"""Fragments of an episode, in order, and its steps in each."""
_Taken = TypeVar("_Taken")


class GoneError(Exception):
    """Payloads of the episode have left the buffer."""


class CannotError(Exception):
    """The episode has values that a file cannot hold."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """Functions of the user that know the environment."""

    renderer: Renderer | None = None
    detokenizer: Detokenizer | None = None


def kind_of(array: ArrayType) -> str:
    """Return how an array [T, ...] is shown: image, picture, lines, text, or "" for not at all."""
    shape, stored = array.shape[1:], parse_dtype(array.type_name)
    if not 0 < math.prod(shape) * stored.itemsize <= STEP_BYTES_MAX:
        return ""
    if stored.kind in "US":
        return "text" if not shape else ""
    if stored.kind not in NUMBERS:
        return ""
    if is_image(shape):
        return "image"
    return "lines" if math.prod(shape) <= VECTOR_MAX else "picture"


def type_text(array: ArrayType) -> str:
    """Return the type of a step of an array in words, such as "uint8 210×160×3"."""
    shape = "×".join(map(str, array.shape[1:]))
    is_coded = array.type_name != BFLOAT16
    return f"{np.dtype(array.type_name).name if is_coded else array.type_name} {shape}".strip()


def is_image(shape: tuple[int, ...]) -> bool:
    """Return True if an array of this shape is an image: [H, W], [H, W, C] or [C, H, W]."""
    if len(shape) == 3 and 1 <= shape[2] <= 4:
        shape = shape[:2]
    elif len(shape) == 3 and 1 <= shape[0] <= 4:
        shape = shape[1:]
    return len(shape) == 2 and min(shape) >= IMAGE_SIDE_MIN


def as_pixels(array: NDArray[Any]) -> Pixels:
    """Return one image [H, W], [H, W, C] or [C, H, W] as uint8[H, W] or uint8[H, W, 3].

    Of two or four channels, which are frames stacked in time, the last is shown. Numbers that are
    no bytes are spread over black to white.
    """
    if array.ndim == 3 and array.shape[2] > 4:
        array = np.moveaxis(array, 0, 2)
    if array.ndim == 3 and array.shape[2] != 3:
        array = array[:, :, -1]
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array)
    with np.errstate(over="ignore"):
        values = np.nan_to_num(array.astype(np.float32)).astype(np.float64)
    low, high = float(values.min()), float(values.max())
    return ((values - low) * (255.0 / ((high - low) or 1.0))).astype(np.uint8)


def encoded(pixels: Pixels) -> bytes:
    """Encode a picture, fast rather than small: as PNG, or a large one as JPEG."""
    out = io.BytesIO()
    is_png = pixels.nbytes <= PNG_BYTES_MAX or max(pixels.shape) > JPEG_SIDE_MAX
    kind = "PNG" if is_png else "JPEG"
    Image.fromarray(pixels).save(out, kind, compress_level=1, quality=95, subsampling=0)
    return out.getvalue()


class Viewer:
    """Loads parts of episodes for pages, and keeps the latest."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self._cache: OrderedDict[tuple[Any, ...], Fragment] = OrderedDict()
        self._under_way: WeakValueDictionary[tuple[Any, ...], asyncio.Lock] = WeakValueDictionary()
        self._cache_bytes = 0
        self._loading = asyncio.Semaphore(4)
        self._downloads = asyncio.Semaphore(DOWNLOADS_MAX)

    async def describe(self, buffer: WatchedBuffer, episode: Episode) -> dict[str, Any]:
        """Return all of an episode but its frames: streams, series, ends and lanes."""
        streams = [
            {"path": path, "kind": kind, "type": type_text(each)}
            for path, each in episode.spans[-1].fragment.types.items()
            if path.split(".")[0] not in ("next_obs", "in_state", "final_obs", "final_obs_step")
            and (kind := kind_of(each))
        ]
        if self._hooks.renderer is not None:
            streams.insert(0, {"path": "(rendered)", "kind": "image", "type": "renderer"})
        series = [each["path"] for each in streams if each["kind"] in ("lines", "text")]
        found: dict[str, Any] = {"streams": streams, "series": {}, "texts": {}, "tokens": []}
        problems = await self._add_series(found, buffer, episode, series)
        found |= {"now": time.time(), "lanes": lanes(buffer, episode, problems)}
        rewards = _thinned(np.concatenate(episode.rewards))
        return found | episode.row() | {"seen": episode.seen_count, "rewards": rewards}

    async def frame(self, buffer: WatchedBuffer, episode: Episode, path: str, step: int) -> bytes:
        """Return the picture of a stream at a step of the episode.

        Raises:
            GoneError: The payload has left the buffer.
            KeyError: There is no such stream or step.
        """
        span, at = locate(episode, step)
        start = at - at % WINDOW_STEPS
        stop = min(start + WINDOW_STEPS, span.fragment.step_count)
        is_rendered = path == "(rendered)" and self._hooks.renderer is not None
        if not is_rendered:
            _demand_kind(span, path, "image")
        columns = ["obs"] if is_rendered else [path]
        fragment = buffer.kept.get(span.fragment.key)
        if fragment is None:
            fragment = await self._window(buffer, span.fragment, columns, (start, stop))
        else:
            start = 0
        if is_rendered and self._hooks.renderer is not None:
            observation = row(fragment.obs, at - start)
            made = await asyncio.to_thread(self._hooks.renderer, observation, step)
            return await asyncio.to_thread(encoded, as_pixels(np.asarray(made)))
        array = leaf_of(fragment, path)[at - start]
        return await asyncio.to_thread(lambda: encoded(as_pixels(array)))

    async def picture(self, buffer: WatchedBuffer, episode: Episode, path: str) -> bytes:
        """Return the picture of a wide array: a column for each step, a row for each element.

        Of many steps or elements some are left out.

        Raises:
            GoneError: A payload has left the buffer.
            KeyError: There is no such stream.
        """
        _demand_kind(episode.spans[-1], path, "picture")
        stride = -(-episode.seen_count // POINTS_MAX)

        def take(span: Span, fragment: Fragment) -> NDArray[Any]:
            steps = leaf_of(fragment, path)[span.start : span.stop : stride]
            return steps.reshape(len(steps), -1)[:, :: -(-steps[0].size // POINTS_MAX)]

        held = await self._load_held(buffer, episode, [path], take)
        parts = [each for each in held if not isinstance(each, Exception)]
        if len(parts) < len(held) or len({each.shape[1] for each in parts}) > 1:
            raise GoneError("some of the episode's fragments have left the buffer, or differ")
        flat = np.ascontiguousarray(np.concatenate(parts).T)
        return await asyncio.to_thread(lambda: encoded(as_pixels(flat)))

    async def download(
        self, buffer: WatchedBuffer, episode: Episode, suffix: str
    ) -> tuple[BinaryIO, int]:
        """Return a file with the episode, and its size: Parquet, a row a step, or images as MP4.

        One fragment at a time is loaded. At most `DOWNLOADS_MAX` files are written at a time.

        Raises:
            GoneError: A payload has left the buffer.
            KeyError: The episode has no images to make a film of.
            CannotError: The file cannot hold what the episode has.
        """
        loop, is_over = asyncio.get_running_loop(), threading.Event()

        def parts() -> Iterator[tuple[Span, Fragment]]:
            for span in episode.spans:
                if is_over.is_set():
                    raise GoneError("nobody waits for the file")
                load = self._load(buffer, span.fragment, None, None)
                yield span, asyncio.run_coroutine_threadsafe(load, loop).result()

        write = _write_parquet if suffix == ".parquet" else _write_video
        async with self._downloads:
            try:
                return await asyncio.to_thread(_written, write, episode, parts(), suffix)
            finally:
                is_over.set()

    # Loading ------------------------------------------------------------------------------------

    async def _add_series(
        self, found: dict[str, Any], buffer: WatchedBuffer, episode: Episode, paths: list[str]
    ) -> list[str]:
        """Add series and texts; return why each fragment could not be loaded, or ""."""
        paths = [*paths, "model_version"]

        def take(span: Span, fragment: Fragment) -> dict[str, NDArray[Any]]:
            return {
                path: column[span.start : span.stop]
                for path in paths
                if (column := _column_of(fragment, path)) is not None
            }

        held = await self._load_held(buffer, episode, paths, take)
        parts = [{} if isinstance(each, Exception) else each for each in held]
        for path in paths:
            model = next((each[path] for each in parts if path in each), None)
            if model is None:
                continue
            is_text, shape = model.dtype.kind in "US", model.shape[1:]
            steps = []
            for position, span in enumerate(episode.spans):
                # Fragments of one episode may differ, where the buffer takes any.
                own = parts[position].get(path)
                fits = own is not None and own.shape[1:] == shape
                if own is None or not fits or (own.dtype.kind in "US") != is_text:
                    own = np.full((span.stop - span.start, *shape), "" if is_text else np.nan)
                steps.append(own)
            column = np.concatenate(steps)
            if is_text:
                found["texts"][path] = [text_of(each) for each in column[:POINTS_MAX]]
                continue
            flat = column.reshape(len(column), math.prod(shape))
            found["series"][path] = [_thinned(flat[:, at]) for at in range(flat.shape[1])]
            if path == "action" and column.ndim == 1 and column.dtype.kind in "iu":
                found["tokens"] = await asyncio.to_thread(self._words, column[:POINTS_MAX])
        return [f"cannot be loaded: {each}" if isinstance(each, Exception) else "" for each in held]

    def _words(self, ids: NDArray[Any]) -> list[str]:
        """Return the text of each token, or nothing where the detokenizer does not know one."""
        try:
            return list(self._hooks.detokenizer(ids.tolist())) if self._hooks.detokenizer else []
        except (LookupError, TypeError, ValueError):
            return []

    async def _load_held(
        self,
        buffer: WatchedBuffer,
        episode: Episode,
        columns: list[str],
        take: Callable[[Span, Fragment], _Taken],
    ) -> list[_Taken | Exception]:
        """Return what `take` makes of each fragment of an episode, or why it cannot be loaded.

        Several are loaded at a time, and kept no longer.
        """

        async def load(span: Span) -> _Taken | Exception:
            try:
                return take(span, await self._load(buffer, span.fragment, columns, None))
            except (GoneError, KeyError, ReplayBufferError) as error:
                return error

        async with asyncio.TaskGroup() as tasks:
            loads = [tasks.create_task(load(span)) for span in episode.spans]
        return [each.result() for each in loads]

    async def _window(
        self,
        buffer: WatchedBuffer,
        fragment: SeenFragment,
        columns: list[str],
        steps: tuple[int, int],
    ) -> Fragment:
        """Return some steps of a fragment, from the cache or loaded into it, once for all."""
        key = (buffer, fragment.key, tuple(columns), steps)
        async with self._under_way.setdefault(key, asyncio.Lock()):
            kept = self._cache.get(key)
            if kept is not None:
                self._cache.move_to_end(key)
                return kept
            loaded = await self._load(buffer, fragment, columns, steps)
            self._cache[key] = loaded
            self._cache_bytes += loaded.size_bytes
            while self._cache_bytes > CACHE_BYTES and len(self._cache) > 1:
                _, dropped = self._cache.popitem(last=False)
                self._cache_bytes -= dropped.size_bytes
            return loaded

    async def _load(
        self,
        buffer: WatchedBuffer,
        fragment: SeenFragment,
        columns: list[str] | None,
        steps: tuple[int, int] | None,
    ) -> Fragment:
        kept = buffer.kept.get(fragment.key)
        if kept is not None and steps is None:
            return kept
        if columns is not None:
            found = [
                path for path in fragment.types if any(is_within(path, one) for one in columns)
            ]
            columns = [*found, *({"reward", "terminated", "truncated"} - {*found})]
        async with self._loading, self._reading(buffer, fragment) as reference:
            try:
                loaded = await buffer.client.load_fragments(
                    [reference], columns=columns, steps=steps
                )
            except PayloadMissingError as error:
                raise GoneError(str(error)) from error
            return loaded[0]

    @asynccontextmanager
    async def _reading(
        self, buffer: WatchedBuffer, fragment: SeenFragment
    ) -> AsyncIterator[FragmentReference]:
        """Lease a fragment's chunk inside the block. Raises GoneError if it has left the buffer."""
        after = fragment.chunk_id - 1
        async with buffer.reading(after if after >= 0 else None, chunk_count_max=1) as read:
            for each in read.fragments:
                if key_of(each) == fragment.key:
                    yield each
                    return
        raise GoneError(f"fragment {fragment.key.fragment_index} has left the buffer")


def lanes(buffer: WatchedBuffer, episode: Episode, problems: Sequence[str]) -> list[dict[str, Any]]:
    """Return the life of each fragment of an episode, by the core's rules and what was seen.

    `problems`: why each fragment could not be loaded, or "".
    """
    history = buffer.history
    now_version = history.looks[-1][1].model_version
    found = []
    step = 0
    for span, problem in zip(episode.spans, problems, strict=True):
        each = span.fragment
        behind = None if now_version is None else now_version - each.version_min
        life = history.lives.get(each.chunk_id, ChunkLife())
        found.append(
            {name: getattr(each, name) for name in _LANE}
            | {
                "index": each.key.fragment_index,
                "step": step,
                "steps": span.stop - span.start,
                "staleness_now": behind,
                "grants": life.grants,
                "left_at": life.left_at,
                "is_held": history.is_held(each) and not problem,
                "is_missing": bool(problem),
                "fate": f"left: {life.why}" if life.why else _fate(history, each) or problem,
            }
        )
        step += span.stop - span.start
    return found


def _fate(history: BufferHistory, fragment: SeenFragment) -> str:
    """Return why a fragment is not held, where the server did not report it, or "" while it is."""
    if history.is_held(fragment):
        return ""
    is_current = fragment.key.session_id == history.looks[-1][1].session_id
    return "left before the console could see why" if is_current else "left: its session ended"


def locate(episode: Episode, step: int) -> tuple[Span, int]:
    """Return the span that a step of an episode is in, and its place in the fragment.

    Raises:
        KeyError: The episode has no such step.
    """
    if step >= 0:
        for span in episode.spans:
            count = span.stop - span.start
            if step < count:
                return span, span.start + step
            step -= count
    raise KeyError(f"no step {step}")


def leaf_of(fragment: Fragment, path: str) -> NDArray[Any]:
    """Return the array of a path, as it can be shown.

    Raises:
        KeyError: The fragment has no such array.
    """
    field, _, _ = path.partition(".")
    for found, leaf in leaves(getattr(fragment, field.partition("[")[0], None), field):
        if found == path:
            return plain(leaf)
    raise KeyError(path)


def _column_of(fragment: Fragment, path: str) -> NDArray[Any] | None:
    if path == "model_version" and fragment.model_version is None:
        return np.full(fragment.step_count, fragment.model_version_min)
    try:
        return leaf_of(fragment, path)
    except KeyError:
        return None


def _demand_kind(span: Span, path: str, kind: str) -> None:
    types = span.fragment.types
    if path not in types or kind_of(types[path]) != kind:
        raise KeyError(f"{path} is no {kind}")


def _written(
    write: Callable[[Path, Episode, Parts], None], episode: Episode, parts: Parts, suffix: str
) -> tuple[BinaryIO, int]:
    """Return a file that has no name any more, so that it goes with its last reader."""
    with tempfile.TemporaryDirectory(prefix="breadbox-console-") as folder:
        path = Path(folder) / f"episode{suffix}"
        write(path, episode, parts)
        return path.open("rb"), path.stat().st_size


def _write_parquet(path: Path, episode: Episode, parts: Parts) -> None:
    from breadbox_offline.errors import OfflineDataError
    from breadbox_offline.files.writers import write_episodes
    from breadbox_offline.service import FragmentReader

    reader = FragmentReader(yields_parts=True)
    wanted = f"{episode.session_id}/{episode.worker_id}/{episode.episode_id}"
    found = (each for _, fragment in parts for each in reader.add(fragment) if each.id == wanted)
    try:
        write_episodes(found, path)
    except OfflineDataError as error:
        error.file = None  # Its folder is the console's own.
        raise CannotError(str(error)) from error


def _write_video(path: Path, episode: Episode, parts: Parts) -> None:
    from breadbox_rollout.recording.media import VideoWriter, as_frame

    types = episode.spans[0].fragment.types
    stream = next(
        (each for each in types if field_of(each) == "obs" and kind_of(types[each]) == "image"),
        None,
    )
    if stream is None:
        raise KeyError("the episode has no images")
    writer = VideoWriter(path, VIDEO_FPS, crf=18)
    try:
        for span, fragment in parts:
            for image in leaf_of(fragment, stream)[span.start : span.stop]:
                writer.add(as_frame(as_pixels(image)))
    finally:
        writer.close()


def _thinned(column: NDArray[Any]) -> dict[str, Any]:
    """Return at most `POINTS_MAX` values as JSON knows them, and how many steps lie between two."""
    stride = max(1, -(-len(column) // POINTS_MAX))
    return {"stride": stride, "values": [finite(each) for each in numbers(column[::stride])]}
