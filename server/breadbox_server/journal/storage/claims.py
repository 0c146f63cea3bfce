"""The right to write a journal: which server has it, and whether that server still lives.

A journal holds its writer's *epoch* and token. Claiming raises the epoch, so that the store refuses
every earlier holder. A heartbeat only decides whether a starting server may claim without
`--take-over`: safety never depends on it.
"""

import json
import os
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import time
from typing import Any, Final

RENEW_S: Final = 0.25
"""Seconds between two heartbeats; also how soon a server learns that its journal was taken."""
ALIVE_S: Final = 1.0
"""Seconds until a heartbeat expires: three late ones cost a leader its journal. On two cores wanted
by ten processes they came 0.4 s late at most."""
STARTING_S: Final = 3.0
"""The same while starting: a thread sends it beside one that reads the journal back."""

_PROC: Final = Path("/proc")


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that writes a journal, as other servers see it."""

    token: str
    """Random; no two processes have the same."""
    host: str = ""
    pid: int = 0
    boot: str = ""
    """Identity of the running kernel; empty where it is not known."""
    pid_namespace: str = ""
    """In which the process has its number; a container has its own."""
    started: str = ""
    """Ticks from the boot to the start of the process; a later one of the same number has more."""

    @classmethod
    def of_this_process(cls) -> "Holder":
        """Return this process, under a fresh token."""
        boot = pid_namespace = started = ""
        with suppress(OSError):
            boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
            pid_namespace = os.readlink(_PROC / "self/ns/pid")
            _, started = _state_and_start(os.getpid())
        return cls(
            secrets.token_hex(16), socket.gethostname(), os.getpid(), boot, pid_namespace, started
        )

    @classmethod
    def from_text(cls, text: str) -> "Holder":
        """Read what `to_text` wrote; of anything else only a token is made."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError):
            return cls(text)

    def to_text(self) -> str:
        """Return one line for the journal."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps(fields, separators=(",", ":"))

    @property
    def shown(self) -> str:
        """Name of the process, for people."""
        return f"process {self.pid} on {self.host}" if self.pid else "of unknown name"

    def is_dead(self) -> bool:
        """Return True if the process has certainly ended, as far as this host can see."""
        here = Holder.of_this_process()
        known = (here.boot, here.pid_namespace, here.started)
        if "" in known or (self.boot, self.pid_namespace) != known[:2]:
            return False
        try:
            state, started = _state_and_start(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return _is_gone(self.pid)
        except OSError:
            return False
        return state in "ZX" or started != self.started


def _is_gone(pid: int) -> bool:
    """Whether there is no such process: one of another user may not be shown in /proc."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _state_and_start(pid: int) -> tuple[str, str]:
    # The name in the second field may hold anything, brackets and spaces included.
    fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to write a journal, as one server holds it."""

    journal: str
    """Identity of the journal: random, made when it was begun."""
    epoch: int
    """Grows with every claim, of whichever server."""
    holder: Holder

    def to_text(self) -> str:
        """Return the claim as the journal holds it: whole words, the epoch first."""
        return f"{self.epoch} {self.holder.token} {self.journal}"

    def raised(self, epoch: int) -> "Claim":
        """Return the same holder's claim of a later epoch."""
        return replace(self, epoch=epoch)


def owner_from_text(text: str) -> tuple[int, str, str]:
    """Return epoch, token and journal of a claim's text; 0 and empty for what is none."""
    words = text.split(" ")
    if len(words) == 3 and words[0].isdigit():
        return int(words[0]), words[1], words[2]
    return 0, text, ""


def epoch_after(*epochs: int) -> int:
    """Return an epoch beyond all known, and by the clock beyond unknown ones of a lost copy."""
    return max([round(time() * 1000), *(epoch + 1 for epoch in epochs)])


def new_journal_id() -> str:
    """Return a fresh identity of a journal."""
    return secrets.token_hex(8)


def as_claim(owner: Any, holder: Holder) -> Claim:
    """Return the claim that a store answered with, as bytes or text of `Claim.to_text`."""
    text = owner.decode() if isinstance(owner, bytes) else str(owner)
    epoch, _, journal = owner_from_text(text)
    return Claim(journal, epoch, holder)
