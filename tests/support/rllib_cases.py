"""The recorded cases of RLlib's offline pre-learner: finding them, and describing our answers.

Nothing here, and nothing that uses it, looks at the name of a case.
"""

import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from breadbox_offline.episodes.episode import Episode

ORACLES = Path(
    os.environ.get("BREADBOX_ORACLES")
    or Path(__file__).resolve().parents[2].parent / "shared/oracles"
)
FOLDER = ORACLES / "rllib"


def load_cases() -> list[dict[str, Any]]:
    """All cases, or none where the folder is absent."""
    paths = sorted((FOLDER / "cases").glob("*.json"))
    return [json.loads(path.read_text()) for path in paths]


def load_codec() -> ModuleType:
    """The folder's own codec between JSON and numpy."""
    spec = importlib.util.spec_from_file_location("rllib_case_codec", FOLDER / "codec.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def describe(episode: Episode) -> dict[str, Any]:
    """An episode as the cases describe one."""
    return {
        "id": episode.id,
        "agent_id": episode.agent_id,
        "module_id": episode.module_id,
        "length": len(episode),
        "t_started": episode.t_started,
        "lookback": episode.lookback,
        "observations": episode.own_observations(),
        "actions": episode.own_actions(),
        "rewards": episode.own_rewards(),
        "terminated": episode.terminated,
        "truncated": episode.truncated,
        "extra_model_outputs": episode.own_extra_model_outputs(),
        "infos": [dict(info) for info in episode.own_infos()],
    }


def restrict(outcome: Any, expected: Any) -> Any:
    """`outcome` with only what the case speaks of: its entries, and its facts of an episode.

    Batches are left whole: a column too many is a difference.
    """
    if not isinstance(expected, dict) or not isinstance(outcome, dict):
        return outcome
    return {
        name: [
            {fact: value for fact, value in mine.items() if fact in theirs}
            for mine, theirs in zip(outcome[name], wanted, strict=True)
        ]
        if _lists_episodes(wanted) and len(wanted) == len(outcome[name])
        else outcome[name]
        for name, wanted in expected.items()
        if name in outcome
    }


def _lists_episodes(wanted: Any) -> bool:
    return (
        isinstance(wanted, list)
        and bool(wanted)
        and isinstance(wanted[0], dict)
        and "id" in wanted[0]
    )


def make_episode(spec: dict[str, Any]) -> Episode:
    """An episode that a case lists step by step."""
    from breadbox_offline.decoding import rows

    return Episode(
        id=spec["id"],
        observations=rows.stack(spec["observations"]),
        actions=rows.stack(spec["actions"]),
        rewards=np.array(spec["rewards"]),
        terminated=spec["terminated"],
        truncated=spec["truncated"],
        t_started=spec.get("t_started", 0),
        lookback=spec.get("len_lookback_buffer", 0),
        extra_model_outputs={
            name: rows.stack(values)
            for name, values in (spec.get("extra_model_outputs") or {}).items()
        },
    )


def make_toy_episode(
    episode_id: str, length: int, *, start: int = 0, terminated: bool, truncated: bool
) -> Episode:
    """The toy episode of the buffer cases: obs[k] = [k], action k, reward k + 1, `lp` = k."""
    steps = np.arange(start, start + length)
    return Episode(
        id=episode_id,
        observations=np.arange(start, start + length + 1, dtype=np.float32)[:, None],
        actions=steps.astype(np.int64),
        rewards=(steps + 1).astype(np.float64),
        terminated=terminated,
        truncated=truncated,
        t_started=start,
        extra_model_outputs={"lp": steps.astype(np.float32)},
    )
