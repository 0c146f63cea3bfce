"""Settings of `breadbox rollout` and `breadbox generate`."""

import hashlib
import os
import re
import secrets
from pathlib import Path
from typing import Literal

from breadbox.cli.connection import Connection
from breadbox.cli.logs import LogSettings
from breadbox.cli.settings import Bytes, JsonObject, of_one_call, setting
from breadbox.model.errors import InvalidRequestError

Media = Literal["h264", "jpeg", "none"]
_QUEUE_FRAGMENTS_PER_ENV = 2


def check_worker_name(name: str) -> None:
    """Raise InvalidRequestError if the name cannot begin the ids of workers."""
    if re.fullmatch(r"[A-Za-z0-9._-]{1,100}", name) is None:
        raise InvalidRequestError(
            "worker_name", f"must be 1 to 100 letters, digits, '.', '_' and '-', got {name!r}"
        )


def default_worker_name() -> str:
    """Return a random name: fragment indices restart at 0, and hosts may have the same name."""
    host = re.sub(r"[^A-Za-z0-9_-]", "-", os.uname().nodename.split(".")[0])[:32]
    return f"{host}-{secrets.token_hex(8)}"


def random_seed() -> int:
    """Return a random seed, short enough to be typed again."""
    return secrets.randbits(32)


