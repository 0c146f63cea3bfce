"""Everything that can be set about a learner, in one place."""

from pathlib import Path

from breadbox.cli.connection import Connection
from breadbox.cli.logs import LogSettings
from breadbox.cli.settings import JsonObject, of_one_call, setting
from breadbox_learner.ppo_config import PpoConfig


class LearnSettings(PpoConfig, LogSettings, Connection):
    """What `breadbox learn` takes."""

    buffer: str = "default"
    """Buffer to learn from."""
    deadline_s: float = setting(10.0, ge=0.1)
    """Seconds for which server or store may be silent before a call is tried again."""
    reconnect_s: float = setting(30.0, ge=0)
    """Seconds for which to try to reach a server or store that went away."""
    env: str = "CartPole-v1"
    """Gymnasium id, or module:factory, of the environment; only its spaces are used, unless
    evaluate_every has it played."""
    env_options: JsonObject = setting(default_factory=dict)
    """Keyword arguments for making the environment."""
    policy: str = "auto"
    """"auto" (conv_lstm for images, else mlp), "mlp", "lstm", "conv_lstm", or module:factory; as
    the workers have it."""
    policy_options: JsonObject = setting(default_factory=dict)
    """Keyword arguments of the policy."""
    reference_policy: Path | None = None
    """File of the policy that kl_coefficient pulls towards: the checkpoint of a run, or a
    safetensors file of weights alone."""
    fragments_per_batch: int = setting(64, ge=1)
    """Fragments of one update, for all ranks together."""
    prefetch_batches: int = setting(0, ge=0, le=64)
    """Batches fetched ahead while training; each makes the data a version staler."""
    publish_every: int = setting(1, ge=1)
    """Updates between published versions."""
    updates_max: int = setting(0, ge=0)
    """Stop after this many updates; 0: no limit."""
    evaluate_every: int = setting(0, ge=0)
    """Updates between evaluations: episodes of env played greedily, the same ones each time, by a
    process on this machine's CPU while training goes on; 0: none."""
    evaluate_episodes: int = setting(10, ge=1)
    """Episodes of one evaluation."""
    evaluate_steps_max: int = setting(100_000, ge=1)
    """Steps after which an episode of an evaluation is cut off and counts as it is."""
    target_return: float | None = None
    """Stop once the mean return of the last 100 training episodes is this high."""
    time_limit_s: float | None = setting(None, gt=0)
    """Stop after this many seconds."""
    wait_limit_s: float = setting(600.0, gt=0)
    """Give up when no batch came for this many seconds."""
    rank_limit_s: float = setting(120.0, gt=0)
    """Seconds a rank waits for the others before it gives up, where several train together."""
    run_dir: Path | None = setting(None, folder=True)
    """Folder for progress.jsonl, event files and checkpoints, of one run; default: runs/<time>."""
    checkpoint_every: int = setting(20, ge=0)
    """Updates between checkpoints; 0: one at the end only, also where an error ends the run."""
    resume: bool = False
    """Go on with the run in run_dir, from its checkpoint; start one if there is none."""
    overwrite: bool = False
    """Delete the run that run_dir holds, and start anew; otherwise such a folder is refused."""
    seed: int = setting(0, ge=0, lt=2**63)
    """Of weights and of the order of minibatches."""
    device: str = "cpu"
    """Where to train, such as "cpu" or "cuda"."""
    threads: int = setting(1, ge=0)
    """Threads of torch on the CPU; 0: as torch chooses."""
    tensorboard: bool = True
    """Write TensorBoard event files into run_dir."""
    wandb_project: str = ""
    """Weights & Biases project to log to; empty: none."""

    dry_run: bool = of_one_call(False)
    """Check everything but the server, print the settings, and end."""

    @property
    def ppo(self) -> PpoConfig:
        """The part that the updater needs."""
        return PpoConfig(**self.chosen(PpoConfig.model_fields))
