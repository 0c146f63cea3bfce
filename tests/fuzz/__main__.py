"""`python tests/fuzz [TARGET ...] [--seconds N] [--seed N]`: read what nobody wrote on purpose.

With the package atheris (which has wheels for some releases of Python) inputs are led by the
coverage of our code; without it they are changed at random. Inputs that fail are left in --out and
belong into tests/fuzz/corpus once they are mended: the tests read all of it.
"""

import argparse
import importlib.util
import random
import subprocess
import sys
import time
import traceback
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

CORPUS = Path(__file__).resolve().parent / "corpus"
INPUT_BYTES_MAX = 1 << 16
UNIT_S_MAX = 20
"""Nobody's input may take longer."""
MEMORY_MIB_MAX = 3072


def main() -> int:
    """Fuzz each target in a process of its own; 1 when one has findings."""
    parser = argparse.ArgumentParser(prog="python tests/fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", help="default: all")
    parser.add_argument("--seconds", type=int, default=60, help="of all targets together")
    parser.add_argument("--seed", type=int, default=random.randrange(1, 1 << 31))
    parser.add_argument("--out", type=Path, default=Path("fuzz-out"), help="for what is found")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        return fuzz(options.targets[0], options.seconds, options.seed, options.out)
    from fuzz.targets import TARGETS

    unknown = set(options.targets) - TARGETS.keys()
    if unknown:
        parser.error(f"no target is named {', '.join(unknown)}; there are {', '.join(TARGETS)}")
    names = options.targets or [*TARGETS]
    seconds = max(1, options.seconds // len(names))
    failed = []
    for name in names:
        settings = ("--seconds", str(seconds), "--seed", str(options.seed), "--out", options.out)
        done = subprocess.run([sys.executable, __file__, name, "--alone", *settings], check=False)
        if done.returncode:
            failed.append(name)
        told = f"ended with {done.returncode}" if done.returncode else "nothing found"
        sys.stdout.write(f"{name}: {told}\n")
    sys.stdout.write(f"seed {options.seed}; failed: {', '.join(failed) or 'none'}\n")
    return int(bool(failed))


def fuzz(name: str, seconds: int, seed: int, out: Path) -> int:
    """Fuzz one target in this process; may end it."""
    out.mkdir(parents=True, exist_ok=True)
    kept = out / f"corpus-{name}"
    kept.mkdir(exist_ok=True)
    if importlib.util.find_spec("atheris") is None:
        return fuzz_at_random(name, seconds, seed, out)
    import atheris

    with atheris.instrument_imports(include=["breadbox", "breadbox_offline", "breadbox_server"]):
        from fuzz.targets import TARGETS
    target = TARGETS[name]
    for index, data in enumerate(target.seeds()):
        (kept / f"seed-{index}").write_bytes(data)
    given = CORPUS / name
    given.mkdir(exist_ok=True)
    arguments = {
        "max_total_time": seconds,
        "seed": seed,
        "max_len": INPUT_BYTES_MAX,
        "timeout": UNIT_S_MAX,
        "rss_limit_mb": MEMORY_MIB_MAX,
        "artifact_prefix": f"{out}/{name}-",
        "print_final_stats": 1,
        "verbosity": 0,
    }
    flags = [f"-{flag}={value}" for flag, value in arguments.items()]
    atheris.Setup([sys.argv[0], str(kept), str(given), *flags], target.try_one)
    atheris.Fuzz()
    return 0


def fuzz_at_random(name: str, seconds: int, seed: int, out: Path) -> int:
    """Fuzz one target without coverage; returns 1 when an input was found."""
    from fuzz.mutation import mutate
    from fuzz.targets import TARGETS

    target = TARGETS[name]
    rng = random.Random(seed)
    corpus = [*target.seeds(), *(path.read_bytes() for path in (CORPUS / name).glob("*"))]
    end_at = time.monotonic() + seconds
    count = 0
    while time.monotonic() < end_at:
        data = mutate(rng, corpus, INPUT_BYTES_MAX)
        count += 1
        try:
            target.try_one(data)
        except Exception:  # noqa: BLE001 - what it may be is what is looked for
            traceback.print_exc()
            (out / f"{name}-crash").write_bytes(data)
            return 1
    sys.stdout.write(f"{name}: {count} inputs\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
