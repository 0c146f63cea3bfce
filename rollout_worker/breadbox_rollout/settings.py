"""Options of the worker: from file, environment and flags, checked."""

import hashlib
import os
import re
import secrets
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from breadbox.errors import InvalidRequestError

_SECRET_FIELDS = frozenset({"token", "store_url"})
_HIDDEN = "(hidden)"
_QUEUE_FRAGMENTS_PER_ENV = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """Everything that `breadbox rollout` was told. Field names are those of the options."""

    server: str
    buffer: str
    token: str | None
    tls_ca: Path | None
    tls_cert: Path | None
    tls_key: Path | None
    store_url: str | None
    codec: str
    metrics_listen: str
    env: str
    env_options: dict[str, Any]
    num_envs: int
    envs_per_process: int | None
    vectorize: str | None
    fragment_steps: int
    policy: str
    policy_options: dict[str, Any]
    agents: dict[str, Any]
    weights_kept: int
    device: str
    bfloat16: bool
    batch_envs: int | None
    batch_wait_s: float
    weights: str
    seed: int
    task: str
    discount: float
    worker_name: str
    queue_fragments: int | None
    queue_bytes: int
    build_s: float
    reset_s: float
    step_s: float
    rebuild_interval_s: float
    restarts_max: int | None
    memory_limit: int
    episode_steps_max: int | None
    record_dir: Path | None
    record_every: int
    record_envs: int
    record_media: str
    record_crf: int
    torch_threads: int
    steps_max: int | None
    log_interval_s: float
    drain_s: float

    @property
    def queue_fragments_max(self) -> int:
        """Fragments that may wait to be sent: what was given, or two for each environment.

        Each one that waits is older by the time in which the queue ahead of it is sent, so the
        default only bridges the gap until the service answers.
        """
        return self.queue_fragments or _QUEUE_FRAGMENTS_PER_ENV * self.num_envs

    @property
    def worker_seed(self) -> int:
        """Seed of this worker's environments and actions."""
        return mixed_seed(self.seed, self.worker_name)

    def as_yaml(self) -> str:
        """Return the effective configuration, readable by `--config`, without secrets."""
        plain = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _SECRET_FIELDS:
                value = None if value is None else _HIDDEN
            plain[field.name] = str(value) if isinstance(value, Path) else value
        return yaml.safe_dump(plain, sort_keys=False)


def check_worker_name(name: str) -> None:
    """Find out whether the name can begin the ids of workers.

    Raises:
        InvalidRequestError: It is empty, too long, or has characters that ids may not have.
    """
    if re.fullmatch(r"[A-Za-z0-9._-]{1,100}", name) is None:
        raise InvalidRequestError(
            "worker_name", f"must be 1 to 100 letters, digits, '.', '_' and '-', got {name!r}"
        )


def default_worker_name() -> str:
    """Return a name that no other running worker has.

    Fragment indices begin at 0 with every start, so a name must not be used twice in a session.
    The random part alone tells names apart: hosts may be called alike, and long names are cut.
    """
    host = re.sub(r"[^A-Za-z0-9_-]", "-", os.uname().nodename.split(".")[0])[:32]
    return f"{host}-{secrets.token_hex(8)}"


def random_seed() -> int:
    """Return a seed that no other start has, short enough to be typed again."""
    return secrets.randbits(32)


def mixed_seed(seed: int, worker_name: str) -> int:
    """Return the seed of one worker, from 0 to 2^63 - 1.

    Workers that were given the same *seed* make different data, and one that is given both seed
    and name again makes the same.
    """
    digest = hashlib.blake2b(f"{seed}/{worker_name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def read_config(path: Path, known: set[str]) -> dict[str, Any]:
    """Read a YAML file of option names and values; dashes and underscores are alike.

    A secret that a dry run has hidden counts as not given.

    Raises:
        InvalidRequestError: It cannot be read, is no mapping, or names an unknown option.
    """
    try:
        data = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())
        raise InvalidRequestError("config", f"{path} cannot be read: {problem}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise InvalidRequestError("config", f"{path} holds no mapping of options to values")
    values = {str(key).replace("-", "_"): value for key, value in data.items()}
    unknown = sorted(set(values) - known)
    for secret in _SECRET_FIELDS:
        if values.get(secret) == _HIDDEN:
            del values[secret]  # Written by a dry run; the secret itself is in the environment.
    if unknown:
        raise InvalidRequestError("config", f"{path} names unknown options: {', '.join(unknown)}")
    return values
