"""Goal: no code in a document, or in a docstring, that does not do what it shows.

Method: every fenced block is found, and is run: here, as it stands, or by the test that is named
here. A block without either fails, and so does a name that stands here without a block. Lines for a
shell are those of `test_shell_lines`.
"""

import ast
import re
import secrets
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

import breadbox
from breadbox.loader import FragmentLoader
from breadbox.mirror import ReplayMirror, StepMemory
from breadbox_offline.episodes.episode import Episode
from breadbox_offline.episodes.serialized import pack_episode
from breadbox_offline.files.writers import write_episodes
from mirror.goals import goal_fragments
from support.documents import BLOCKS, ROOT
from support.fragments import vector_fragment
from support.sequences import sequence

pytestmark = [pytest.mark.integration, pytest.mark.timeout(280)]

ADDRESS = "localhost:50051"

ELSEWHERE = {
    "tests/integration/test_readme.py": {
        "README.md#learner": "test_the_learner_lines_fetch_batches_from_a_running_server",
        "README.md#producer": "test_the_producer_lines_append_every_step",
        "docs/rollout.md#worker": "test_the_worker_of_ones_own_has_every_fragment_admitted",
        "docs/rollout.md#policy": "test_the_policy_of_ones_own_acts_and_learns",
    },
    "tests/rollout/test_masked_actions.py": {
        "docs/rollout.md#mask": "test_the_pages_environment_is_played_without_a_forbidden_step",
    },
    "tests/examples/test_my_learner.py": {
        f"docs/my-learner.md#{name}": "test_the_page_shows_lines_of_the_scripts"
        for name in (
            *("environment", "ppo-act", "ppo-learn", "ppo-advantages", "continuous-policy"),
            *("continuous-act", "sac-learn"),
        )
    },
    "tests/learner/test_cookbook.py": {
        "docs/learner-cookbook.md#learner": "test_the_whole_learner_learns_under_every_seed",
        "docs/learner-cookbook.md#asyncio": "test_the_asyncio_example_prints_batches",
        "docs/learner-cookbook.md#advantages": "test_the_advantages_of_a_batch_are_estimated",
        "docs/learner-cookbook.md#dataset": "test_the_dataset_gives_batches_from_worker_processes",
        "docs/learner-cookbook.md#staleness": "test_a_batch_says_how_stale_it_is_at_its_use",
        "docs/learner-cookbook.md#ranks": "test_ranks_get_shares_of_one_draw",
    },
    "tests/peers/test_sb3.py": {
        "docs/adapters.md#sb3": "test_the_lines_of_page_and_docstring_train",
        "docs/adapters.md#sb3-n-step": "test_the_lines_with_returns_of_n_steps_train",
        "docs/adapters.md#sb3-hindsight": "test_the_lines_with_goals_in_hindsight_train",
        "docs/adapters.md#sb3-actor": "test_the_lines_of_actor_and_learner_train",
        "docs/adapters.md#sb3-learner": "test_the_lines_of_actor_and_learner_train",
        "adapters/breadbox_adapters/sb3.py#1": "test_the_lines_of_page_and_docstring_train",
    },
    "tests/peers/test_cleanrl.py": {
        "docs/adapters.md#cleanrl": "test_the_lines_of_page_and_docstring_make_a_buffer",
        "adapters/breadbox_adapters/cleanrl.py#1": (
            "test_the_lines_of_page_and_docstring_make_a_buffer"
        ),
    },
    "tests/peers/test_torchrl.py": {
        "docs/adapters.md#torchrl": "test_the_lines_of_adapters_md_learn",
        "adapters/breadbox_adapters/torchrl/buffer.py#BreadboxReplayBuffer": (
            "test_the_lines_of_buffer_py_run"
        ),
    },
    "tests/mirror/test_docs.py": {
        "docs/mirror.md#sample": "test_steps_are_sampled",
        "docs/mirror.md#publish": "test_actors_play_with_published_weights_and_say_so",
        "docs/mirror.md#actor": "test_actors_play_with_published_weights_and_say_so",
        "docs/mirror.md#loop": "test_the_loop_ends",
        "docs/mirror.md#process": "test_a_process_of_its_own_is_shared",
        "docs/mirror.md#attach": "test_a_process_of_its_own_is_shared",
        "docs/mirror.md#priority": "test_priorities_are_updated",
        "docs/mirror.md#sequences": "test_sequences_have_their_shape",
        "docs/mirror.md#goals": "test_goals_are_relabelled",
        "docs/mirror.md#frames": "test_frames_are_stored",
        "docs/mirror.md#subscription": "test_a_subscription_is_read_by",
        "docs/mirror.md#memory": "test_a_memory_needs_no_server",
    },
    "tests/offline/test_docs.py": {
        "docs/offline.md#clone": "test_the_worked_example_clones_an_expert",
    },
}
"""Blocks of Python that another test runs."""

