"""Runs the recorded cases of RLlib's offline pre-learner through ours, by mode and data only."""

import dataclasses
import itertools
import re
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from breadbox.writing.advantages import estimate_advantages
from breadbox_offline.episodes.episode import Episode
from breadbox_offline.episodes.episode_buffer import EpisodeBuffer, RandomDraws
from breadbox_offline.episodes.sampling import (
    SequenceSampling,
    ShortWindow,
    StepSampling,
    sample_rows,
    sample_sequences,
    sample_steps,
)
from breadbox_offline.episodes.serialized import map_serialized
from breadbox_offline.episodes.validation import validate_episodes
from breadbox_offline.report import (
    FindingKind,
    FindingPolicy,
    ValidationPolicy,
    ValidationReport,
)
from breadbox_offline.rows.assembly import map_rows
from breadbox_offline.rows.options import MappingOptions, OfflineSchema, RowGrouping
from breadbox_offline.rows.sample_batches import map_sample_batches
from breadbox_offline.training.pipeline import DEFAULT_MODULE, PipelineContext
from breadbox_offline.training.prelearner import (
    InputMode,
    ModuleSnapshot,
    OfflinePreLearner,
    PreLearnerConfig,
)
from breadbox_offline.training.stages import add_one_step, default_pipeline, returns_to_go
from support.rllib_cases import describe, make_episode, make_toy_episode

Case = dict[str, Any]
Outcome = Any

ORIGINAL_POLICY = ValidationPolicy(
    {
        FindingKind.MALFORMED: FindingPolicy.RAISE,
        FindingKind.UNFINISHED: FindingPolicy.RAISE,
        FindingKind.NOT_FINITE: FindingPolicy.KEEP,
    }
)
"""What the original does: one unfinished or malformed episode rejects the call."""


class ScriptedDraws(RandomDraws):
    """Draws that a case lists, in its order."""

    def __init__(self, draws: list[int], *, alternate: bool = False) -> None:
        """With `alternate`, positions and lengths take turns in the list."""
        self._steps = draws[::2] if alternate else list(draws)
        self._lengths = draws[1::2] if alternate else []
        self.used = 0

    def extend(self, draws: list[int]) -> None:
        self._steps.extend(draws)

    def steps(self, count: int, held_count: int) -> NDArray[np.int64]:
        self.used += count
        taken, self._steps = self._steps[:count], self._steps[count:]
        assert all(draw < held_count for draw in taken)
        assert len(taken) == count, "the case has no more draws"
        return np.array(taken, dtype=np.int64)

    def lengths(self, count: int, low: int, high: int) -> NDArray[np.int64]:
        self.used += count
        taken, self._lengths = self._lengths[:count], self._lengths[count:]
        assert all(low <= length < high for length in taken)
        return np.array(taken, dtype=np.int64)

    def order(self, held_count: int) -> NDArray[np.int64]:
        return np.arange(held_count)

    def get_state(self) -> str:
        return ""

    def set_state(self, state: str) -> None:
        pass


def make_space(spec: dict[str, Any]) -> gymnasium.Space[Any]:
    """A space as a case describes it."""
    kind = spec["type"]
    if kind == "Dict":
        return gymnasium.spaces.Dict(
            {key: make_space(each) for key, each in spec["spaces"].items()}
        )
    if kind == "Tuple":
        return gymnasium.spaces.Tuple([make_space(each) for each in spec["spaces"]])
    if kind == "Box":
        return gymnasium.spaces.Box(
            spec["low"], spec["high"], tuple(spec["shape"]), np.dtype(spec["dtype"])
        )
    if kind == "Discrete":
        return gymnasium.spaces.Discrete(spec["n"])
    if kind == "MultiBinary":
        return gymnasium.spaces.MultiBinary(spec["n"])
    return gymnasium.spaces.MultiDiscrete(spec["nvec"])


