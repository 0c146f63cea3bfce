"""`make smoke`: run each target that continuous tests run nowhere else, as small as it can be.

What a target measures so says nothing; that it ends well, within minutes, says that it can be used.
Every target is named in .ci/run, in `SMALLEST` or in `NOT_RUN`: tests/deploy/test_targets.py.

Usage: python scripts/smoke.py [TARGET ...]
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 300.0
"""Of each; on two cores with nothing beside, each takes less than a minute and a half."""
_COLLECTED = "ARGS=--collect-only -q"
"""For targets whose tests others run: that they are found."""

_SECTIONS = (
    *("payload", "service", "overload", "reading", "gateway", "rollout", "learner", "mirror"),
    *("recovery", "takeover", "offline", "scale"),
)
"""Of `make bench`, without the core, which has a target of its own."""

SMALLEST: tuple[tuple[str, ...], ...] = (
    ("help",),
    ("demo", "ARGS=--target-return 12 --time-limit 100 --workers 1 --out build/smoke/runs"),
    ("docs",),
    ("released-protos", "RELEASED=build/smoke/released.binpb"),
    ("test-quick", _COLLECTED),
    ("test-core", _COLLECTED),
    ("test-service", _COLLECTED),
    ("test-integration", _COLLECTED),
    ("test-dist", _COLLECTED),
    ("test-gpu", _COLLECTED),
    ("attacks", _COLLECTED),
    ("chaos", "ARGS=--seconds 6 --store file --seed 1"),
    ("crossings", "ARGS=--rows 0"),
    ("endings", "ARGS=--rounds 1 --seed 1"),
    ("fuzz", "ARGS=--seconds 12 --seed 1 --out build/smoke/fuzz"),
    ("simulate", "ARGS=--seeds 4"),
    ("crowd", "ARGS=--small build/smoke"),
    *(("bench", f"ARGS=--once --only {section} --out build/smoke") for section in _SECTIONS),
    ("bench-core", "ARGS=--once --out build/smoke/core.json"),
    ("bench-peers", "ARGS=--once --out build/smoke"),
    ("freshness", "ARGS=--tasks CartPole --seeds 1 --updates 1 --out build/smoke/freshness.csv"),
    ("beside-learners", "ARGS=--seeds 1 --cases 0 --steps 4096 --out build/smoke/beside.csv"),
    ("paced-groups", "ARGS=--seeds 1 --updates 2"),
    (
        "learn-check",
        "ARGS=--seeds 0 --only CartPole-v1 --target-return 12 --limit-s 100 --out build/smoke/runs "
        "--docs build/smoke",
    ),
)
"""Words behind `make`."""

NOT_RUN = {
    "bench-grpcio": "it measures what is the newest release on the day, for a change of the lock",
    "clean": "it deletes what the others need",
    "dist": "`release-rehearsal` runs it on a clone",
    "env": "`test-containers` asks a composition of its own for it",
    "lock": "it writes uv.lock as PyPI is today; the workflow does `uv lock --check`",
    "release": "it writes a version into the checkout; `release-rehearsal` runs it on a clone",
    "sbom": "`test-containers` lists what is in the images by the same script",
    "scaling": "it writes docs/studies; its commands are `bench --only scale` and `crowd`",
    "up": "`test-containers` starts a composition of its own",
    "down": "`test-containers` ends a composition of its own",
    "verify": "its parts are run one by one",
}
"""Targets that continuous tests do not run, and why not."""


def run(words: tuple[str, ...]) -> bool:
    """Run a target; return whether it ended well, and show its output if not."""
    began_at = time.monotonic()
    process = subprocess.Popen(
        ["make", *words],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
        problem = f"exit status {process.returncode}" if process.returncode else ""
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        output, _ = process.communicate()
        problem = f"not done within {LIMIT_S:.0f} s"
    took_s = time.monotonic() - began_at
    print(f"smoke: make {shlex.join(words)}: {problem or 'ok'}, {took_s:.0f} s", flush=True)
    if problem:
        print(output.decode(errors="replace")[-6000:], flush=True)
    return not problem


def main() -> None:
    """Run those that are named, or all; exit status 1 if one fails."""
    (ROOT / "build" / "smoke").mkdir(parents=True, exist_ok=True)
    wanted = [words for words in SMALLEST if words[0] in (sys.argv[1:] or [words[0]])]
    failed = [words for words in wanted if not run(words)]
    for words in failed:
        print(f"smoke: failed: make {shlex.join(words)}")
    sys.exit(bool(failed) or not wanted)


if __name__ == "__main__":
    main()
