"""`python tests/simulation [--seed N | --seeds COUNT] [--world NAME]`: run seeds, replay one."""

import argparse
import logging
import sys
from pathlib import Path
from time import process_time

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from simulation.faults import World
from simulation.simulate import replay_command, simulate
from simulation.variants import VARIANTS


def main() -> int:
    """Run seeds and say which fail; 1 when any did."""
    parser = argparse.ArgumentParser(prog="python tests/simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this seed, with its traceback")
    parser.add_argument("--first", type=int, default=0, help="first seed of a series")
    parser.add_argument("--seeds", type=int, default=200, help="length of a series")
    parser.add_argument("--variant", choices=sorted(VARIANTS), default="real", help="what to run")
    parser.add_argument("--world", choices=list(World), help="what goes wrong; else each in turn")
    options = parser.parse_args()
    world = None if options.world is None else World(options.world)
    variant = VARIANTS[options.variant]
    if options.seed is not None:
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        outcome = simulate(options.seed, variant(), world)
        sys.stdout.write(f"{outcome.where}{outcome.line}\n")
        return int(bool(outcome.failure))
    logging.disable()
    started_at = process_time()
    failures = 0
    for seed in range(options.first, options.first + options.seeds):
        outcome = simulate(seed, variant(), world)
        if outcome.failure:
            failures += 1
            sys.stdout.write(f"{outcome.line}\n")
            sys.stdout.write(f"  replay: {replay_command(outcome, variant.name)}\n")
    rate = options.seeds / (process_time() - started_at) * 60
    sys.stdout.write(f"{options.seeds} seeds, {failures} failed, {rate:,.0f} seeds/CPU minute\n")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
