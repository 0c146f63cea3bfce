"""`python -m bench.peers`: Reverb on the same workloads, beside the last results of `bench`.

Reverb brings TensorFlow of one exact version, so it gets a virtual environment of its own, below
bench/out. Where it cannot be installed, this says so and ends well: there is nothing to compare.
"""

import json
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from bench.payload_rows import GROUP
from bench.workloads import WORKLOADS
from breadbox.payload.dtypes import stored_array
from breadbox.payload.fragments import fragment_tree
from breadbox.trees import flatten

_HERE = Path(__file__).parent
_PACKAGE = "dm-reverb[tensorflow]"
_INSTALL_S_MAX = 1800.0
_RUN_S_MAX = 600.0


@click.command()
@click.option("--rounds", default=10, show_default=True)
@click.option(
    "--out", type=click.Path(path_type=Path), default=_HERE / "out", show_default="bench/out"
)
def main(rounds: int, out: Path) -> None:
    """Measure Reverb, and print how Breadbox's last results compare."""
    console = Console()
    python = out / "peers-venv" / "bin" / "python"
    problem = _install(python)
    if problem:
        console.print(f"Reverb cannot be installed here, so there is no comparison: {problem}")
        return
    ours = _last_results(out)
    table = Table("workload", "what", "Reverb GB/s", "Breadbox GB/s", "ratio")
    rows = []
    for workload in ("vpt", "atari"):
        rates = _measure(python, workload, rounds)
        if isinstance(rates, str):
            console.print(f"Reverb did not run: {rates}")
            return
        for what, peer in rates.items():
            own = ours.get((what, workload))
            shown = "run `make bench` first" if own is None else f"{own:.2f}"
            ratio = "" if own is None else f"{own / peer:.1f}"
            table.add_row(workload, what, f"{peer:.2f}", shown, ratio)
            rows.append(
                {
                    "name": what,
                    "workload": workload,
                    "value": own,
                    "unit": "GB/s",
                    "limit": None,
                    "ratio": None if own is None else own / peer,
                    "peers": {"Reverb": peer},
                }
            )
    console.print(table)
    (out / "peers.json").write_text(json.dumps(rows, indent=2) + "\n")


def _install(python: Path) -> str:
    """Make the environment; returns why it cannot be, or nothing."""
    if not python.exists():
        venv.create(python.parent.parent, with_pip=True)
    if subprocess.run([python, "-c", "import reverb"], capture_output=True).returncode == 0:
        return ""
    command = [str(python), "-m", "pip", "install", "--quiet", _PACKAGE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_S_MAX)
    except subprocess.TimeoutExpired:
        return f"pip took longer than {_INSTALL_S_MAX:.0f} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["pip failed"])[-1][:300]
    tried = subprocess.run([python, "-c", "import reverb"], capture_output=True, text=True)
    return "" if tried.returncode == 0 else tried.stderr.strip().splitlines()[-1][:300]


def _measure(python: Path, workload: str, rounds: int) -> dict[str, float] | str:
    """Run Reverb on a workload; its rates, or why there are none."""
    _, leaves = flatten(fragment_tree(WORKLOADS[workload]()))
    arrays = [stored_array(path, leaf) for path, leaf in leaves]
    task = {
        "arrays": [[type_name, list(array.shape)] for array, type_name in arrays],
        "group": GROUP[workload],
        "rounds": rounds,
    }
    try:
        done = subprocess.run(
            [python, str(_HERE / "peer_reverb.py")],
            input=json.dumps(task),
            capture_output=True,
            text=True,
            timeout=_RUN_S_MAX,
        )
    except subprocess.TimeoutExpired:
        return f"it took longer than {_RUN_S_MAX:.0f} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no message"])[-1][:300]
    rates: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return rates


def _last_results(out: Path) -> dict[tuple[str, str], float]:
    """Breadbox's rates by (what, workload), from results.json."""
    path = out / "results.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    names = {"append, payload and bookkeeping acknowledged": "append"}
    names["load into a stacked batch"] = "load"
    return {
        (names[row["name"]], row["workload"]): row["value"] for row in rows if row["name"] in names
    }


if __name__ == "__main__":
    sys.exit(main())