def make_options(case: Case) -> MappingOptions:
    """The mapping that a case asks for."""
    options = case["options"]
    spaces: dict[str, Any] = {
        name: make_space(options[name])
        for name in ("observation_space", "action_space")
        if options.get(name)
    }
    return MappingOptions(
        schema=OfflineSchema(columns=case["schema"]),
        grouping=RowGrouping.ONE_STEP,
        packed_columns=frozenset(options.get("input_compress_columns", ["obs", "new_obs"])),
        multi_agent=options.get("is_multi_agent", False) or case["mode"] == "columns_multi_agent",
        ignore_final_observation=options.get("ignore_final_observation", False),
        **spaces,
    )


def run_columns(case: Case, given: Any) -> Outcome:
    report = ValidationReport(ORIGINAL_POLICY)
    episodes = map_rows(given["columns"], make_options(case), report)
    return {"episodes": [describe(episode) for episode in episodes]}


def run_columns_multi_agent(case: Case, given: Any) -> Outcome:
    options = make_options(case)
    rows = map_rows(given["columns"], options, ValidationReport(ORIGINAL_POLICY))
    assembled = map_rows(
        given["columns"],
        MappingOptions(schema=options.schema, multi_agent=True),
        ValidationReport(ValidationPolicy.strict()),
    )
    # The case lists them by episode and agent, our one-step mapping keeps the order of rows.
    rows.sort(key=lambda episode: episode.key)
    return {
        "per_row_episodes": [describe(episode) for episode in rows],
        "assembled": [describe(episode) for episode in assembled],
    }


def run_sample_batches(case: Case, given: Any) -> Outcome:
    report = ValidationReport(ORIGINAL_POLICY)
    episodes = map_sample_batches(given["columns"], make_options(case), report)
    if case["options"].get("validate"):
        episodes = validate_episodes(episodes, report)
    return {"episodes": [describe(episode) for episode in episodes]}


def run_episodes(case: Case, given: Any) -> Outcome:
    report = ValidationReport(ORIGINAL_POLICY)
    buffer = EpisodeBuffer(1_000_000)
    for name, earlier in given.items():
        if name != "item" and isinstance(earlier, list):
            buffer.add_all(map_serialized(earlier, report))
    episodes = validate_episodes(
        map_serialized(given["item"], report), report, held_digest=buffer.held_digest
    )
    buffer.add_all(episodes)
    return {
        "episodes": [describe(each) for each in sorted(episodes, key=lambda each: each.id)],
        "buffer_ids_after": sorted(episode.id for episode in buffer.episodes()),
        "buffer_timesteps_after": buffer.step_count,
    }


def run_buffer(_case: Case, given: Any) -> Outcome:
    buffer = EpisodeBuffer(given["capacity"])
    states = []
    for episode_id, length, *rest in given["adds"]:
        how = rest[0] if rest else {}
        done = how.get("done", True)
        buffer.add(
            make_toy_episode(
                episode_id, length, start=how.get("t0", 0), terminated=done, truncated=False
            )
        )
        held = buffer.episodes()
        assert buffer.step_count == sum(len(episode) for episode in held)
        assert buffer.step_count <= given["capacity"] or len(held) == 1
        states.append(
            {
                "ids": [episode.id for episode in held],
                "lengths": [len(episode) for episode in held],
                "timesteps": buffer.step_count,
                "episodes_evicted": buffer.counters.evicted_episode_count,
                "timesteps_added": buffer.counters.added_step_count,
            }
        )
    return {"after_each_add": states}


def make_toy_buffer(given: Any, draws: ScriptedDraws | None) -> EpisodeBuffer:
    """A buffer with the toy episodes that a case lists."""
    buffer = EpisodeBuffer(1_000_000, draws=draws, seed=0)
    for spec in given["episodes"]:
        buffer.add(
            make_toy_episode(
                spec["id"],
                spec["len"],
                start=spec.get("t0", 0),
                terminated=spec["end"] == "term",
                truncated=spec["end"] == "trunc",
            )
        )
    return buffer