PYTHON = {place: block for place, block in BLOCKS.items() if block.language == "python"}


def run(place: str, address: str = ADDRESS, **names: Any) -> dict[str, Any]:
    """Run a block as it stands, but for the address."""
    code = PYTHON[place].code.replace(ADDRESS, address)
    exec(compile(code, place, "exec"), names)  # The document is ours.
    return names


def run_alone(place: str) -> None:
    """Run a block that needs nothing."""
    run(place)


def run_async(place: str, address: str = ADDRESS, **names: Any) -> None:
    """Run a block that awaits, as the body of a coroutine."""
    code = textwrap.indent(PYTHON[place].code.replace(ADDRESS, address), "    ")
    body = f"import asyncio\nasync def main():\n{code}\nasyncio.run(main())"
    exec(compile(body, place, "exec"), names)


def fed(count: int) -> tuple[Any, breadbox.Client]:
    """A server of one's own with fragments in it."""
    server = breadbox.local_server(uses_max=100)
    client = server.__enter__()
    client.start_session("s")
    client.append_many([vector_fragment(index) for index in range(count)])
    return server, client


def with_fragments(place: str, runner: Callable[..., Any] = run) -> None:
    """Run a block beside a server that has fragments."""
    server, client = fed(64)
    try:
        names = {"client": client, "fragment": vector_fragment(64), "breadbox": breadbox}
        runner(place, client.address, **names)
    finally:
        server.__exit__(None, None, None)


def with_rows(place: str) -> None:
    """Run a block beside a buffer of rows, and one of members that lack a reward."""
    with breadbox.local_server() as client:
        rows_and_members(client)
        run(place, client=client, breadbox=breadbox, np=np)


def rows_and_members(client: breadbox.Client) -> None:
    """Make a buffer of rows with one row, and one with a member that lacks a reward."""
    rows = breadbox.BufferConfig(assembly=breadbox.AssemblyPolicy.GROUPS, fragments_per_chunk=0)
    verified = breadbox.BufferConfig.preset(
        "groups", fragments_per_chunk=2, required_parts="tokens,reward"
    )
    for name, config in (("rows", rows), ("verified", verified)):
        client.create_buffer(name, config)
        client.start_session("s", buffer=name, take_over=True)
    # A group of its own: an example before may have claimed, or completed, the member.
    member = sequence(f"g-{secrets.token_hex(4)}", 0, 3)
    member.session_id = "s"
    client.append(member, buffer="verified")
    part = breadbox.Part("row-1", 0, "ids", {"ids": np.arange(3)})
    client.attach(part, buffer="rows")


