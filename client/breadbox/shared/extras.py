"""Name the modules of each extra, and the command that installs one beside this copy."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Final

_SERVER: Final = ("grpc_health", "grpc_reflection", "grpc_status", "prometheus_client", "yaml")
_WORKER: Final = ("torch", "gymnasium", "av", "PIL", "prometheus_client", "yaml")
_LEARNER: Final = ("torch", "gymnasium", "tensorboard", "av", "yaml")
MODULES: Final[Mapping[str, tuple[str, ...]]] = {
    "server": _SERVER,
    "rollout-worker": _WORKER,
    "learner": _LEARNER,
    "console": (
        "starlette",
        "uvicorn",
        "h11",
        "av",
        "PIL",
        "gymnasium",
        "msgpack",
        "pyarrow",
        "yaml",
    ),
    "offline": ("gymnasium", "msgpack", "PIL", "pyarrow"),
    "demo": (*_SERVER, *_WORKER, *_LEARNER, "matplotlib"),
}
"""Modules that each extra installs."""


def missing_module(extra: str) -> str | None:
    """Return the first module of an extra that is not installed, importing none, or None."""
    return next((name for name in MODULES.get(extra, ()) if not _is_installed(name)), None)


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def how_to_install(extra: str) -> str:
    """Return the command that adds extras, such as "learner,offline", to this installation."""
    brackets = f"[{extra}]" if extra else ""
    from urllib.parse import unquote, urlsplit

    origin = _origin()
    url = origin.get("url", "")
    if origin.get("dir_info", {}).get("editable"):
        return f'pip install -e "{unquote(urlsplit(url).path)}{brackets}"'
    return f'pip install "breadbox{brackets}{f" @ {url}" if url else ""}"'


def _origin() -> dict[str, Any]:
    import json
    from importlib.metadata import Distribution, PackageNotFoundError

    try:
        noted = Distribution.from_name("breadbox").read_text("direct_url.json")
        return dict(json.loads(noted or "{}"))
    except (PackageNotFoundError, ValueError):
        return {}
