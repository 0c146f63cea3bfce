"""Where commands find modules that a person names, as `module:factory`."""

import sys
from pathlib import Path


def import_from_here() -> None:
    """Let `module:factory` name a module of the current folder, as `python -m` would."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