def with_groups(place: str) -> None:
    """Run a block beside a buffer of two complete groups, as the page makes it."""
    with breadbox.local_server() as client:
        config = breadbox.BufferConfig.preset("groups", fragments_per_chunk=4)
        client.create_buffer("completions", config)
        client.start_session("run", buffer="completions")
        members = [
            sequence(
                f"prompt-{group}",
                member,
                3 + member,
                tokens={
                    "ids": np.arange(3 + member) + group,
                    "log_prob": np.full(3 + member, -4.6, np.float32),
                },
            )
            for group in range(2)
            for member in range(4)
        ]
        client.append_many(members, buffer="completions")
        run(place, client=client, breadbox=breadbox)


def run_producer(place: str, address: str, **names: Any) -> None:
    """Run a block that makes a fragment, in the session of a buffer, and append it."""
    session = names["client"].start_session("made")
    fragment = run(place, address, np=np, session=session, **names)["fragment"]
    assert "admitted" == names["client"].append(fragment).outcome.value


def run_method(place: str, client: breadbox.Client) -> None:
    """Run a method's block beside a buffer that has fragments; what it names is made first."""
    client.update_buffer(
        client.buffer, breadbox.BufferConfig(schema=breadbox.SchemaPolicy.ANY, uses_max=100)
    )
    session = client.start_session("s")
    client.publish("s", 0, {"bias": np.zeros(8)})
    *fragments, fragment = goal_fragments(65)
    # A read for ever ends when it has read what there is; no group ends here.
    code = PYTHON[place].code.replace("tail()", "tail(max_wait_s=0)")
    code = code.replace("group_ends(seen, max_wait_s=30", "group_ends(seen, max_wait_s=0")
    of_sequences = re.search(r"lease\.(packed|padded|sequences)", code)
    client.append_many([sequence(member=at) for at in range(8)] if of_sequences else fragments)
    envs = SimpleNamespace(step=lambda action: (np.ones((1, 3)), [1.0], [False], [True], {}))
    names: dict[str, Any] = {"breadbox": breadbox, "np": np, "ReplayMirror": ReplayMirror}
    names.update(client=client, session=session, fragment=fragment, packed=b"payload", version=0)
    names.update(envs=envs, obs=np.zeros((1, 3)), action=np.zeros(1))
    with ExitStack() as opened:
        makers: dict[str, Callable[[], Any]] = {
            "paced": lambda: paced(client),
            "rows": lambda: rows_and_members(client),
            "verified": lambda: rows_and_members(client),
            "ticket": lambda: paced(client).tickets(1, buffer="paced")[0],
            "evaluator": lambda: client.create_subscription("evaluator"),
            "grant": lambda: client.service.fetch_fragments(4),
            "lease": lambda: client.fetch(4),
            "batch": lambda: of_sequences or client.load_batch(client.fetch(4).references),
            "loader": lambda: FragmentLoader(client.load_batch),
            "writer": lambda: opened.enter_context(breadbox.StepWriter(client)),
            "appender": lambda: opened.enter_context(breadbox.Appender(client)),
            "memory": lambda: memory_of(fragments),
            "mirror": lambda: opened.enter_context(
                ReplayMirror(client, capacity_steps=1_000, process="share" in code)
            ),
        }
        names.update(
            {name: make() for name, make in makers.items() if re.search(rf"\b{name}\b", code)}
        )
        exec(compile(code, place, "exec"), names)


def paced(client: breadbox.Client) -> breadbox.Client:
    """Make a buffer that gives tickets, with a session."""
    limits = breadbox.BufferConfig.preset("groups", fragments_per_chunk=2, groups_per_version=9)
    client.create_buffer("paced", limits)
    client.start_session("s", buffer="paced", take_over=True)
    return client


def with_tickets(place: str) -> None:
    """Run a block of a ticket's."""
    server, client = fed(0)
    try:
        run_method(place, client)
    finally:
        server.__exit__(None, None, None)


def memory_of(fragments: list[breadbox.Fragment]) -> StepMemory:
    memory = StepMemory(1_000)
    for each in fragments:
        memory.extend(each)
    return memory


