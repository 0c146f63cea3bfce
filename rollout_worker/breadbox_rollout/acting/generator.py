"""Generate whole episodes into files, to watch, to evaluate, or to learn from offline.

    options = GeneratorOptions(env="CartPole-v1", out=Path("episodes"), episode_count=10)
    with EpisodeGenerator(options, make_policy=..., device=...) as episodes:
        for episode in episodes:
            print(episode["return_sum"], episode["video_path"])

Environments run ahead of the consumer by at most `ready_max` episodes. A failing worker loses its
episode, and is restarted up to a limit.
"""

import logging
import queue
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress, TextColumn

from breadbox.cli.signals import stop_on_signals
from breadbox.model.errors import InvalidRequestError
from breadbox_policies import PolicyModule, State
from breadbox_rollout.acting.agents import check_policy_name, policy_factory, read_weights
from breadbox_rollout.acting.batching import ReadyQueue
from breadbox_rollout.acting.inference import Inference, check_device, play_round
from breadbox_rollout.environments.environments import (
    EnvSpec,
    check_environment,
    check_frames,
    with_frames,
)
from breadbox_rollout.environments.failures import FailureKind
from breadbox_rollout.processes.pool import (
    EnvironmentStartError,
    EnvProcesses,
    GroupFailed,
    GroupReady,
    PoolOptions,
)
from breadbox_rollout.recording.recording import MANIFEST, RecordingOptions, Recordings
from breadbox_rollout.settings import GenerateSettings

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_OF_THE_POOL = (
    *("seed", "build_s_max", "reset_s_max", "step_s_max", "restarts_max"),
    *("memory_bytes_max", "episode_steps_max"),
)
"""Options of a generator that its processes have too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorOptions:
    """The environment, number and output of episodes."""

    env: EnvSpec
    out: Path
    """Folder of the files, created if needed. Files of earlier runs stay."""
    episode_count: int
    worker_count: int = 1
    """Environment processes, one environment each."""
    media: str = "h264"
    """"h264", "jpeg" or "none"."""
    fps: int = 30
    crf: int = 0
    """Quality of H.264, from 0 (lossless) to 51 (worst)."""
    overlay: bool = False
    """True to write the policy's value into each frame."""
    episode_steps_max: int | None = None
    """Steps after which an episode is truncated, or None if the environment decides."""
    restarts_max: int = 10
    """Most restarts of one worker; the next failure ends it."""
    ready_max: int = 16
    """Most finished episodes that wait for the consumer; then environments wait."""
    seed: int = 0
    task: str = "default"
    model_version: int = 0
    """The policy's model version, for the manifest."""
    policy_name: str = ""
    """The policy's name, for the manifest."""
    build_s_max: float = 300.0
    reset_s_max: float = 120.0
    step_s_max: float = 30.0
    memory_bytes_max: int = 0
    details: dict[str, Any] = field(default_factory=dict)
    """More entries for each line of the manifest."""


