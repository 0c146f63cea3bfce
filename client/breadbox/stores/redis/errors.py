"""What redis-py raises as our own errors, and a cancellation that it swallows."""

import asyncio
import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import redis

from breadbox.model.errors import StoreError, StoreFullError, StoreUnavailableError

REDIS_ERRORS: Final = (
    redis.RedisError,
    redis.exceptions.RedisClusterException,
    OSError,
    RuntimeError,
)
"""What redis-py raises when Redis is away or refuses; with a cluster, also a class of its own.
RuntimeError is uvloop's, for a connection that the other side ended while it was being made."""


_IN_SCRIPT: Final = re.compile(
    r"^(?:Command # \d+ \(.*?\) of pipeline caused error: )?(?:\(['\"])?"
    r"(?:Error running script .*?: -)?|\.? script: [0-9a-f]{40}, on .*$",
    re.DOTALL,
)
"""The words of pipelines and scripts around an answer."""

_ELSEWHERE: Final = re.compile(
    r"(^|: -?)(READONLY|MASTERDOWN|NOREPLICAS|CLUSTERDOWN|LOADING|UNBLOCKED)\b"
)
_ELSEWHERE_KINDS: Final = (
    *(redis.exceptions.ReadOnlyError, redis.exceptions.MasterDownError),
    *(redis.exceptions.ClusterDownError, redis.exceptions.BusyLoadingError),
)
"""Answers that redis-py shortens by their first word."""

_COMMAND: Final = re.compile(r"(?:run the|unknown command) ['`]([\w|]+)['`]", re.IGNORECASE)

_ANSWER_LENGTH: Final = 400


class NoTlsError(redis.exceptions.TimeoutError):
    """Nobody answered the greeting of an encrypted connection."""

    def __init__(self) -> None:
        super().__init__(
            "no answer to an encrypted greeting in time: if Redis does not speak TLS on this port, "
            "its URL begins with redis://, not rediss://"
        )


class MovedError(StoreError):
    """A node of a cluster says that another one has the key; ask again after a refresh."""


@contextmanager
def translated_errors() -> Iterator[None]:
    """Turn what sockets and redis-py raise into our own errors; the cause is chained."""
    try:
        yield
    except redis.exceptions.OutOfMemoryError as error:
        raise StoreFullError("the Redis payload store is at its maxmemory") from error
    except (redis.exceptions.ResponseError, redis.exceptions.BusyLoadingError) as error:
        # Before version 7 a script that finds Redis full fails as any other does.
        if "OOM command not allowed" in str(error):
            raise StoreFullError("the Redis payload store is at its maxmemory") from error
        raise StoreUnavailableError(
            f"the Redis payload store refuses: {shortened(error)}", answer=shortened(error)
        ) from error
    except NoTlsError as error:
        raise StoreUnavailableError(
            f"the Redis payload store gives {error}", was_silent=True
        ) from error
    except (redis.exceptions.TimeoutError, TimeoutError) as error:
        raise StoreUnavailableError(
            "the Redis payload store did not answer in time", was_silent=True
        ) from error
    except REDIS_ERRORS as error:
        if isinstance(error, RuntimeError) and "closed" not in str(error):
            raise  # A bug of ours.
        if isinstance(error.__cause__, (redis.exceptions.TimeoutError, TimeoutError)):
            # A cluster says only that none of its nodes could be asked.
            raise StoreUnavailableError(
                "the Redis payload store did not answer in time", was_silent=True
            ) from error
        if any(isinstance(each, redis.AuthenticationError) for each in (error, error.__cause__)):
            # Without the text: some servers repeat the user name.
            raise StoreUnavailableError(
                "the Redis payload store refuses our credentials"
            ) from error
        raise StoreUnavailableError(f"the Redis payload store failed: {describe(error)}") from error


def is_elsewhere(error: BaseException) -> bool:
    """Return True if Redis answers that it is not the one to ask, or not yet."""
    return isinstance(error, _ELSEWHERE_KINDS) or _ELSEWHERE.search(str(error)) is not None


def shortened(error: BaseException) -> str:
    """Return Redis' refusal, cut to fit a line, without the script's line or the user's name."""
    text = str(error)
    command = _COMMAND.search(text)
    if isinstance(error, redis.exceptions.NoPermissionError) or text.startswith("NOPERM "):
        right = f" (+{command[1].lower()})" if command else ""
        return f"NOPERM, the user lacks a right{right}"
    if command:
        return f"it has no command {command[1].upper()}"
    return _IN_SCRIPT.sub("", text).rstrip(".")[:_ANSWER_LENGTH]


def describe(error: BaseException) -> str:
    """Say what went wrong in a few words."""
    if isinstance(error, OSError) and error.errno:
        return errno.errorcode.get(error.errno, "") + f" ({error.strerror})"
    if isinstance(error, RuntimeError) and "closed" in str(error):
        return "the connection was closed"  # uvloop names its own objects.
    return f"{type(error).__name__}: {str(error)[:200]}"


def raise_reply_error(line: bytes) -> None:
    """Raise what an error reply, given without its leading "-", means to us."""
    code = line.split(b" ", 1)[0].decode("ascii", "replace")
    text = shortened(Exception(line.decode("utf-8", "replace")))
    if code == "OOM":
        raise StoreFullError("the Redis payload store is at its maxmemory")
    if code in ("MOVED", "ASK"):
        raise MovedError(text)
    raise StoreUnavailableError(f"the Redis payload store refuses: {text}", answer=text)


@contextmanager
def kept_cancellation() -> Iterator[None]:
    """Raise at the block's end the `CancelledError` that `asyncio.wait_for` swallowed in it."""
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    try:
        yield
    except asyncio.CancelledError:
        raise
    except Exception as error:
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError from error
        raise
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError
