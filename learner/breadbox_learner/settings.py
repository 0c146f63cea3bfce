"""Everything that can be set about a learner, in one place."""

from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError

from breadbox_learner.ppo_config import PpoConfig


class SettingsError(ValueError):
    """A setting is wrong; one line that says which and why."""


class LearnSettings(PpoConfig):
    """What `breadbox learn` takes, as flags, environment variables (`BREADBOX_...`) or YAML."""

    server: str = "localhost:50051"
    """Address of the server."""
    buffer: str = "default"
    """Buffer to learn from."""
    token: str = Field(default="", repr=False)
    """Bearer token, where the server asks for one."""
    tls_ca: Path | None = None
    """PEM file of whom to trust; any of the tls settings turns encryption on."""
    tls_cert: Path | None = None
    """PEM file of this learner's certificate, where the server asks for one."""
    tls_key: Path | None = None
    """PEM file of its key."""
    store_url: str = Field(default="", repr=False)
    """Where payloads are, seen from here; empty: where the server says."""
    deadline_s: float = Field(default=10.0, ge=0.1)
    """Seconds for which server or store may be silent before a call is tried again."""
    reconnect_s: float = Field(default=30.0, ge=0)
    """Seconds for which to try to reach a server or store that went away."""
    env: str = "CartPole-v1"
    """Gymnasium id, or module:factory, of the environment; only its spaces are used, unless
    evaluate_every has it played."""
    env_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for making the environment."""
    policy: str = "auto"
    """"auto" (conv_lstm for images, else mlp), "mlp", "lstm", "conv_lstm", or module:factory; as
    the workers have it."""
    policy_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the policy."""
    reference_policy: Path | None = None
    """File of the policy that kl_coefficient pulls towards: the checkpoint of a run, or a
    safetensors file of weights alone."""
    fragments_per_batch: int = Field(default=64, ge=1)
    """Fragments of one update, for all ranks together."""
    prefetch_batches: int = Field(default=0, ge=0, le=64)
    """Batches fetched ahead while training; each makes the data a version staler."""
    publish_every: int = Field(default=1, ge=1)
    """Updates between published versions."""
    updates_max: int = Field(default=0, ge=0)
    """Stop after this many updates; 0: no limit."""
    evaluate_every: int = Field(default=0, ge=0)
    """Updates between evaluations: episodes of env played greedily, the same ones each time, by a
    process on this machine's CPU while training goes on; 0: none."""
    evaluate_episodes: int = Field(default=10, ge=1)
    """Episodes of one evaluation."""
    evaluate_steps_max: int = Field(default=100_000, ge=1)
    """Steps after which an episode of an evaluation is cut off and counts as it is."""
    target_return: float | None = None
    """Stop once the mean return of the last 100 training episodes is this high."""
    time_limit_s: float | None = Field(default=None, gt=0)
    """Stop after this many seconds."""
    wait_limit_s: float = Field(default=600.0, gt=0)
    """Give up when no batch came for this many seconds."""
    rank_limit_s: float = Field(default=120.0, gt=0)
    """Seconds a rank waits for the others before it gives up, where several train together."""
    run_dir: Path | None = None
    """Folder for progress.jsonl, event files and checkpoints, of one run; default: runs/<time>."""
    checkpoint_every: int = Field(default=20, ge=0)
    """Updates between checkpoints; 0: one at the end only, also where an error ends the run."""
    resume: bool = False
    """Go on with the run in run_dir, from its checkpoint; start one if there is none."""
    overwrite: bool = False
    """Delete the run that run_dir holds, and start anew; otherwise such a folder is refused."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Of weights and of the order of minibatches."""
    device: str = "cpu"
    """Where to train, such as "cpu" or "cuda"."""
    threads: int = Field(default=1, ge=0)
    """Threads of torch on the CPU; 0: as torch chooses."""
    tensorboard: bool = True
    """Write TensorBoard event files into run_dir."""
    wandb_project: str = ""
    """Weights & Biases project to log to; empty: none."""

    @property
    def ppo(self) -> PpoConfig:
        """The part that the updater needs."""
        return PpoConfig(**{name: getattr(self, name) for name in PpoConfig.model_fields})


def read_settings(file: Path | None, overrides: dict[str, Any]) -> LearnSettings:
    """Read a YAML file, if there is one, and put *overrides* on top.

    Raises:
        SettingsError: The file cannot be read, or a setting is unknown or out of range.
    """
    values: dict[str, Any] = {}
    if file is not None:
        try:
            loaded = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            reason = " ".join(str(error).split())
            raise SettingsError(f"{file}: cannot be read as YAML: {reason}") from error
        if not isinstance(loaded, dict):
            raise SettingsError(f"{file}: wanted names and values, got a {type(loaded).__name__}")
        values = {str(key).replace("-", "_"): value for key, value in loaded.items()}
    try:
        return LearnSettings.model_validate(values | overrides)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        where = f"{file}: " if file is not None and first["loc"][0] not in overrides else ""
        raise SettingsError(f"{where}{name}: {first['msg']}, got {first['input']!r}") from error
