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
from breadbox_learner.offline.episode import Episode

ORACLES = Path(
    os.environ.get("BREADBOX_ORACLES")
    or Path(__file__).resolve().parents[2].parent / "shared/oracles"
)
FOLDER = ORACLES / "rllib"
UUID = {"__uuid4_hex__": True}


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


def restrict(described: Any, wanted: Any) -> Any:
    """`described` with only the keys that the case states, wherever it states a plain map."""
    if isinstance(wanted, dict) and isinstance(described, dict) and "__nd__" not in wanted:
        if wanted.keys() == UUID.keys():
            return described
        return {
            key: restrict(value, wanted[key]) for key, value in described.items() if key in wanted
        }
    if isinstance(wanted, list) and isinstance(described, list):
        if len(wanted) != len(described):
            return described
        return [restrict(mine, theirs) for mine, theirs in zip(described, wanted, strict=True)]
    return described


def make_episode(spec: dict[str, Any]) -> Episode:
    """An episode that a case lists step by step."""
    from breadbox_learner.offline import trees

    return Episode(
        id=spec["id"],
        observations=trees.stack(spec["observations"]),
        actions=trees.stack(spec["actions"]),
        rewards=np.array(spec["rewards"]),
        terminated=spec["terminated"],
        truncated=spec["truncated"],
        t_started=spec.get("t_started", 0),
        lookback=spec.get("len_lookback_buffer", 0),
        extra_model_outputs={
            name: trees.stack(values)
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