def run_buffer_sample(case: Case, given: Any) -> Outcome:
    args = given["args"]
    n_step = args.get("n_step", 1)
    is_range = isinstance(n_step, list | tuple)
    draws: ScriptedDraws | None = ScriptedDraws(given["draws"], alternate=is_range)
    if "non_terminating" in case["expected"]:
        draws = None  # the original never ends: its script says nothing of how many draws we need
    buffer = make_toy_buffer(given, draws)
    if args.get("batch_length_T"):
        sampling = SequenceSampling(
            length=args["batch_length_T"],
            lookback=args.get("lookback", 0),
            start_margin=args.get("min_batch_length_T", 0),
            short_window=ShortWindow.SHIFT if case["recommended"] else ShortWindow.SHORTEN,
            n_step=n_step,
        )
        sampled = sample_sequences(buffer, sequence_steps(case, args), sampling)
    else:
        step_sampling = StepSampling(
            n_step=tuple(n_step) if is_range else n_step,
            discount=args.get("gamma", 0.99),
            with_discount=False,
            with_extras=args.get("include_extra_model_outputs", False),
            with_infos=args.get("include_infos", False),
        )
        sampled = sample_steps(buffer, args["num_items"], step_sampling)
        assert len(sampled) == args["num_items"]
    outcome: Outcome = {"episodes": [describe(episode) for episode in sampled]}
    outcome["transitions"] = [describe_transition(episode) for episode in sampled]
    if draws is not None:
        outcome["draws_used"] = draws.used
    return outcome


def sequence_steps(case: Case, args: Any) -> int:
    """Steps to ask for: the original counts a sequence of k steps as k + 1 items, we as k."""
    expected = case["expected"].get("episodes")
    if case["recommended"] or expected is None:
        return int(args["num_items"])
    return sum(episode["length"] for episode in expected)


def describe_transition(episode: Episode) -> dict[str, Any]:
    """An item of one step as the recommended answers describe it."""
    observations = episode.own_observations()
    extras = episode.own_extra_model_outputs()
    n_step = int(extras.pop("n_step")[0])
    extras.pop("weights")
    return {
        "id": episode.id,
        "t_started": episode.t_started,
        "length": len(episode),
        "obs": float(observations[0, 0]),
        "next_obs": float(observations[-1, 0]),
        "action": int(episode.own_actions()[0]),
        "reward": float(episode.own_rewards()[0]),
        "terminated": episode.terminated,
        "truncated": episode.truncated,
        "n_step": n_step,
        "extra_model_outputs": {
            name: value[0].item() if value.ndim == 1 else value for name, value in extras.items()
        },
    }


def run_buffer_sample_bt(_case: Case, given: Any) -> Outcome:
    draws = ScriptedDraws(given["draws"])
    buffer = make_toy_buffer(given, draws)
    args = given["args"]
    batch = sample_rows(buffer, args["batch_size_B"], args["batch_length_T"])
    return {"batch": batch, "draws_used": draws.used}


def initial_states(options: dict[str, Any]) -> dict[str, Any]:
    """The zero state of the LSTM that a case describes; none for a feed-forward module."""
    if not options.get("lstm"):
        return {}
    zeros = np.zeros((1, options["lstm_cell_size"]), dtype=np.float32)
    return {DEFAULT_MODULE: {"h": zeros, "c": zeros}}


def run_pipeline(case: Case, given: Any) -> Outcome:
    options = case["options"]
    if "columns" in given:
        episodes = map_rows(given["columns"], make_options(case), ValidationReport(ORIGINAL_POLICY))
    else:
        episodes = [make_episode(spec) for spec in given["episodes"]]
    algorithm = options.get("algo", "BC")
    pipeline = default_pipeline(next_observations=algorithm != "BASE")
    if algorithm.startswith("MARWIL"):
        pipeline.prepend("one_step_more", add_one_step)
    digests = [episode.content_digest() for episode in episodes]
    context = PipelineContext(
        initial_states=initial_states(options), row_length=options.get("max_seq_len", 0)
    )
    draft = pipeline(episodes, context)
    for episode, digest in zip(episodes, digests, strict=True):
        assert digest == dataclasses.replace(episode).content_digest(), "a piece changed an episode"
    return {
        "batch": flat_arrays(draft.batches),
        "module": DEFAULT_MODULE,
        "episode_lengths_after": [len(episode) for episode in draft.episodes],
    }


def flat_arrays(batches: dict[str, Any]) -> dict[str, Any]:
    """`module/column/leaf` to numpy array."""
    from breadbox_offline.training.pipeline import OfflineBatch

    flat = OfflineBatch(modules=batches).flat()
    return {name: tensor.numpy() for name, tensor in flat.items()}