def an_episode(number: int, length: int = 12) -> Episode:
    rng = np.random.default_rng(number)
    return Episode(
        id=str(number),
        observations=rng.random((length + 1, 4)).astype(np.float32),
        actions=rng.integers(0, 2, length),
        rewards=np.ones(length),
        terminated=True,
        truncated=False,
    )


@cache
def run_views() -> None:
    """Hooks of the console, on what it calls them with."""
    names = run("docs/console.md#2", ADDRESS, VOCABULARY=["a", "b"])
    board = np.eye(3, dtype=np.uint8)
    assert (48, 48, 3) == names["board"]({"board": board}, 0).shape
    assert ["b", "a"] == names["words"]([1, 0])


def run_offline() -> None:
    """The blocks of docs/offline.md before the worked example, which go on from one another.

    Where they run once they all do.
    """
    write_episodes((an_episode(number) for number in range(40)), Path("expert.parquet"))
    names = run("docs/offline.md#reading")
    names = run("docs/offline.md#findings", **names)
    assert 40 == len(list(names["dataset"].episodes()))
    names["serialized_episodes"] = [pack_episode(an_episode(number)) for number in range(60)]
    names = run("docs/offline.md#batches", **names)
    assert 256 == names["batch"].env_step_count
    run("docs/offline.md#stages", **names)


def run_mixer() -> None:
    server, client = fed(64)
    try:
        client.create_buffer("demo", breadbox.BufferConfig(uses_max=100))
        client.start_session("demo", buffer="demo")
        demo = [vector_fragment(index, session_id="demo") for index in range(64)]
        client.append_many(demo, buffer="demo")
        place = "docs/offline.md#mixer"
        code = PYTHON[place].code.replace('device="cuda"', 'device="cpu"')
        names: dict[str, Any] = {"client": client}
        exec(compile(code, place, "exec"), names)
        assert 32 == len(names["batch"])
    finally:
        server.__exit__(None, None, None)


def run_generator() -> None:
    pytest.importorskip("ale_py", reason="the extra atari is not installed")
    place = "docs/rollout.md#generator"
    code = PYTHON[place].code.replace("episode_count=4", "episode_count=1, episode_steps_max=60")
    assert code != PYTHON[place].code
    exec(compile(code, place, "exec"), {})
    assert 1 == len(Path("episodes/manifest.jsonl").read_text().splitlines())


def run_dict_observations() -> None:
    place = "docs/rollout.md#dict"
    with breadbox.local_server() as client:
        client.start_session("s", model_version=0)
        names = run(place, client.address)
    (told,) = re.findall(r"shape\)  # (.*)", PYTHON[place].code)
    batch = names["batch"]
    assert told == f"{batch.obs['camera'].shape} {batch.obs['speed'].shape}"


def run_step_writer() -> None:
    # It has a single step to write: fragments of any length.
    with breadbox.local_server(schema="ragged") as client:
        client.start_session("s")
        step = {
            **{name: np.zeros(4, np.float32) for name in ("obs", "next_obs")},
            **{"action": np.int64(0), "reward": 1.0, "terminated": False, "truncated": True},
        }
        run(
            "client/breadbox/writing/step_writer.py#StepWriter",
            client.address,
            breadbox=breadbox,
            **step,
        )
        assert 1 == client.get_buffer().state.counters["fragments_admitted"]


def run_resume() -> None:
    """Run, and again as a learner that was started anew: it goes on in its session, above it."""
    place = "docs/save-and-resume.md#resume"
    with breadbox.local_server(uses_max=100, staleness_max=100) as client:
        first = ThreadPoolExecutor().submit(run, place, client.address)
        session = client.watch_model(max_wait_s=60)
        assert session is not None
        client.append_many(
            [vector_fragment(index, session_id=session.session_id) for index in range(8)]
        )
        assert 3 == first.result(60)["version"]
        resumed = run(place, client.address)
        assert 6 == resumed["version"] == client.get_buffer().model_version
        assert session.session_id == resumed["state"].session_id

        client.start_session("another", take_over=True)
        replaced = ThreadPoolExecutor().submit(run, place, client.address)
        following = client.watch_model(max_wait_s=60)
        while following is not None and following.session_id == "another":
            following = client.watch_model(following, max_wait_s=60)
        assert following is not None
        client.append_many(
            [vector_fragment(index, session_id=following.session_id) for index in range(8)]
        )
        assert following.session_id == replaced.result(60)["session"]