class EpisodeGenerator:
    """Iterate over finished episodes: the manifest's entries, with full paths.

    The iterator ends after `episode_count` episodes. `close`, or the end of the block, ends it:
    finished episodes stay, those in progress leave nothing behind.

    Raises:
        InvalidRequestError: The package that draws the environment's frames is not installed.
        EnvironmentStartError: (While iterating) every worker failed more often than allowed.
    """

    def __init__(
        self,
        options: GeneratorOptions,
        *,
        make_policy: Callable[[Any, Any], PolicyModule],
        make_inference: Callable[[PolicyModule], Inference],
    ) -> None:
        """Begin to play; *make_policy* gets observation and action space."""
        if options.media != "none":
            check_frames(options.env)
        # Absolute, because the working directory may change before threads and processes use it.
        options = replace(options, out=options.out.absolute())
        options.out.mkdir(parents=True, exist_ok=True)
        self._options = options
        self._make_policy = make_policy
        self._make_inference = make_inference
        self._recordings = Recordings(
            _recording_options(options, secrets.token_hex(4)),
            {"env": options.env.name, "task": options.task, "policy": options.policy_name}
            | options.details,
        )
        self._finished: queue.Queue[dict[str, Any] | None] = queue.Queue(options.ready_max)
        self._stop = threading.Event()
        self._error: Exception | None = None
        self.failures: Counter[str] = Counter()
        """Number of failures by kind."""
        self.finished_count = 0
        """Number of episodes in the manifest, including those not yet iterated over."""
        # The thread alone uses what follows.
        self._ready = ReadyQueue(options.worker_count, 0.02)
        self._states: list[State] = [None] * options.worker_count
        self._under_way = [False] * options.worker_count
        """True for a worker if its current episode is wanted."""
        self._resting: list[int] = []
        """Workers at the start of an episode that is wanted only if another one is lost."""
        self._failure_counts = [0] * options.worker_count
        # Not a daemon: it must end its environments before the interpreter ends.
        self._thread = threading.Thread(target=self._run, name="episode-generator")
        self._thread.start()

    def __enter__(self) -> "EpisodeGenerator":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stop(self) -> None:
        """Make the iterator end at its next round. From any thread, or a signal handler."""
        self._stop.set()

    def close(self) -> None:
        """Stop the environments and wait until they are gone. Idempotent."""
        self.stop()
        self._thread.join()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while (episode := self._next()) is not None:
            yield episode

    def _next(self) -> dict[str, Any] | None:
        # A timeout, so that signals are handled during the wait.
        while True:
            try:
                episode = self._finished.get(timeout=_POLL_S)
            except queue.Empty:
                if self._stop.is_set():
                    return None
                if self._thread.is_alive() or not self._finished.empty():
                    continue
                episode = None
            if episode is None and self._error is not None:
                raise self._error
            return episode

    def _run(self) -> None:
        options = self._options
        try:
            pool = EnvProcesses(
                options.env if options.media == "none" else with_frames(options.env),
                _pool_options(options),
                recording=asdict(self._recordings.options),
            )
            try:
                with pool:
                    self._loop(pool)
            finally:
                self._recordings.clean()
        except Exception as error:  # noqa: BLE001 - raised again where the consumer is
            self._error = error
        finally:
            self._put(None)

    def _put(self, episode: dict[str, Any] | None) -> None:
        while not self._stop.is_set():
            try:
                self._finished.put(episode, timeout=_POLL_S)
            except queue.Full:
                continue
            return

    def _loop(self, pool: EnvProcesses) -> None:
        inference: Inference | None = None
        while self.finished_count < self._options.episode_count and not self._stop.is_set():
            patience_s = self._patience_s()
            for event in pool.poll(_POLL_S if patience_s is None else patience_s):
                if isinstance(event, GroupReady):
                    self._group_ready(event, is_first=bool(pool.arrays(event.group).first[0]))
                else:
                    self._group_failed(event)
            if inference is None and pool.parts:
                (part,) = pool.parts
                policy = self._make_policy(part.observation_space, part.action_space)
                inference = self._make_inference(policy)
                self._states = [inference.initial_state] * self._options.worker_count
            if inference and self._patience_s() == 0.0:
                self._turn(pool, inference)

    def _patience_s(self) -> float | None:
        """Return how long to wait for more environments; only wanted episodes count."""
        return self._ready.patience_s(sum(self._under_way), now=time.monotonic())

    def _turn(self, pool: EnvProcesses, inference: Inference) -> None:
        groups = self._ready.take()
        states = [self._states[group] for group in groups]
        arrays = [pool.arrays(group) for group in groups]
        played = play_round(arrays, inference, states, self._options.model_version)
        for group, state in zip(groups, played.decision.states, strict=True):
            pool.step(group)
            self._states[group] = state

    def _group_ready(self, event: GroupReady, *, is_first: bool) -> None:
        group = event.group
        self._read_notes(group, event.notes)
        if is_first:
            # A new episode: the one before has been finished above, or is lost.
            self._under_way[group] = False
            if not self._retired(group):
                self._resting.append(group)
            self._begin_wanted()
        else:
            self._ready.add(group, 1, now=time.monotonic())

    def _read_notes(self, group: int, notes: dict[str, Any] | None) -> None:
        if notes is None:
            return
        for failure in notes["failures"]:
            self._note_failure(group, failure["kind"], failure["detail"], failure["trace"])
        for episode in notes["episodes"]:
            entry = self._recordings.add(episode)
            self.finished_count += 1
            self._put(entry)

    def _begin_wanted(self) -> None:
        wanted = self._options.episode_count - self.finished_count - sum(self._under_way)
        for group in self._resting[:wanted]:
            self._under_way[group] = True
            self._ready.add(group, 1, now=time.monotonic())
        del self._resting[:wanted]

    def _group_failed(self, event: GroupFailed) -> None:
        group = event.group
        self._ready.remove(group)
        self._under_way[group] = False
        self._resting = [resting for resting in self._resting if resting != group]
        self._recordings.clean(group)
        self._read_notes(group, event.notes)
        self._note_failure(group, event.kind.value, event.detail, event.trace)
        self._begin_wanted()

    def _retired(self, group: int) -> bool:
        return self._failure_counts[group] > self._options.restarts_max

    def _note_failure(self, worker: int, kind: str, detail: str, trace: str) -> None:
        """Count a failure; raise EnvironmentStartError if no worker can play another episode."""
        if kind == FailureKind.NO_FRAMES.value and not self.finished_count:
            raise EnvironmentStartError(
                f"{self._options.env.name!r} draws no frames ({detail}); use --media none"
            )
        self.failures[kind] += 1
        if self.failures[kind] == 1 and trace:
            shown = {"below": trace}
            logger.warning("the first %s, as the environment raised it:", kind, extra=shown)
        self._failure_counts[worker] += 1
        logger.warning("worker %d failed (%s): %s", worker, kind, detail)
        self._recordings.add_failure({"worker": worker, "kind": kind, "detail": detail})
        if all(self._retired(group) for group in range(self._options.worker_count)):
            raise EnvironmentStartError(
                f"every worker failed more than {self._options.restarts_max} times; "
                f"last: {kind}: {detail}"
            )


