"""Evaluate policies in a process beside training, which does not wait for it or fail with it."""

import json
import logging
import math
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import safetensors.torch

from breadbox.shared.child_processes import child_environment
from breadbox_learner.playing import EvaluationTask, write_message
from breadbox_learner.runs import Record
from breadbox_policies import PolicyModule

_log = logging.getLogger(__name__)

STUDENT_T_95 = {
    1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 14: 2.14,
    19: 2.09, 29: 2.05,
}  # fmt: skip
"""Half the width of the middle 95% of Student's t, by degrees of freedom."""


def half_interval(values: Sequence[float]) -> float | None:
    """Return half the width of the mean's 95% interval, or None for less than two values."""
    if len(values) < 2:
        return None
    # The next smaller table entry: a wider interval, never a narrower one.
    freedom = max(each for each in STUDENT_T_95 if each <= len(values) - 1)
    return STUDENT_T_95[freedom] * statistics.stdev(values) / math.sqrt(len(values))


_POLL_S = 0.2
_ENDING_S = 5.0


class EvaluationError(Exception):
    """An evaluation failed; says why."""


def evaluated(answer: Mapping[str, Any], seconds: float) -> dict[str, float | int | None]:
    """Return the record of an evaluation from its process's answer and the seconds it took."""
    returns, lengths = answer["returns"], answer["lengths"]
    mean, half_width = statistics.fmean(returns), half_interval(returns)
    return {
        "evaluation_return_mean": mean,
        # The 95% interval of the mean, or None for a single episode.
        "evaluation_return_low": None if half_width is None else mean - half_width,
        "evaluation_return_high": None if half_width is None else mean + half_width,
        "evaluation_return_min": min(returns),
        "evaluation_return_max": max(returns),
        "evaluation_length_mean": statistics.fmean(lengths),
        "evaluation_length_min": min(lengths),
        "evaluation_length_max": max(lengths),
        "evaluation_episode_count": len(returns),
        # These returns are partial; with positive rewards they are too small.
        "evaluation_cut_off_count": answer["cut_off"],
        "evaluation_s": seconds,
    }


class Evaluator:
    """Evaluate versions in order; only the newest one waits. Only `finish` and `close` block."""

    def __init__(self, task: EvaluationTask) -> None:
        self._task = task
        self._changed = threading.Condition()
        self._waiting: tuple[Record, bytes] | None = None
        self._is_playing = False
        self._is_closing = False
        self._finished: list[Record] = []
        self._process: subprocess.Popen[bytes] | None = None
        self.skipped_count = 0
        """Number of evaluations left out because a newer version came."""
        self._thread = threading.Thread(target=self._run, name="evaluation", daemon=True)
        self._thread.start()

    def begin(self, marks: Record, policy: PolicyModule) -> None:
        """Start to evaluate the policy's current weights; `marks` begin the record."""
        weights = {
            name: tensor.detach().cpu().contiguous() for name, tensor in policy.state_dict().items()
        }
        data = bytes(safetensors.torch.save(weights))
        with self._changed:
            if self._waiting is not None:
                if not self.skipped_count:
                    _log.warning(
                        "evaluation of update %s is left out: the one before still goes on "
                        "(evaluate_every is too small for these episodes; said once)",
                        self._waiting[0]["update"],
                    )
                self.skipped_count += 1
            self._waiting = (marks, data)
            self._changed.notify_all()

    def finished(self) -> list[Record]:
        """Return records of the evaluations that have ended since the last call."""
        with self._changed:
            found, self._finished = self._finished, []
        return found

    def finish(self, stopped: Callable[[], bool], limit_s: float) -> list[Record]:
        """Wait for started evaluations, until `stopped()` or the limit; return `finished`."""
        give_up_at = time.monotonic() + limit_s
        with self._changed:
            while self._is_playing or self._waiting is not None:
                if stopped() or time.monotonic() >= give_up_at:
                    _log.warning("the run ends before its last evaluation does")
                    break
                self._changed.wait(_POLL_S)
        return self.finished()

    def close(self) -> None:
        """End the process, even within an episode. Idempotent."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            process = self._process
        if process is not None:
            process.kill()
            self._thread.join(_ENDING_S)
            _end(process)

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._waiting is None and not self._is_closing:
                    self._changed.wait()
                if self._is_closing or self._waiting is None:
                    return
                (marks, data), self._waiting = self._waiting, None
                self._is_playing = True
            record: Record | None = None
            began_at = time.monotonic()
            try:
                answer = self._ask(data)
                record = {**marks, **evaluated(answer, time.monotonic() - began_at)}
            except EvaluationError as error:
                if not self._is_closing:
                    _log.error(
                        "no evaluation of update %s, training continues: %s", marks["update"], error
                    )
            with self._changed:
                self._is_playing = False
                if record is not None:
                    self._finished.append(record)
                self._changed.notify_all()

    def _ask(self, weights: bytes) -> dict[str, Any]:
        process = self._process_running()
        assert process.stdin is not None
        assert process.stdout is not None
        line = b""
        with suppress(BrokenPipeError):
            write_message(process.stdin, weights)
            line = process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line.endswith(b"\n") else {}
        if "returns" in answer:
            return answer
        with self._changed:
            self._process = None
        code = _end(process)
        raise EvaluationError(answer.get("error", f"its process ended with status {code}"))

    def _process_running(self) -> "subprocess.Popen[bytes]":
        if self._process is not None:
            return self._process
        with self._changed:
            if self._is_closing:
                raise EvaluationError("the run ends")
            self._process = process = subprocess.Popen(
                [sys.executable, "-m", "breadbox_learner.playing"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=child_environment(),
            )
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            write_message(process.stdin, json.dumps(asdict(self._task)).encode())
        return process


def _end(process: "subprocess.Popen[bytes]") -> int:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()
    return process.wait(_ENDING_S)
