"""Judge episodes one by one: usable or not, and why."""

from collections.abc import Callable, Iterable

import numpy as np

from breadbox_offline.episodes.episode import Episode
from breadbox_offline.report import FindingKind, FindingPolicy, ValidationReport

EpisodeKey = tuple[str, str | None, int]
"""Id, agent and first timestep, which differ between parts of one episode."""
HeldDigest = Callable[[Episode], bytes | None]
"""Function that returns the digest of the held part with the same key, or None."""


def validate_episodes(
    episodes: Iterable[Episode], report: ValidationReport, *, held_digest: HeldDigest | None = None
) -> list[Episode]:
    """Return usable episodes in order; report the others, repeats and conflicts."""
    digests: dict[EpisodeKey, bytes] = {}
    accepted = []
    for episode in episodes:
        judged = _judge(episode, report)
        if judged is None or _is_known(judged, report, digests, held_digest):
            continue
        accepted.append(judged)
    report.accepted_count += len(accepted)
    return accepted


def _judge(episode: Episode, report: ValidationReport) -> Episode | None:
    def note(kind: FindingKind, why: str) -> FindingPolicy:
        return report.note(
            kind, why, episode_id=episode.id, agent_id=episode.agent_id, t=episode.t_started
        )

    if not len(episode):
        note(FindingKind.EMPTY, "no step was recorded")
        return None
    if not episode.is_done:
        policy = note(FindingKind.UNFINISHED, f"nothing ended it after step {episode.t - 1}")
        if policy is FindingPolicy.SKIP:
            return None
        if policy is FindingPolicy.TRUNCATE:
            episode = episode.as_truncated()
    return episode if _rewards_pass(episode, note) else None


def _rewards_pass(episode: Episode, note: Callable[[FindingKind, str], FindingPolicy]) -> bool:
    wrong = np.flatnonzero(~np.isfinite(episode.own_rewards()))
    if not wrong.size:
        return True
    first = int(wrong[0])
    why = f"reward {episode.own_rewards()[first]} at step {episode.t_started + first}"
    return note(FindingKind.NOT_FINITE, why) is not FindingPolicy.SKIP


def _is_known(
    episode: Episode,
    report: ValidationReport,
    digests: dict[EpisodeKey, bytes],
    held_digest: HeldDigest | None,
) -> bool:
    key = (*episode.key, episode.t_started)
    held = None if held_digest is None else held_digest(episode)
    earlier = digests.get(key)
    if held is None and earlier is None:
        digests[key] = episode.content_digest()
        return False
    digest = episode.content_digest()
    if held is not None:
        kind = FindingKind.ALREADY_HELD if held == digest else FindingKind.CONFLICT
        why = "the buffer holds it" if held == digest else "the buffer holds other content of it"
    else:
        kind = FindingKind.DUPLICATE if earlier == digest else FindingKind.CONFLICT
        why = "it came before" if earlier == digest else "it came before with other content"
    report.note(kind, why, episode_id=episode.id, agent_id=episode.agent_id, t=episode.t_started)
    return True
