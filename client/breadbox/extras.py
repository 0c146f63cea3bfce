"""How what is missing is installed beside this copy of Breadbox, wherever that came from."""

import json
from importlib.metadata import Distribution, PackageNotFoundError
from typing import Any
from urllib.parse import unquote, urlsplit


def how_to_install(extra: str) -> str:
    """The command that adds an extra to this installation.

    Args:
        extra: One or several, with commas: "learner,offline"; empty: what all need.
    """
    brackets = f"[{extra}]" if extra else ""
    origin = _origin()
    url = origin.get("url", "")
    if origin.get("dir_info", {}).get("editable"):
        return f'pip install -e "{unquote(urlsplit(url).path)}{brackets}"'
    return f'pip install "breadbox{brackets}{f" @ {url}" if url else ""}"'


def _origin() -> dict[str, Any]:
    """What the installer noted of a copy that is from no index; empty: it is from one."""
    try:
        noted = Distribution.from_name("breadbox").read_text("direct_url.json")
        return dict(json.loads(noted or "{}"))
    except (PackageNotFoundError, ValueError):
        return {}
