"""`breadbox explain`: why a learner is waiting, in a sentence with numbers."""

import time

from breadbox.cli import frame
from breadbox.cli.command import command
from breadbox.cli.connection import Target
from breadbox.cli.settings import of_one_call
from breadbox.diagnosis import Diagnosis, diagnose


class ExplainSettings(Target):
    """Which buffer, and how long to look at it."""

    name: str = of_one_call("default", positional=True, metavar="[BUFFER]")
    fragment_count: int | None = of_one_call(None, ge=1)
    """Fragments that your learner asks for; to say how long that will take."""
    interval_s: float = of_one_call(2.0, option="seconds", ge=0.1, le=300)
    """How long to watch, to know rates."""


@command(ExplainSettings)
def explain(settings: ExplainSettings) -> None:
    """Say why a learner is waiting on BUFFER, or that it is not."""
    with settings.connect() as client:
        before = client.get_buffer(settings.name)
        started_at = time.monotonic()
        time.sleep(settings.interval_s)
        after = client.get_buffer(settings.name)
        watched_s = time.monotonic() - started_at
    diagnosis = diagnose(before, after, watched_s, fragment_count=settings.fragment_count)
    if settings.as_json:
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