def _pool_options(options: GeneratorOptions) -> PoolOptions:
    return PoolOptions(
        env_count=options.worker_count,
        # So that each episode can be repeated from its seed alone.
        seed_each_episode=True,
        **{name: getattr(options, name) for name in _OF_THE_POOL},
    )


def _recording_options(options: GeneratorOptions, prefix: str) -> RecordingOptions:
    return RecordingOptions(
        folder=str(options.out),
        overlay=options.overlay,
        media=options.media,
        fps=options.fps,
        crf=options.crf,
        partial_prefix=prefix,
    )


def generate_episodes(settings: GenerateSettings) -> None:
    """Play and write episodes until there are enough, or until a signal."""
    spec = EnvSpec(name=settings.env, options=settings.env_options)
    check_environment(spec)
    if settings.media != "none":
        check_frames(spec)
    device = check_device(settings.device)
    check_policy_name(settings.policy)
    logger.info("seed %d (--seed repeats these episodes)", settings.seed)
    weights, version = _weights_for_episodes(settings)
    torch.set_num_threads(settings.torch_threads)
    options = GeneratorOptions(
        env=spec,
        out=settings.out,
        episode_count=settings.episodes,
        worker_count=settings.workers,
        media=settings.media,
        fps=settings.fps,
        crf=settings.crf,
        overlay=settings.overlay,
        episode_steps_max=settings.max_steps,
        restarts_max=settings.restarts_max,
        seed=settings.seed,
        task=settings.task,
        model_version=version,
        policy_name=settings.policy,
        build_s_max=settings.build_s,
        reset_s_max=settings.reset_s,
        step_s_max=settings.step_s,
        memory_bytes_max=settings.memory_limit,
        details={"greedy": settings.greedy},
    )
    episodes = EpisodeGenerator(
        options,
        make_policy=policy_factory(
            settings.policy, settings.policy_options, settings.seed, weights
        ),
        make_inference=lambda policy: Inference(
            policy, device, bfloat16=settings.bfloat16, seed=settings.seed, greedy=settings.greedy
        ),
    )
    bars = Progress(
        *(*Progress.get_default_columns(), TextColumn("{task.fields[note]}")),
        console=Console(stderr=True),
        disable=not settings.progress,
    )
    with episodes, bars, stop_on_signals(lambda _: episodes.stop()):
        bar = bars.add_task("episodes", total=options.episode_count, note="")
        for episode in episodes:
            note = f"return {episode['return_sum']:.1f} in {episode['step_count']} steps"
            if episodes.failures:
                note += f", {episodes.failures.total()} failures"
            bars.update(bar, completed=episodes.finished_count, note=note)
    finished_count = episodes.finished_count
    played = f"{finished_count} episodes were added to {options.out / MANIFEST}"
    if finished_count < options.episode_count:
        click.echo(f"interrupted; {played}", err=True)
        raise SystemExit(130)
    with (options.out / MANIFEST).open("rb") as lines:
        click.echo(f"{played}, which has {sum(1 for _ in lines)}")


def _weights_for_episodes(
    settings: GenerateSettings,
) -> tuple[Mapping[str, NDArray[Any]] | None, int]:
    """Return weights and version to play with; weights are None for fresh ones."""
    if settings.weights_file is not None:
        return read_weights(settings.weights_file), 0
    if not settings.server:
        return None, 0
    # A person waits, so an unreachable server is reported immediately.
    with settings.connect(buffer=settings.buffer, reconnect_s=0.0) as client:
        published = client.load_model()
        if published is None:
            raise InvalidRequestError("server", f"{settings.server} has no published weights")
        state, weights = published
        return weights, state.model_version or 0
