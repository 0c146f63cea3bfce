"""Settings of a learner, without torch, so that the command line starts fast."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from breadbox.cli.connection import Connection
from breadbox.cli.logs import LogSettings
from breadbox.cli.settings import JsonObject, Settings, of_one_call, setting
from breadbox.model.errors import InvalidRequestError
from breadbox_learner.schedules import PositiveSchedule, Schedule, ScheduleText


class PpoConfig(Settings):
    """Settings of training. The defaults learn CartPole on a CPU."""

    discount: float = setting(0.99, ge=0, le=1)
    """gamma: weight of a reward one step later."""
    gae_lambda: float = setting(0.95, ge=0, le=1)
    """lambda of advantage estimation: 0 trusts the value function, 1 the rewards."""
    normalize_rewards: bool | None = None
    """Divide rewards by the running deviation of the discounted return. Fragments keep their own;
    values are in units of what is trained on. Default: where actions are floating-point numbers."""
    reward_clip: float = setting(10.0, gt=0)
    """Bound of a reward's size after normalize_rewards."""
    advantages: Literal["gae", "vtrace"] = "gae"
    """"gae"; or "vtrace", which also corrects targets and advantages for the policy that acted.
    docs/studies/lag.md compares both on old data."""
    vtrace_rho_max: float = setting(2.0, gt=0)
    """rho of V-trace: bound of the weight of a step's own temporal difference, in the targets of
    the value and in the gradient of the policy."""
    vtrace_c_max: float = setting(1.0, gt=0)
    """c of V-trace: bound of the weight with which later temporal differences are carried back; at
    most vtrace_rho_max."""
    epochs: int = setting(4, ge=1)
    """Passes over each batch."""
    minibatch_fragments: int = setting(4, ge=1)
    """Fragments per gradient step and rank. A policy without memory trains on as many steps as they
    have, drawn from the whole batch; a recurrent one on whole fragments."""
    burn_in_steps: int = setting(0, ge=0)
    """First steps of a fragment that only renew the state of a policy with memory, which an older
    version left, by the current weights; no loss is taken on them. Less than a fragment has."""
    accumulation_count: int = setting(1, ge=1)
    """Parts in which a minibatch is processed, to save memory; the gradient is the same."""
    lr: PositiveSchedule = setting(Schedule(2.5e-3))
    """Adam's step size, over 0; or a schedule: 3e-4:0 goes in a line from 3e-4 to 0 over the run,
    to updates_max or environment_steps_max; 3e-4:0@300updates and 3e-4:0@1e6steps over so many
    updates, or steps of the environments."""
    clip: PositiveSchedule = setting(Schedule(0.2))
    """Bound of |ratio - 1| between trained and proximal policy, over 0; or a schedule as of lr."""
    advantage_normalization: Literal["batch", "minibatch", "off"] = "batch"
    """Scale advantages to mean 0 and deviation 1 over the batch of all ranks, over each minibatch
    of all ranks, or not at all."""
    value_coefficient: float = setting(0.5, ge=0)
    """Weight of the value loss."""
    value_loss: Literal["mse", "huber"] = "mse"
    """Half the squared error; "huber": linear beyond huber_delta, for returns with outliers."""
    huber_delta: float = setting(1.0, gt=0)
    """Error of the value, in reward units, from which on "huber" is linear."""
    value_clip: float = setting(0.0, ge=0)
    """Most that a value may move in one update, in reward units; 0: no bound."""
    entropy_coefficient: ScheduleText = setting(Schedule(0.01))
    """Weight of the entropy bonus, at least 0; or a schedule as of lr."""
    kl_coefficient: float = setting(0.0, ge=0)
    """Weight of the divergence from a reference policy; 0: no reference policy."""
    target_kl: float = setting(0.0, ge=0)
    """Stop the passes over a batch once the mean divergence from the proximal policy exceeds 1.5
    times this, in nats; 0: never."""
    staleness_weight_max: float = setting(2.0, ge=0)
    """Bound of the weight that corrects the gradient of the policy for staleness, with "gae"; 0: no
    correction."""
    gradient_norm_max: float = setting(0.5, ge=0)
    """Norm to which a gradient is clipped; 0: not clipped."""
    amp: Literal["off", "bfloat16", "float16"] = "off"
    """Mixed precision."""
    value_warmup_updates: int = setting(0, ge=0)
    """First updates, which train only the value; the policy is neither trained nor published."""


class LearnSettings(PpoConfig, LogSettings, Connection):
    """Settings of `breadbox learn`."""

    buffer: str = "default"
    """Buffer to learn from."""
    deadline_s: float = setting(10.0, ge=0.1)
    """Seconds that server or store may take to answer before a call is retried."""
    reconnect_s: float = setting(30.0, ge=0)
    """Seconds for which to retry while server or store are unreachable."""
    env: str = "CartPole-v1"
    """Gymnasium id, or module:factory, of the environment. Only its spaces are used, unless
    evaluate_every has it played."""
    env_options: JsonObject = setting(default_factory=dict)
    """Keyword arguments for making the environment."""
    policy: str = "auto"
    """"auto" (conv_lstm for images, else mlp), "mlp", "lstm", "conv_lstm", or module:factory; the
    same as the workers'."""
    policy_options: JsonObject = setting(default_factory=dict)
    """Keyword arguments of the policy."""
    reference_policy: Path | None = None
    """File of the policy that kl_coefficient pulls towards: a run's checkpoint, or a safetensors
    file of weights alone."""
    fragments_per_batch: int = setting(64, ge=1)
    """Fragments of one update, for all ranks together."""
    prefetch_batches: int = setting(0, ge=0, le=64)
    """Batches fetched ahead while training; each makes the data a version staler."""
    max_staleness_at_use: int | None = setting(None, ge=0)
    """Versions that a fragment may be behind at its update; staler ones are left out, and no more
    batches are fetched ahead than this allows. Default: any number."""
    deterministic: bool = False
    """Train in turns with one worker that has this setting and as many fragments_per_batch, so that
    the same seeds repeat the run; any other batch ends it (docs/learner-cookbook.md)."""
    publish_every: int = setting(1, ge=1)
    """Updates between published versions."""
    updates_max: int = setting(0, ge=0)
    """Stop after this many updates; 0: no limit."""
    environment_steps_max: int = setting(0, ge=0)
    """Stop once the environments have made this many steps, as in the records; 0: no limit."""
    evaluate_every: int = setting(0, ge=0)
    """Updates between evaluations; 0: none. A process on this machine's CPU plays episodes of env
    greedily, the same ones each time, while training continues."""
    evaluate_episodes: int = setting(10, ge=1)
    """Episodes of one evaluation."""
    evaluate_steps_max: int = setting(100_000, ge=1)
    """Steps after which an episode of an evaluation is cut off; its return counts as it is."""
    target_return: float | None = None
    """Stop once the mean return of the last 100 training episodes is this high."""
    time_limit_s: float | None = setting(None, gt=0)
    """Stop after this many seconds."""
    wait_limit_s: float = setting(600.0, gt=0)
    """Give up when no batch came for this many seconds."""
    rank_limit_s: float = setting(120.0, gt=0)
    """Seconds that a rank waits for the others before it gives up."""
    run_dir: Path | None = setting(None, folder=True)
    """Folder for progress.jsonl, event files and checkpoints, of one run; default: runs/<time>."""
    checkpoint_every: int = setting(20, ge=0)
    """Updates between checkpoints; 0: only one at the end, even if an error ends the run."""
    resume: bool = False
    """Continue the run in run_dir from its checkpoint, or start one if there is none."""
    overwrite: bool = False
    """Delete the run in run_dir, and start anew; otherwise such a folder is refused."""
    take_over: bool = of_one_call(False)
    """Start a session although another process uses the session that this ends."""
    seed: int = setting(0, ge=0, lt=2**63)
    """Seed of weights and of the order of minibatches."""
    device: str = "cpu"
    """Device to train on, such as "cpu" or "cuda"."""
    threads: int = setting(1, ge=0)
    """Threads of torch on the CPU; 0: torch's default."""
    tensorboard: bool = True
    """Write TensorBoard event files into run_dir."""
    wandb_project: str = ""
    """Weights & Biases project to log to; empty: none."""
    dry_run: bool = of_one_call(False)
    """Check everything but the server, print the settings, and end."""

    @property
    def prefetch_depth(self) -> int:
        """Batches to fetch ahead: so few that fresh ones stay within max_staleness_at_use."""
        limit = self.max_staleness_at_use
        if limit is None:
            return self.prefetch_batches
        return min(self.prefetch_batches, limit * self.publish_every)

    @property
    def ppo(self) -> PpoConfig:
        """Settings of the updater; its schedules end with the run, unless they say when."""
        chosen = self.chosen(PpoConfig.model_fields)
        for name, value in chosen.items():
            if isinstance(value, Schedule):
                try:
                    chosen[name] = value.over(self.updates_max, self.environment_steps_max)
                except ValueError as error:
                    raise InvalidRequestError(name, str(error)) from error
        return PpoConfig(**chosen)


@dataclass(frozen=True, slots=True)
class Membership:
    """This process's rank among its peers."""

    rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        """True if this process acts for all: session, versions, checkpoints, records."""
        return self.rank == 0


def membership_from_environment(environment: Mapping[str, str] = os.environ) -> Membership:
    """Read RANK and WORLD_SIZE, which torchrun sets; without them there is a single rank."""
    try:
        membership = Membership(
            int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1"))
        )
    except ValueError as error:
        raise InvalidRequestError(
            "RANK and WORLD_SIZE", f"must be whole numbers: {error}"
        ) from error
    if not 0 <= membership.rank < membership.world_size:
        raise InvalidRequestError(
            "RANK",
            f"must be from 0 to WORLD_SIZE - 1, got {membership.rank} of {membership.world_size}",
        )
    return membership