def mixed_seed(seed: int, worker_name: str) -> int:
    """Return a seed from 0 to 2^63 - 1 that differs by worker, and is the same for a pair."""
    digest = hashlib.blake2b(f"{seed}/{worker_name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


class PlaySettings(LogSettings):
    """Settings of environments, policy and recordings."""

    env: str
    """Gymnasium id, module:id, or module:factory."""
    env_options: JsonObject = setting(default_factory=dict)
    """Arguments of the environment."""
    policy: str = "auto"
    """auto (conv_lstm for images, else mlp), mlp, lstm, conv_lstm, random, or module:factory."""
    policy_options: JsonObject = setting(default_factory=dict)
    """Arguments of the policy."""
    device: str = "cpu"
    """Device of the policy: cpu, cuda, cuda:1."""
    bfloat16: bool = False
    """Compute in bfloat16."""
    seed: int = setting(default_factory=random_seed)
    """Seed of environments, actions and fresh weights, mixed with the worker's name. Default: a
    random one, which is logged."""
    build_s: float = setting(300.0, ge=0.1)
    """Time limit of starting an environment."""
    reset_s: float = setting(120.0, ge=0.1)
    """Time limit of one reset."""
    step_s: float = setting(30.0, ge=0.1)
    """Time limit of one step."""
    memory_limit: Bytes = setting(0, ge=0)
    """Resident size at which an environment process is replaced; 0: no limit."""
    torch_threads: int = setting(1, ge=1)
    """Threads of the policy on the CPU."""


class RolloutSettings(PlaySettings, Connection):
    """Settings of `breadbox rollout`."""

    buffer: str = "default"
    """Buffer to fill."""
    codec: str = "raw"
    """How arrays are encoded: raw, lz4, zstd, zstd:LEVEL, h264, auto."""
    metrics_listen: str = setting("", metavar="HOST:PORT")
    """HOST:PORT of metrics for Prometheus. Empty: no metrics are served."""
    num_envs: int = setting(8, ge=1)
    """Number of environments."""
    envs_per_process: int | None = setting(None, ge=1)
    """Default: 1, more for Gymnasium's tiny environments, all for a vector environment."""
    vectorize: Literal["sync", "async", "vector_entry_point"] | None = None
    """Make vector environments of a Gymnasium id, as gymnasium.make_vec does."""
    fragment_steps: int = setting(32, ge=1)
    """Steps of a fragment."""
    pace: bool = False
    """Begin a fragment only with a ticket for it, so that the buffer can wait for a slow
    environment (docs/slow-workers.md). The buffer needs --groups-per-version."""
    batch_envs: int | None = setting(None, ge=1)
    """Environments of a full inference batch. Default: half or all, whichever is faster."""
    batch_wait_s: float = setting(0.02, ge=0)
    """Longest time that a ready environment waits for others to join its batch."""
    weights: Literal["strict", "matching"] = "strict"
    """strict: published weights must fit exactly. matching: those with matching names are used."""
    declare_origin: bool = True
    """Declare spaces, wrappers and policy options, so that the server refuses other ones in the
    session. --no-declare-origin is for a worker that differs on purpose."""
    agents: JsonObject = setting(default_factory=dict)
    """Policies of an environment's agents, by pattern of their names:
    {"red_*": {"buffer": "red", "policy": "mlp"}, "*": {"learn": false}}. Default: all share one."""
    weights_kept: int = setting(10, ge=1)
    """Versions that opponents ("learn": false) are drawn from."""
    task: str = "default"
    """Label of episodes if the environment names none."""
    discount: float = setting(0.99, ge=0, le=1)
    """Discount of the reported returns."""
    worker_name: str = setting(default_factory=default_worker_name)
    """Beginning of worker ids; unique per start. Default: host and a random number."""
    deterministic: bool = False
    """Make one batch with each version, then wait for the next: no lag, and the same seed repeats
    the run (docs/learner-cookbook.md). The learner's only worker, started with it."""
    fragments_per_batch: int = setting(64, ge=1)
    """Fragments of the learner's batch; used with deterministic."""
    queue_fragments: int | None = setting(None, ge=1)
    """Fragments that may wait to be sent; beyond, environments wait. With more of them, fragments
    are staler. Default: two for each environment."""
    queue_bytes: Bytes = setting(512 * 2**20, ge=0)
    """Bytes of the fragments that may wait."""
    rebuild_interval_s: float = setting(0.0, ge=0)
    """Make environments anew after this long, between episodes; 0: never."""
    restarts_max: int | None = setting(None, ge=0)
    """Restarts of one environment process. Default: any number."""
    episode_steps_max: int | None = setting(None, ge=1)
    """Truncate longer episodes."""
    record_dir: Path | None = setting(None, folder=True)
    """Write chosen episodes to files in this folder."""
    record_every: int = setting(100, ge=1)
    """Record every N-th episode of an environment, beginning with the first."""
    record_envs: int = setting(1, ge=1)
    """Number of environments that are recorded."""
    record_media: Media = "h264"
    """Kind of frames."""
    record_crf: int = setting(23, ge=0, le=51)
    """Quality of H.264; 0: lossless, 51: worst."""
    steps_max: int | None = setting(None, ge=1)
    """End after so many steps."""
    log_interval_s: float = setting(10.0, ge=0.1)
    """Seconds between log lines with the worker's speed."""
    drain_s: float = setting(10.0, ge=0)
    """Time to deliver finished fragments after a signal to end."""
    dry_run: bool = of_one_call(False)
    """Check everything but the server, print the settings, end."""

    @property
    def queue_fragments_max(self) -> int:
        """Most fragments that wait to be sent: by default two an environment, to stay fresh."""
        return self.queue_fragments or _QUEUE_FRAGMENTS_PER_ENV * self.num_envs

    @property
    def rounds_per_version(self) -> int | None:
        """Rounds of all environments with a version, by one agent each; None to act at any time."""
        if not self.deterministic:
            return None
        return self.fragments_per_batch // self.num_envs * self.fragment_steps

    @property
    def worker_seed(self) -> int:
        """Seed of this worker's environments and actions."""
        return mixed_seed(self.seed, "" if self.deterministic else self.worker_name)

    def check_deterministic(self) -> None:
        """Refuse settings that a repeatable worker cannot have."""
        self.check_fixed(
            "deterministic",
            agents=({}, "each policy would wait for its own learner; let all agents share one"),
            batch_envs=(None, "all environments act in each round"),
            rebuild_interval_s=(0.0, "it goes by the clock"),
            memory_limit=(0, "it replaces environments in the middle of episodes"),
            pace=(False, "it makes one batch with each version"),
        )
        if self.fragments_per_batch % self.num_envs:
            raise InvalidRequestError(
                "fragments_per_batch",
                f"must be a multiple of num_envs ({self.num_envs}) with deterministic, "
                f"got {self.fragments_per_batch}",
            )


class GenerateSettings(PlaySettings, Connection):
    """Settings of `breadbox generate`."""

    out: Path = setting(folder=True)
    """Folder of the files, created if needed."""
    episodes: int = setting(1, ge=1)
    """Episodes to play, in addition to those in the folder."""
    workers: int = setting(1, ge=1)
    """Number of environments, each in its own process."""
    media: Media = "h264"
    """Kind of frames."""
    fps: int = setting(30, ge=1)
    """Frames per second of the video."""
    crf: int = setting(0, ge=0, le=51)
    """Quality of H.264; 0: lossless, 51: worst."""
    overlay: bool = False
    """Write the value into frames."""
    max_steps: int | None = setting(None, ge=1)
    """Truncate longer episodes."""
    restarts_max: int = setting(10, ge=0)
    """Restarts of one worker; the next failure ends it."""
    weights_file: Path | None = None
    """Safetensors file of the policy, or a learner's checkpoint. Default: fresh weights."""
    greedy: bool = False
    """Take the policy's likeliest actions instead of drawing them."""
    # BREADBOX_SERVER is set for other commands, so it must not choose the weights here.
    server: str = setting("", environment=False)
    """Take the current model of this server instead; BREADBOX_SERVER is ignored."""
    buffer: str = "default"
    """Buffer of that model."""
    task: str = "default"
    """Label in the manifest."""
    progress: bool = True
    """Show a progress bar."""
