"""Build a learner from its settings and run it."""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final
from uuid import uuid4

import torch

from breadbox import Client
from breadbox.model.errors import (
    InvalidRequestError,
    ReplayBufferError,
    TlsError,
    UnavailableError,
)
from breadbox.model.types import WorkerSteps
from breadbox_learner.evaluation import Evaluator
from breadbox_learner.playing import EvaluationTask
from breadbox_learner.ranks import Ranks, joined
from breadbox_learner.runs import (
    JsonLines,
    Lines,
    Progress,
    RunFolder,
    RunFolderError,
    Sink,
    TensorBoard,
    WeightsAndBiases,
)
from breadbox_learner.settings import LearnSettings, membership_from_environment
from breadbox_learner.spaces import spaces_of
from breadbox_learner.training import checkpoint
from breadbox_learner.training.batching import EnvironmentSteps, EpisodeReturns
from breadbox_learner.training.checkpoint import CheckpointError, SessionState
from breadbox_learner.training.fitting import Fitting, expected_rows
from breadbox_learner.training.ppo import PpoUpdater
from breadbox_learner.training.source import LeaseSource, Share
from breadbox_learner.training.trainer import (
    NullPublisher,
    Outcome,
    Publisher,
    Trainer,
    TrainerState,
)
from breadbox_policies import (
    PolicyModule,
    WeightsMismatchError,
    check_greedy,
    compute_repeatably,
    make_policy,
    set_policy_weights,
)

_log = logging.getLogger(__name__)

OUTAGE_S_MAX: Final = 10.0
"""Seconds for which a run that was asked to end still tries to reach its server."""
_POLL_S: Final = 0.5