def run_pipeline_multi_agent(_case: Case, given: Any) -> Outcome:
    """One outcome per order of agents: the original takes them in the order of a set."""
    outcomes = []
    for order in itertools.permutations(given["agents"]):
        agents = {}
        for agent_id in order:
            held = given["agents"][agent_id]
            episode = make_episode(held["episode"])
            episode.agent_id, episode.module_id = agent_id, held["module"]
            # The case's multi-agent episode carries no extra outputs into its batches.
            episode.extra_model_outputs = {}
            agents[agent_id] = episode
        batches = default_pipeline()(agents.values(), PipelineContext()).batches
        outcomes.append({"batch": flat_arrays(batches)})
    return Alternatives(outcomes)


class Alternatives(list[Any]):
    """Outcomes of which any may be the expected one."""


def run_call(case: Case, given: Any) -> Outcome:
    options = case["options"]
    read = InputMode(options["read"])
    states = initial_states(options)
    draws = ScriptedDraws([])
    mapping = make_options(case)
    prelearner = OfflinePreLearner(
        PreLearnerConfig(
            train_batch_size=options["train_batch_size"],
            mode=read,
            mapping=mapping,
            validation=ORIGINAL_POLICY,
            steps=StepSampling(with_discount=False, n_step=options.get("n_step", 1)),
            row_length=options.get("max_seq_len", 0),
            modules_to_train=options.get("policies_to_train"),
            uses_recorded_states=options.get("prelearner_use_recorded_module_states", False),
        ),
        modules=(lambda: ModuleSnapshot(initial_states=states)) if states else None,
    )
    prelearner.buffer.draws = draws
    batches, used = [], []
    for call in given["calls"]:
        draws.extend(call.get("draws", []))
        before = draws.used
        flat = prelearner(call["batch"])
        batches.append({name: tensor.numpy() for name, tensor in flat.items()})
        used.append(draws.used - before)
    capacity = None if read is InputMode.COLUMNS else prelearner.buffer.capacity_steps
    return {"batches": batches, "draws_used": used, "buffer_capacity": capacity}


def run_gae(_case: Case, given: Any) -> Outcome:
    values = given["values"]
    estimated = estimate_advantages(
        value=values[None],
        reward=given["rewards"][None],
        terminated=given["terminateds"][None],
        truncated=given["truncateds"][None],
        # The slot after a truncated step is the one that it led to.
        final_value=np.append(values[1:], 0.0)[None],
        next_value=np.zeros(1),
        discount=given["gamma"],
        gae_lambda=given["lambda"],
    )
    return {"value_targets": estimated.target[0], "advantages": estimated.advantage[0]}


def run_returns_to_go(case: Case, given: Any) -> Outcome:
    gamma = given.get("gamma", case["options"].get("gamma", 0.99))
    if "episodes" in given:
        rewards = [np.array(episode["rewards"]) for episode in given["episodes"]]
    else:
        held = given["rewards"]
        rewards = [held] if isinstance(held, np.ndarray) else [np.array(each) for each in held]
    sums = [returns_to_go(each, gamma) for each in rewards]
    joined = np.concatenate(sums)
    return Alternatives(
        [joined, sums, *({name: value} for name in _returned(case) for value in (joined, sums))]
    )


def _returned(case: Case) -> list[str]:
    return list(case["expected"]) if isinstance(case["expected"], dict) else []


RUNNERS: dict[str, Callable[[Case, Any], Outcome]] = {
    "columns": run_columns,
    "columns_multi_agent": run_columns_multi_agent,
    "sample_batches": run_sample_batches,
    "episodes": run_episodes,
    "buffer": run_buffer,
    "buffer_sample": run_buffer_sample,
    "buffer_sample_bt": run_buffer_sample_bt,
    "pipeline": run_pipeline,
    "pipeline_multi_agent": run_pipeline_multi_agent,
    "call": run_call,
    "gae": run_gae,
    "returns_to_go": run_returns_to_go,
}

SEQUENCES = re.compile(r"(\d+) sequences of (\d+) steps")
