"""The pages, and the questions they ask. Nothing here writes to the service."""

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from breadbox.model.errors import PermissionDeniedError, ReplayBufferError, UnauthenticatedError
from breadbox_console.access import COOKIE, SESSION_S, Access
from breadbox_console.episodes import NAMES_MAX, Episode, Query, histogram, learning_points
from breadbox_console.viewing import CannotError, GoneError, Viewer
from breadbox_console.watch import Watch, WatchedBuffer

STATIC: Final = Path(__file__).parent / "static"
SORTS: Final[Mapping[str, Callable[[Episode], Any]]] = {
    "return": lambda each: each.return_sum,
    "length": lambda each: each.length,
    "version": lambda each: each.version_min,
    "seen": lambda each: each.last_seen_at,
    "episode": lambda each: (each.worker_id, each.episode_id),
}
"""Keys by which a list of ended episodes is sorted; by default, episodes that can be watched come
first, and the latest before the others."""
ROWS_MAX: Final = 200
"""Episodes of one answer."""
FORM_BYTES_MAX: Final = 16 * 1024
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "cache-control": "no-store",
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
"""Headers of every answer, which keep other pages and scripts out."""
_FILES: Final = {".parquet": "application/vnd.apache.parquet", ".mp4": "video/mp4"}


class RefusedError(Exception):
    """A question that is answered with a status and a sentence."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Pages:
    """Answers requests; for its arguments see `make_app`."""

    def __init__(self, access: Access, viewer: Viewer, *, is_secure: bool) -> None:
        self._access = access
        self._viewer = viewer
        self._is_secure = is_secure

    def routes(self) -> list[Route | Mount]:
        """Return what is answered where: the page, and what its scripts ask for."""
        episode = "/api/buffers/{buffer}/episodes/{number}"
        return [
            Route("/", self._page),
            Route("/api/session", self._session),
            Route("/api/login", self._login, methods=["POST"]),
            Route("/api/logout", self._logout, methods=["POST"]),
            Route("/api/overview", self._overview),
            Route("/api/buffers/{buffer}/history", self._history),
            Route("/api/buffers/{buffer}/episodes", self._episodes),
            Route("/api/buffers/{buffer}/learning", self._learning),
            Route(episode, self._describe),
            Route(f"{episode}/frame/{{step}}", self._frame),
            Route(f"{episode}/picture", self._picture),
            Route(f"{episode}/file{{suffix}}", self._file),
            Mount("/static", StaticFiles(directory=STATIC)),
        ]

    async def _page(self, _: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    async def _session(self, request: Request) -> Response:
        watch = self._access.watch_of(request)
        problem = "" if watch else self._access.problem
        is_open = self._access.is_open
        return JSONResponse({"is_in": bool(watch), "is_open": is_open, "problem": problem})

    async def _login(self, request: Request) -> Response:
        _demand_same_origin(request)
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > FORM_BYTES_MAX:
                raise RefusedError(413, "this is no token")
        try:
            token = str(json.loads(body)["token"]).strip()
        except (ValueError, KeyError, TypeError, RecursionError):
            raise RefusedError(400, "a token is missing") from None
        try:
            cookie = await self._access.login(token)
        except (PermissionDeniedError, UnauthenticatedError) as error:
            raise RefusedError(401, f"The server refuses the token: {error}") from error
        answer = JSONResponse({"is_in": True})
        how: Any = {"max_age": int(SESSION_S), "httponly": True, "samesite": "strict"}
        answer.set_cookie(COOKIE, cookie, secure=self._is_secure, **how)
        return answer

    async def _logout(self, request: Request) -> Response:
        _demand_same_origin(request)
        self._access.logout(request)
        answer = JSONResponse({"is_in": False})
        answer.delete_cookie(COOKIE)
        return answer

    async def _overview(self, request: Request) -> Response:
        watch = self._watch(request)

        async def events() -> AsyncIterator[str]:
            async for each in watch.overviews():
                # The login may have ended since, or its token.
                is_over = self._access.watch_of(request) is not watch
                if is_over or request.app.state.is_ending():
                    return
                yield f"data: {each}\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def _history(self, request: Request) -> Response:
        return JSONResponse(self._buffer(request).history.history())

    async def _episodes(self, request: Request) -> Response:
        watched = self._buffer(request)
        asked = request.query_params
        wanted: dict[str, Any] = {
            each.name: asked[each.name] if each.default == "" else _number(asked[each.name])
            for each in fields(Query)
            if each.name in asked
        }
        query = Query(**wanted)
        found = watched.index.find(query)
        watched.is_listed, watched.chosen_worker = True, query.worker or watched.chosen_worker
        if asked.get("held"):
            found = [each for each in found if watched.can_be_watched(each)]
        ended = [each for each in found if each.has_ended]
        parts = [each for each in found if not each.has_ended][:ROWS_MAX]
        key = SORTS.get(asked.get("sort", ""))
        if key is not None:
            ended.sort(key=key, reverse="down" in asked)
            if asked["sort"] == "return":  # Unknown returns come last.
                ended.sort(key=lambda each: math.isnan(each.return_sum))
        elif not asked.get("held"):  # What can be watched comes first.
            ended.sort(key=lambda each: not watched.can_be_watched(each))
        start = int(min(max(0.0, _number(asked.get("start")) or 0.0), len(ended)))
        share = watched.loadable_share
        return JSONResponse(
            {
                "total": len(found),
                "all": len(watched.index.episodes),
                "ended": len(ended),
                "rows": [each.row() | {"held": share(each)} for each in ended[start:][:ROWS_MAX]],
                "parts": [each.row() | {"held": share(each)} for each in parts],
                "histogram": histogram(ended),
                "workers": sorted(watched.index.workers)[:NAMES_MAX],
                "kept": watched.chosen_worker or watched.kept_worker,
                "tasks": sorted(watched.index.tasks),
            }
        )

    async def _learning(self, request: Request) -> Response:
        watched = self._buffer(request)
        by = request.query_params.get("by", "all")
        names = ("time", "granted", "released", "waiting")
        training = zip(*watched.history.training, strict=True)
        return JSONResponse(
            {
                "returns": learning_points(list(watched.index.ended), by=by),
                "training": dict(zip(names, training, strict=False)),
            }
        )

    async def _describe(self, request: Request) -> Response:
        buffer, episode = self._episode(request)
        return JSONResponse(await self._viewer.describe(buffer, episode))

    async def _frame(self, request: Request) -> Response:
        buffer, episode = self._episode(request)
        path, step = request.query_params.get("stream", ""), _place(request, "step")
        return _image(await self._viewer.frame(buffer, episode, path, step))

    async def _picture(self, request: Request) -> Response:
        buffer, episode = self._episode(request)
        path = request.query_params.get("stream", "")
        return _image(await self._viewer.picture(buffer, episode, path))

    async def _file(self, request: Request) -> Response:
        suffix = request.path_params["suffix"]
        if suffix not in _FILES:
            raise RefusedError(404, f"there are files of {', '.join(_FILES)}")
        buffer, episode = self._episode(request)
        file, size_bytes = await self._viewer.download(buffer, episode, suffix)
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", f"{episode.worker_id}-{episode.episode_id}")
        headers = {
            "content-disposition": f'attachment; filename="{name[-200:]}{suffix}"',
            "content-length": str(size_bytes),
        }

        async def contents() -> AsyncIterator[bytes]:
            with file:
                while part := await asyncio.to_thread(file.read, 2**20):
                    yield part

        return StreamingResponse(contents(), media_type=_FILES[suffix], headers=headers)

    def _watch(self, request: Request) -> Watch:
        watch = self._access.watch_of(request)
        if watch is None:
            raise RefusedError(401, "log in first")
        return watch

    def _buffer(self, request: Request) -> WatchedBuffer:
        found = self._watch(request).buffers.get(request.path_params["buffer"])
        if found is None:
            raise RefusedError(404, "there is no such buffer, or the token may not see it")
        return found

    def _episode(self, request: Request) -> tuple[WatchedBuffer, Episode]:
        buffer = self._buffer(request)
        episode = buffer.index.episodes.get(_place(request, "number"))
        if episode is None:
            raise RefusedError(404, "this episode is not remembered any more")
        # As it is now: it may go on while its arrays are loaded.
        return buffer, replace(episode, spans=[*episode.spans], rewards=[*episode.rewards])


def make_app(
    access: Access, viewer: Viewer, *, hosts: list[str], is_secure: bool = False
) -> Starlette:
    """Make the ASGI application, which runs the access while it runs.

    Browsers ask for it by one of `hosts`, where "*" stands for any. If pages are served by TLS,
    `is_secure`, the cookie is sent by TLS alone.
    """

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        started = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(access.run(started))
            await started.wait()
            yield
            running.cancel()

    async def refused(_: Request, error: Exception) -> Response:
        status = {GoneError: 410, KeyError: 404, CannotError: 422}.get(type(error), 503)
        return JSONResponse({"error": str(error)}, getattr(error, "status", status))

    async def failed(_: Request, error: Exception) -> Response:
        # The server of pages logs it with its traceback.
        problem = f"the console failed: {type(error).__name__}: {error}"[:200]
        return JSONResponse({"error": problem}, 500)

    refusals = (RefusedError, GoneError, CannotError, KeyError, ReplayBufferError)
    app = Starlette(
        routes=Pages(access, viewer, is_secure=is_secure).routes(),
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)],
        exception_handlers={**dict.fromkeys(refusals, refused), Exception: failed},
        lifespan=lifespan,
    )
    app.state.is_ending = lambda: False
    return app


def _demand_same_origin(request: Request) -> None:
    """Refuse a login by a token of another site's choice, or a logout, that its page sent."""
    origin = request.headers.get("origin")
    if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
        raise RefusedError(403, "this was sent by another site")
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        raise RefusedError(415, "must be JSON")


def _image(body: bytes) -> Response:
    kind = "image/jpeg" if body.startswith(b"\xff\xd8") else "image/png"
    return Response(body, media_type=kind)


def _number(text: str | None) -> float | None:
    try:
        number = None if text in (None, "") else float(str(text))
    except ValueError:
        number = math.nan
    if number is not None and not math.isfinite(number):
        raise RefusedError(400, "a bound must be a number")
    return number


def _place(request: Request, name: str) -> int:
    """Return an episode's or a step's number in a path; Python would refuse thousands of digits."""
    text = request.path_params[name]
    if not re.fullmatch("[0-9]{1,15}", text):
        raise RefusedError(404, f"{name} must be a whole number")
    return int(text)