def run_mirror() -> None:
    server, client = fed(64)
    try:
        place = "client/breadbox/mirror/__init__.py#1"
        code = PYTHON[place].code.replace(ADDRESS, client.address)
        names: dict[str, Any] = {}
        for said, run_as in (('device="cuda"', 'device="cpu"'), ("steps=1_000", "steps=100")):
            assert said in code
            code = code.replace(said, run_as)
        exec(compile(code, place, "exec"), names)
        assert 256 == len(names["batch"])
    finally:
        server.__exit__(None, None, None)


def run_step_memory() -> None:
    place = "client/breadbox/mirror/memory.py#StepMemory"
    names = run(place, StepMemory=StepMemory, fragment=vector_fragment(0))
    assert 32 == len(names["batch"])


def run_reverb_writer() -> None:
    from breadbox_adapters import reverb

    tables = [reverb.Table.queue("queue", 10)]
    with reverb.Server(tables) as server, server.localhost_client() as client:
        run("adapters/breadbox_adapters/reverb/writers.py#TrajectoryWriter", client=client)
        samples = client.sample("queue", 2, emit_timesteps=False)
        assert [1, 0] == [int(sample.data[0]) for sample in samples]


def run_rainbow() -> None:
    from breadbox_adapters.cleanrl import PrioritizedReplayBuffer

    place = "adapters/breadbox_adapters/cleanrl.py#PrioritizedReplayBuffer"
    with breadbox.local_server() as client:
        made = run(place, client.address, PrioritizedReplayBuffer=PrioritizedReplayBuffer)["rb"]
        made.close()
        assert "rainbow-1" in [each.name for each in client.list_buffers()]


def run_as_test(place: str, before: str) -> None:
    """Run a block that is a test of a reader's, with their code before it."""
    Path("test_it.py").write_text(before + PYTHON[place].code)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "breadbox.testing", "test_it.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert 0 == done.returncode, done.stdout + done.stderr


LEARNER = """import breadbox
def my_learner(server, buffer):
    with breadbox.connect(server, buffer=buffer) as client:
        client.start_session("my-run")
"""
PRODUCER = """import breadbox
from support.fragments import vector_fragment
def my_producer(server, buffer):
    with breadbox.connect(server, buffer=buffer) as client:
        client.append_many([vector_fragment(index) for index in range(8)])
"""