def build_policy(settings: LearnSettings) -> PolicyModule:
    """Make the policy, with weights drawn under the settings' seed."""
    spaces = spaces_of(settings.env, settings.env_options)
    torch.manual_seed(settings.seed)
    policy = make_policy(
        settings.policy, spaces.observation, spaces.action, **settings.policy_options
    )
    if settings.evaluate_every:
        check_greedy(policy, "evaluate_every")
    try:
        return policy.to(settings.device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidRequestError("device", f"{settings.device!r}: {reason}") from error


def build_reference(settings: LearnSettings) -> PolicyModule | None:
    """Make the policy that `kl_coefficient` pulls towards, or None; check a named file anyway."""
    path = settings.reference_policy
    if path is None:
        if settings.kl_coefficient:
            raise InvalidRequestError(
                "reference_policy", "is needed where kl_coefficient is over 0"
            )
        return None
    reference = build_policy(settings)
    try:
        set_policy_weights(reference, checkpoint.read_policy_weights(path))
    except CheckpointError as error:
        raise InvalidRequestError("reference_policy", str(error)) from error
    except WeightsMismatchError as error:
        raise InvalidRequestError("reference_policy", f"{path}: {error}") from error
    if not settings.kl_coefficient:
        _log.warning("reference_policy %s does nothing while kl_coefficient is 0", path)
        return None
    return reference.requires_grad_(requires_grad=False)


def connect(settings: LearnSettings) -> Client:
    """Make the client, without a call to the server."""
    return settings.connect(
        buffer=settings.buffer, deadline_s=settings.deadline_s, reconnect_s=settings.reconnect_s
    )


def warn_if_unreachable(settings: LearnSettings) -> None:
    """Warn if the server is unreachable and the run waits for it; raise TlsError immediately."""
    if settings.reconnect_s <= 0:
        return  # The run does not wait: it ends immediately with the same error.
    with connect(settings.model_copy(update={"reconnect_s": 0.0})) as client:
        try:
            client.get_buffer()
        except TlsError:
            raise
        except UnavailableError as error:
            _log.warning("trying for %g s: %s", settings.reconnect_s, error)


def dry_run_text(settings: LearnSettings) -> str:
    """Build everything that needs no server, and return the settings as YAML."""
    policy = build_policy(settings)
    build_reference(settings)
    connect(settings).close()
    count = sum(parameter.numel() for parameter in policy.parameters())
    return f"{settings.as_yaml()}# policy with {count} parameters: fits"


def run(
    settings: LearnSettings,
    stopped: Callable[[], bool],
    asked_to_end: threading.Event | None = None,
) -> Outcome:
    """Train to an end; call `stopped` each second. Once `asked_to_end`, outages end the run."""
    membership = membership_from_environment()
    if settings.deterministic:
        compute_repeatably()
    if settings.threads:
        torch.set_num_threads(settings.threads)
    policy = build_policy(settings)
    reference = build_reference(settings)
    device = torch.device(settings.device)
    # Before any wait, so that an unusable folder ends the run immediately.
    folder = RunFolder.open(settings) if membership.is_main else None
    if membership.is_main:
        warn_if_unreachable(settings)
    with (
        joined(membership, device=device, limit_s=settings.rank_limit_s) as ranks,
        connect(settings) as client,
        _given_up_in_time(client, asked_to_end or threading.Event()),
    ):
        updater = PpoUpdater(
            policy,
            settings.ppo,
            device=device,
            seed=settings.seed,
            reference=reference,
            ranks=ranks,
        )
        return _Run(settings, ranks, client, policy, updater, folder).train(stopped)


@contextmanager
def _given_up_in_time(client: Client, asked_to_end: threading.Event) -> Iterator[None]:
    """Close a client, which ends its waits, if its run is to end and the server is unreachable."""
    over = threading.Event()

    def watch() -> None:
        asked_at = None
        while not over.wait(_POLL_S):
            if asked_at is None:
                asked_at = time.monotonic() if asked_to_end.is_set() else None
            elif time.monotonic() - asked_at >= OUTAGE_S_MAX and (outage := client.outage):
                _log.warning("ending without the server: %s", outage)
                client.close()
                return

    thread = threading.Thread(target=watch, name="breadbox-end", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@dataclass(slots=True)
class _Run:
    settings: LearnSettings
    ranks: Ranks
    client: Client
    policy: PolicyModule
    updater: PpoUpdater
    folder: RunFolder | None
    """Folder of rank 0, or None on other ranks, which write nothing."""
    returns: EpisodeReturns = field(default_factory=EpisodeReturns)
    environment: EnvironmentSteps = field(default_factory=EnvironmentSteps)

    @property
    def identity(self) -> dict[str, Any]:
        # A run can only be continued with these settings unchanged.
        plain = self.settings.plain()
        return {name: plain[name] for name in ("env", "env_options", "policy", "policy_options")}

    def train(self, stopped: Callable[[], bool]) -> Outcome:
        folder = self.folder
        state, session = self._restored()
        update_before = state.update
        with ExitStack() as stack:
            # Everything that can fail comes before the session, which ends that of another run.
            run_id = session.session_id or uuid4().hex
            progress = stack.enter_context(Progress(self._sinks(run_id)))
            evaluator = self._evaluator()
            if evaluator is not None:
                stack.callback(evaluator.close)
            publisher = self._publisher(replace(session, session_id=run_id), stack)
            with suppress(ReplayBufferError):  # What is wrong shows in the first fetch.
                self.environment.leave_out(self._workers())
            if folder is not None:
                _log.info(
                    "session %s on %s, buffer %s, run folder %s; waiting for workers",
                    publisher.session_id,
                    self.client.address,
                    self.client.buffer,
                    folder.path,
                )
                stack.callback(
                    lambda: _log.info(
                        "ended after update %d; run folder %s", state.update, folder.path
                    )
                )
            source = self._source(publisher)
            stack.callback(source.close)
            outcome = Trainer(
                settings=self.settings,
                updater=self.updater,
                source=source,
                publisher=publisher,
                progress=progress,
                returns=self.returns,
                environment=self.environment,
                state=state,
                stopped=stopped,
                checkpoint=lambda state: self._save(state, publisher),
                ranks=self.ranks,
                evaluations=evaluator,
                workers=self._workers,
            ).run()
        if folder is not None and 0 < update_before == state.update:
            _log.warning(
                "the run in %s had come to its end at update %d: a higher --target-return, "
                "--updates-max or --time-limit-s goes on with it, --overwrite or another --run-dir "
                "starts anew",
                folder.path,
                update_before,
            )
        return outcome

    def _workers(self) -> Sequence[WorkerSteps]:
        """Return where the steps of workers went; only rank 0 writes records, and asks."""
        # Reports come by the clock, so that repeatable records go without them.
        if self.folder is None or self.settings.deterministic:
            return ()
        return self.client.get_buffer(with_workers=True).workers

    def _publisher(self, session: SessionState, stack: ExitStack) -> Publisher | NullPublisher:
        if not self.ranks.membership.is_main:
            return NullPublisher(self.ranks.from_main(b"").decode(), session.model_version)
        publisher = Publisher(
            self.client,
            session_id=session.session_id,
            model_version=session.model_version,
            take_over=self.settings.take_over,
        )
        publisher.start(self.policy)
        stack.callback(publisher.end)
        if self.folder is not None:
            self.folder.write_session(publisher.session_id)
        self.ranks.from_main(publisher.session_id.encode())
        return publisher

    def _evaluator(self) -> Evaluator | None:
        settings = self.settings
        if not (settings.evaluate_every and self.ranks.membership.is_main):
            return None
        return Evaluator(
            EvaluationTask(
                env=settings.env,
                env_options=settings.env_options,
                policy=settings.policy,
                policy_options=settings.policy_options,
                episodes=settings.evaluate_episodes,
                steps_max=settings.evaluate_steps_max,
            )
        )

    def _source(self, publisher: Publisher | NullPublisher) -> LeaseSource:
        membership = self.ranks.membership
        # Different at each start, because the server remembers granted requests.
        nonce = self.ranks.from_main(uuid4().hex.encode()).decode()
        settings = self.settings
        spaces = spaces_of(settings.env, settings.env_options)
        if settings.prefetch_depth < settings.prefetch_batches and membership.is_main:
            _log.warning(
                "max_staleness_at_use: %d batches are fetched ahead, not %d",
                *(settings.prefetch_depth, settings.prefetch_batches),
            )
        return LeaseSource(
            self.client,
            fragment_count=settings.fragments_per_batch,
            share=Share(membership.rank, membership.world_size, nonce),
            prefetch_batches=settings.prefetch_depth,
            max_staleness_at_use=settings.max_staleness_at_use,
            model_version=lambda: publisher.model_version,
            device=settings.device,
            session_id=publisher.session_id,
            fitting=Fitting(expected_rows(spaces, self.policy.initial_state(1)), spaces),
            while_waiting=lambda: publisher.keep(self.policy),
            is_repeatable=settings.deterministic,
        )

    def _restored(self) -> tuple[TrainerState, SessionState]:
        """Restore the checkpoint, if `resume` is set and there is one; rank 0 reads it for all."""
        data = b""
        if self.folder is not None and self.settings.resume:
            data = self.folder.read_checkpoint()
        data = self.ranks.from_main(data)
        state, session = TrainerState(), SessionState()
        if data:
            state, session = checkpoint.restore(
                data,
                updater=self.updater,
                returns=self.returns,
                environment=self.environment,
                identity=self.identity,
                source=str(self.folder.checkpoint if self.folder is not None else "checkpoint"),
            )
        if self.folder is not None and self.settings.resume:
            self.folder.drop_records_after(state.update)
            if data:
                _log.info("going on in %s after update %d", self.folder.path, state.update)
            else:
                session.session_id = self.folder.read_session()
                _log.info("no checkpoint in %s: starting from scratch", self.folder.path)
        return state, session

    def _save(self, state: TrainerState, publisher: Publisher | NullPublisher) -> None:
        if self.folder is None:
            return
        data = checkpoint.encode(
            updater=self.updater,
            state=state,
            returns=self.returns,
            environment=self.environment,
            session=SessionState(publisher.session_id, publisher.model_version),
            identity=self.identity,
        )
        self.folder.write_checkpoint(data)

    def _sinks(self, run_id: str) -> list[Sink]:
        settings, folder = self.settings, self.folder
        if folder is None:
            return []
        try:
            sinks: list[Sink] = [JsonLines(folder.progress), Lines(_log.info)]
            if settings.tensorboard:
                sinks.append(TensorBoard(folder.path, self.environment.total))
        except OSError as error:
            raise RunFolderError(folder.path, error) from error
        if settings.wandb_project:
            if settings.token:
                # The package stores the command line with the run.
                sys.argv[:] = [text.replace(settings.token, "***") for text in sys.argv]
            sinks.append(
                WeightsAndBiases(settings.wandb_project, run_id, settings.plain(), folder.path)
            )
        return sinks
