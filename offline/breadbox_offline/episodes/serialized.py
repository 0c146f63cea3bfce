"""Serialize episodes in the layout of RLlib 2.41 to 2.60, which can read them."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from breadbox.model.trees import Tree
from breadbox_offline.decoding.msgpack_codec import pack_message, unpack_message
from breadbox_offline.decoding.rows import as_arrays, stack
from breadbox_offline.decoding.spaces import (
    SpaceSpec,
    batch_from_jsonable,
    composite_spec,
    from_jsonable,
)
from breadbox_offline.episodes.episode import Episode
from breadbox_offline.errors import EpisodeStateError, OfflineDataError, placed
from breadbox_offline.limits import DEFAULT_LIMITS, DataLimits, nested_at_most
from breadbox_offline.report import FindingKind, ValidationReport

IN_STATES = "in_states"
STEP_TIMES = "step_times"
_DEPTH_MAX = 16


def map_serialized(
    items: Iterable[bytes], report: ValidationReport, *, limits: DataLimits = DEFAULT_LIMITS
) -> list[Episode]:
    """Return the episodes of serialized ones, in order; report those that cannot be read."""
    episodes = []
    for row, item in enumerate(items):
        try:
            episodes.append(unpack_episode(item, limits=limits))
        except OfflineDataError as error:
            report.note(FindingKind.MALFORMED, str(error), row=row, column="item")
    return episodes


def unpack_episode(data: bytes, *, limits: DataLimits = DEFAULT_LIMITS) -> Episode:
    """Return one serialized episode; EpisodeStateError if it is corrupt or of an unknown layout."""
    with nested_at_most():
        state = unpack_message(data, limits=limits)
        if not isinstance(state, dict):
            raise EpisodeStateError(
                f"a serialized episode is a map, this is a {type(state).__name__}"
            )
        return episode_from_state(state)


def pack_episode(episode: Episode) -> bytes:
    """Serialize an episode; EpisodeStateError if, for example, one of its infos has an object."""
    return pack_message(episode_to_state(episode))


def episode_to_state(episode: Episode) -> dict[str, Any]:
    """Return the episode as plain values and arrays."""
    infos = episode.infos
    if infos is None:
        infos = [{} for _ in range(len(episode.rewards) + 1)]

    def buffer(data: Any, *, finalized: bool = True) -> dict[str, Any]:
        lookback = episode.lookback
        return {"data": data, "lookback": lookback, "finalized": finalized, "space": None}

    custom_data: dict[str, Any] = {}
    if episode.in_states:
        custom_data[IN_STATES] = [[t, held] for t, held in episode.in_states.items()]
    if episode.step_times is not None:
        custom_data[STEP_TIMES] = episode.step_times
    return {
        "id_": episode.id,
        "agent_id": episode.agent_id,
        "module_id": episode.module_id,
        "multi_agent_episode_id": None,
        "observations": buffer(episode.observations),
        "actions": buffer(episode.actions),
        "rewards": buffer(episode.rewards),
        "infos": buffer([dict(info) for info in infos], finalized=False),
        "extra_model_outputs": {
            name: buffer(output)
            for name, output in episode.extra_model_outputs.items()
            if output is not None
        },
        "is_terminated": episode.terminated,
        "is_truncated": episode.truncated,
        "t_started": episode.t_started,
        "t": episode.t,
        "_observation_space": None,
        "_action_space": None,
        "_start_time": None,
        "_last_step_time": None,
        "_temporary_timestep_data": None,
        # RLlib keeps these values without reading them.
        "custom_data": custom_data,
    }


def episode_from_state(state: Mapping[str, Any]) -> Episode:
    """Return the episode that a state describes."""
    observations = _read_buffer(state, "observations", state.get("_observation_space"))
    actions = _read_buffer(state, "actions", state.get("_action_space"))
    rewards = _read_buffer(state, "rewards", None)
    if not isinstance(rewards, np.ndarray) or rewards.dtype.kind not in "biuf" or rewards.ndim != 1:
        raise EpisodeStateError("holds no numbers", column="rewards")
    infos = _read(_read(state, "infos", dict), "data", list)
    if not all(isinstance(info, dict) for info in infos):
        raise EpisodeStateError("is no list of maps", column="infos")
    extras = state.get("extra_model_outputs")
    if extras is None:
        extras = {}
    if not isinstance(extras, dict):
        raise EpisodeStateError("is no map", column="extra_model_outputs")
    custom_data = state.get("custom_data")
    if not isinstance(custom_data, dict):
        custom_data = {}
    episode = Episode(
        id=_read(state, "id_", str),
        agent_id=_optional_text(state, "agent_id"),
        module_id=_optional_text(state, "module_id"),
        observations=observations,
        actions=actions,
        rewards=rewards,
        terminated=_read(state, "is_terminated", bool),
        truncated=_read(state, "is_truncated", bool),
        t_started=_read(state, "t_started", int),
        lookback=_read(_read(state, "rewards", dict), "lookback", int),
        infos=infos if any(infos) else None,
        extra_model_outputs={str(name): _read_buffer(extras, name, None) for name in extras},
        in_states=_read_in_states(custom_data.get(IN_STATES, [])),
        step_times=_read_step_times(custom_data.get(STEP_TIMES)),
    )
    if episode.t != _read(state, "t", int):
        raise EpisodeStateError(
            f"says {state['t']} after {len(episode)} steps from {episode.t_started}", column="t"
        )
    return episode


def _read(state: Mapping[str, Any], key: str, kind: type[Any]) -> Any:
    value = state.get(key)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        held = "is missing" if key not in state else f"is a {type(value).__name__}"
        raise EpisodeStateError(f"{held}, wanted {kind.__name__}", column=key)
    return value


def _optional_text(state: Mapping[str, Any], key: str) -> str | None:
    value = state.get(key)
    return None if value is None else str(value)


def _read_in_states(held: Any) -> dict[int, Tree]:
    if not isinstance(held, list):
        raise EpisodeStateError(f"holds a {type(held).__name__}, wanted a list", column=IN_STATES)
    in_states: dict[int, Tree] = {}
    for each in held:
        if not isinstance(each, list) or len(each) != 2 or not isinstance(each[0], int):
            raise EpisodeStateError("an entry is no timestep and state", column=IN_STATES)
        in_states[each[0]] = _state_tree(each[1], _DEPTH_MAX)
    return in_states


def _read_step_times(held: Any) -> NDArray[np.int64] | None:
    if held is None:
        return None
    if not isinstance(held, np.ndarray) or held.dtype.kind not in "iu" or held.ndim != 1:
        raise EpisodeStateError("are no whole numbers", column=STEP_TIMES)
    return held.astype(np.int64)


def _state_tree(held: Any, depth: int) -> Tree:
    """Return a recurrent state; its lists were tuples before they were serialized."""
    if depth and isinstance(held, dict):
        return {key: _state_tree(branch, depth - 1) for key, branch in held.items()}
    if depth and isinstance(held, list):
        return tuple(_state_tree(branch, depth - 1) for branch in held)
    if isinstance(held, np.ndarray | np.generic):
        return held
    if isinstance(held, float):  # np.float64 is a float, and was written as one.
        return np.float64(held)
    raise EpisodeStateError(f"a {type(held).__name__} is no recurrent state", column=IN_STATES)


def _read_buffer(state: Mapping[str, Any], key: str, space: Any) -> Tree:
    buffer = _read(state, key, dict)
    data, own_space = buffer.get("data"), buffer.get("space")
    with placed(column=key):
        is_stacked = "finalized" in buffer and _read(buffer, "finalized", bool)
        spec = composite_spec(space if own_space is None else own_space)
        if spec is not None:
            # Data is stacked arrays, samples, or either as JSON.
            if not is_stacked and isinstance(data, list) and data and isinstance(data[0], _NESTED):
                return stack([from_jsonable(sample, spec) for sample in data])
            return batch_from_jsonable(data, spec, _first_length(data, spec))
        if is_stacked and data is not None:
            return as_arrays(_stacked_leaf, _with_tuples(data, _DEPTH_MAX))
        if not isinstance(data, list):
            raise EpisodeStateError(f"holds a {type(data).__name__}, wanted a list")
        samples = [_with_tuples(sample, _DEPTH_MAX) for sample in data]
        return stack(samples) if samples else np.zeros(0)


def _first_length(data: Any, spec: SpaceSpec) -> int:
    while isinstance(spec, dict | tuple) and spec:
        key: Any = next(iter(spec)) if isinstance(spec, dict) else 0
        is_branch = isinstance(data, Mapping) if isinstance(spec, dict) else isinstance(data, list)
        if not is_branch or not len(data) or (isinstance(spec, dict) and key not in data):
            raise EpisodeStateError(f"holds a {type(data).__name__} that its space does not fit")
        data, spec = data[key], spec[key]
    if not isinstance(data, list | np.ndarray):
        raise EpisodeStateError(f"holds a {type(data).__name__}, wanted arrays")
    return len(data)


def _stacked_leaf(leaf: Any) -> NDArray[Any] | None:
    if leaf is None:  # A branch that is None in every step.
        return None
    array = np.asarray(leaf)
    if array.dtype == object or not array.ndim:
        raise EpisodeStateError(f"holds a {type(leaf).__name__}, wanted an array")
    return array


_OF_TREES = (np.ndarray, np.generic, dict, tuple)
_NESTED = (dict, tuple, list)


def _with_tuples(held: Any, depth: int) -> Any:
    """Restore tuples of arrays that became lists; a list of plain numbers is an array."""
    if not depth:
        raise EpisodeStateError("is nested too deeply")
    if isinstance(held, dict):
        return {key: _with_tuples(branch, depth - 1) for key, branch in held.items()}
    if not isinstance(held, list):
        return held
    branches = [_with_tuples(branch, depth - 1) for branch in held]
    is_tree = any(isinstance(each, _OF_TREES) or each is None for each in branches)
    if not held:  # An empty tuple within a tree; at the top an empty array.
        is_tree = depth < _DEPTH_MAX
    return tuple(branches) if is_tree else held