HERE: dict[str, Callable[[], None]] = {
    "docs/testing.md#local": lambda: with_fragments("docs/testing.md#local"),
    "docs/testing.md#local-asyncio": lambda: with_fragments("docs/testing.md#local-asyncio"),
    "docs/testing.md#restart": lambda: with_fragments("docs/testing.md#restart"),
    "docs/testing.md#fixtures": lambda: run_as_test("docs/testing.md#fixtures", LEARNER),
    "docs/offline.md#reading": run_offline,
    "docs/offline.md#findings": run_offline,
    "docs/offline.md#batches": run_offline,
    "docs/offline.md#stages": run_offline,
    "docs/offline.md#mixer": run_mixer,
    "docs/rollout.md#generator": run_generator,
    "docs/save-and-resume.md#resume": run_resume,
    "docs/rollout.md#dict": run_dict_observations,
    "docs/agents.md#tickets": lambda: with_fragments("docs/agents.md#tickets"),
    **{
        place: partial(with_tickets, place)
        for place in (
            *("client/breadbox/lease.py#Ticket", "client/breadbox/lease.py#Ticket.give_back"),
        )
    },
    "docs/agents.md#parts": lambda: with_fragments("docs/agents.md#parts"),
    "docs/agents.md#rows": lambda: with_fragments("docs/agents.md#rows"),
    "client/breadbox/model/fragment.py#Part": lambda: with_rows(
        "client/breadbox/model/fragment.py#Part"
    ),
    "docs/agents.md#groups": lambda: with_fragments("docs/agents.md#groups"),
    "docs/agents.md#packed": lambda: with_groups("docs/agents.md#packed"),
    "docs/agents.md#micro-batches": lambda: with_groups("docs/agents.md#micro-batches"),
    "docs/which-read.md#priorities": lambda: with_fragments("docs/which-read.md#priorities"),
    **{
        place: partial(with_fragments, place)
        for place in (
            *("docs/reading.md#tail", "docs/reading.md#step"),
            *("docs/reading.md#subscription", "docs/reading.md#acknowledge"),
        )
    },
    "docs/minestudio.md#switch": lambda: with_fragments("docs/minestudio.md#switch"),
    "docs/minestudio.md#loading": lambda: with_fragments("docs/minestudio.md#loading"),
    "client/breadbox/errors.py#1": partial(run_alone, "client/breadbox/errors.py#1"),
    "client/breadbox/types.py#1": partial(run_alone, "client/breadbox/types.py#1"),
    "client/breadbox/model/fragment.py#fragment_of": lambda: with_fragments(
        "client/breadbox/model/fragment.py#fragment_of", run_producer
    ),
    "client/breadbox/model/fragment.py#Sequence": lambda: with_fragments(
        "client/breadbox/model/fragment.py#Sequence", partial(run, np=np)
    ),
    "client/breadbox/model/options.py#Tls": lambda: with_fragments(
        "client/breadbox/model/options.py#Tls"
    ),
    "client/breadbox/model/types.py#BufferConfig": lambda: with_fragments(
        "client/breadbox/model/types.py#BufferConfig"
    ),
    "adapters/breadbox_adapters/cleanrl.py#PrioritizedReplayBuffer": run_rainbow,
    "client/breadbox/service.py#Service": lambda: with_fragments(
        "client/breadbox/service.py#Service"
    ),
    "client/breadbox/__init__.py#1": lambda: with_fragments("client/breadbox/__init__.py#1"),
    "client/breadbox/aio/__init__.py#1": lambda: with_fragments(
        "client/breadbox/aio/__init__.py#1", run_async
    ),
    **{
        place: partial(with_fragments, place)
        for place in (
            *("client/breadbox/client.py#Client", "client/breadbox/lease.py#Lease"),
            "client/breadbox/loader.py#FragmentLoader",
        )
    },
    "client/breadbox/aio/local.py#local_server": lambda: with_fragments(
        "client/breadbox/aio/local.py#local_server", run_async
    ),
    "client/breadbox/writing/appender.py#Appender": lambda: with_fragments(
        "client/breadbox/writing/appender.py#Appender"
    ),
    "client/breadbox/writing/step_writer.py#StepWriter": run_step_writer,
    "client/breadbox/mirror/__init__.py#1": run_mirror,
    "client/breadbox/mirror/memory.py#StepMemory": run_step_memory,
    "client/breadbox/mirror/replay.py#ReplayMirror": lambda: with_fragments(
        "client/breadbox/mirror/replay.py#ReplayMirror"
    ),
    "docs/console.md#2": run_views,
    "docs/adapters.md#reverb": lambda: with_fragments("docs/adapters.md#reverb"),
    "adapters/breadbox_adapters/reverb/__init__.py#1": lambda: with_fragments(
        "adapters/breadbox_adapters/reverb/__init__.py#1"
    ),
    "adapters/breadbox_adapters/reverb/writers.py#TrajectoryWriter": run_reverb_writer,
    "client/breadbox/local.py#local_server": lambda: with_fragments(
        "client/breadbox/local.py#local_server"
    ),
    "client/breadbox/testing.py#1": lambda: run_as_test("client/breadbox/testing.py#1", PRODUCER),
    "client/breadbox/testing.py#2": lambda: with_fragments("client/breadbox/testing.py#2"),
}
"""Blocks of Python that are run here."""


