"""`breadbox explain`: why a learner is waiting, in a sentence with numbers."""

import time

import click

from breadbox.cli import frame
from breadbox.diagnosis import Diagnosis, diagnose


@click.command()
@click.argument("name", metavar="[BUFFER]", default="default")
@click.option(
    "--fragment-count",
    type=click.IntRange(min=1),
    help="Fragments that your learner asks for; to say how long that will take.",
)
@click.option(
    "--seconds",
    "interval_s",
    default=2.0,
    show_default=True,
    type=click.FloatRange(min=0.1, max=300),
    help="How long to watch, to know rates.",
)
@frame.server_options
def explain(target: frame.Target, name: str, fragment_count: int | None, interval_s: float) -> None:
    """Say why a learner is waiting on BUFFER, or that it is not."""
    with target.connect() as client:
        before = client.get_buffer(name)
        started_at = time.monotonic()
        time.sleep(interval_s)
        after = client.get_buffer(name)
        watched_s = time.monotonic() - started_at
    diagnosis = diagnose(before, after, watched_s, fragment_count=fragment_count)
    if target.as_json:
        frame.print_json(diagnosis)
    else:
        _print(diagnosis)


def _print(diagnosis: Diagnosis) -> None:
    console = frame.console()
    # Who reads it in a window gets whole words; who searches it, whole lines.
    soft_wrap = not console.is_terminal
    console.print(f"[bold]{frame.shown(diagnosis.headline)}[/]", soft_wrap=soft_wrap)
    for advice in diagnosis.advice:
        console.print(f"  → {frame.shown(advice)}", soft_wrap=soft_wrap)
    console.print()
    lines = [(name, frame.rate_text(rate)) for name, rate in diagnosis.rates.items()]
    console.print(frame.rows(frame.table("", f"#over {diagnosis.watched_s:.1f} s"), lines))
