"""Notebooks, run in a kernel of their own, as Jupyter would."""

from pathlib import Path
from typing import Any

import pytest


def executed(notebook: Path, folder: Path) -> list[Any]:
    """The cells of code with their outputs, executed in a folder."""
    # Here, since importing them takes seconds, which every collection of tests would spend.
    nbformat = pytest.importorskip("nbformat", reason="no extra but dev has the notebook's runner")
    nbclient = pytest.importorskip("nbclient", reason="no extra but dev has the notebook's runner")
    pytest.importorskip("ipykernel", reason="no extra but dev has the notebook's kernel")
    read = nbformat.read(notebook, as_version=4)
    where = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(read, timeout=240, kernel_name="python3", resources=where).execute()
    return [cell for cell in read.cells if cell.cell_type == "code"]


def shown_by(cells: list[Any], last_line: str) -> Any:
    """What the cell showed whose last line this is."""
    (cell,) = [cell for cell in cells if cell.source.splitlines()[-1] == last_line]
    (output,) = cell.outputs
    return output.data