CLASSES = {
    "client/breadbox/client.py": "Client",
    "client/breadbox/lease.py": "Lease",
    "client/breadbox/service.py": "Service",
    "client/breadbox/loader.py": "FragmentLoader",
    "client/breadbox/operations/connected.py": "Connected",
    "client/breadbox/operations/leasing.py": "Granted",
    "client/breadbox/mirror/memory.py": "StepMemory",
    "client/breadbox/mirror/replay.py": "ReplayMirror",
    "client/breadbox/writing/appender.py": "Appender",
    "client/breadbox/writing/step_writer.py": "StepWriter",
}
"""The classes of which each public method has an example, by their modules."""

METHODS = [
    place
    for place in PYTHON
    if place.partition(".py#")[2].startswith(f"{CLASSES.get(place.partition('#')[0])}.")
    or place.partition(".py#")[2] in ("Batch.staleness", "FragmentReference.staleness_at")
]
"""Examples of methods, which `run_method` runs."""


def public_methods(path: str, name: str) -> Iterator[tuple[str, bool]]:
    """Places of a class' public methods, and whether errors are named there or for every method."""
    (owner,) = (
        each
        for each in ast.parse((ROOT / path).read_text()).body
        if isinstance(each, ast.ClassDef) and each.name == name
    )
    for_all = "Raises (every method)" in (ast.get_docstring(owner) or "")
    for each in owner.body:
        if not isinstance(each, ast.FunctionDef) or each.name.startswith("_"):
            continue
        kinds = {ast.unparse(decorator).rpartition(".")[2] for decorator in each.decorator_list}
        if not {"overload", "property", "setter"} & kinds:
            said = ast.get_docstring(each) or ""
            yield f"{path}#{name}.{each.name}", for_all or "aises" in said


PUBLIC = {
    place: names_errors
    for path, name in CLASSES.items()
    for place, names_errors in public_methods(path, name)
}


def test_every_public_method_has_an_example() -> None:
    assert [] == sorted(PUBLIC.keys() - set(METHODS))


def test_every_public_method_names_its_errors() -> None:
    assert [] == [place for place, names_errors in PUBLIC.items() if not names_errors]


def test_every_block_says_what_it_is() -> None:
    known = {"python", "sh", "text", "yaml"}
    assert [] == [place for place, block in BLOCKS.items() if block.language not in known]


def test_every_block_of_python_is_run_once_and_what_is_listed_exists() -> None:
    assert sorted(PYTHON) == sorted(
        [*HERE, *METHODS, *(place for runs in ELSEWHERE.values() for place in runs)]
    )


@pytest.mark.parametrize("path", ELSEWHERE)
def test_the_tests_that_run_blocks_exist_and_read_their_pages(path: str) -> None:
    source = (ROOT / path).read_text()
    for place, name in ELSEWHERE[path].items():
        assert f"def {name}(" in source
        assert place.partition("#")[0].rpartition("/")[2] in source


@pytest.mark.parametrize("place", HERE)
def test_a_block_of_python_runs(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    HERE[place]()


@pytest.mark.parametrize("place", METHODS)
def test_the_example_of_a_method_runs(place: str, breadbox_client: breadbox.Client) -> None:
    address, buffer = breadbox_client.address, breadbox_client.buffer
    with breadbox.connect(address, buffer=buffer) as client:  # It may be closed.
        run_method(place, client)


@pytest.mark.parametrize(
    "place", [place for place, block in BLOCKS.items() if block.language == "yaml"]
)
def test_a_block_of_yaml_is_yaml(place: str) -> None:
    assert isinstance(yaml.safe_load(BLOCKS[place].code), dict)
