"""Steps in, fragments out: episodes, time, sessions, and nothing dropped unseen."""

import inspect
import logging
import math
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from breadbox.model import errors
from breadbox.model.fragment import Fragment
from breadbox.model.types import (
    AdmissionOutcome,
    SchemaPolicy,
)
from breadbox.writing.appender import AppenderOptions
from breadbox.writing.step_writer import (
    SEAM_STEPS_MAX,
    SEAMS_TO_WARN,
    StepWriter,
    true_next_obs,
)
from support.eventually import eventually_sync
from support.step_client import FakeClient


class Walk:
    """Environments that count their steps: observation 100 i + t, for t = 0, 1, ..."""

    def __init__(self, writer: StepWriter, env_count: int = 1) -> None:
        self.writer = writer
        self.obs = np.arange(env_count, dtype=np.float32)[:, None] * 100

    def step(self, ends: str = "", **more: Any) -> None:
        """`ends`: for each environment "." goes on, "t" terminated, "c" cut off; "": none ends."""
        count = len(self.obs)
        ends = ends or "." * count
        next_obs = self.obs + 1
        self.writer.add(
            self.obs,
            np.zeros(count, np.int64),
            self.obs[:, 0] * 10,
            next_obs,
            [end == "t" for end in ends],
            [end == "c" for end in ends],
            **more,
        )
        has_ended = np.array([end != "." for end in ends])
        # The next episode begins a thousand further on, so that nothing is there twice.
        self.obs = np.where(has_ended[:, None], next_obs + 1000, next_obs).astype(np.float32)


@pytest.fixture
def client() -> Iterator[FakeClient]:
    made = FakeClient()
    yield made
    made.may_answer.set()


def make(client: FakeClient, **changes: Any) -> StepWriter:
    defaults: dict[str, Any] = {"worker_id": "w", "steps_per_fragment": 4, "flush_s": math.inf}
    return StepWriter(client, **{**defaults, **changes})


def column(values: NDArray[Any]) -> list[float]:
    return values[:, 0].tolist()


def finals(fragment: Fragment) -> dict[int, float]:
    if fragment.final_obs_step is None:
        return {}
    steps = fragment.final_obs_step.tolist()
    return dict(zip(steps, column(fragment.final_obs), strict=True))


# Cutting ----------------------------------------------------------------------------------------


def test_fragments_have_the_length_asked_for_and_the_last_one_what_is_left(
    client: FakeClient,
) -> None:
    with make(client) as writer:
        walk = Walk(writer)
        for _ in range(10):
            walk.step()
        writer.flush()
        assert [4, 4, 2] == [fragment.step_count for fragment in client.fragments]
    assert [0, 1, 2] == [fragment.fragment_index for fragment in client.fragments]
    assert {"w-0"} == {fragment.worker_id for fragment in client.fragments}
    assert [*map(float, range(10))] == [x for f in client.fragments for x in column(f.obs)]
    assert [4.0, 8.0, 10.0] == [float(f.next_obs[0]) for f in client.fragments]
    assert [True] + [False] * 9 == [bool(x) for f in client.fragments for x in f.first]
    assert [x * 10.0 for x in range(10)] == [float(x) for f in client.fragments for x in f.reward]
    assert {np.dtype(np.float32)} == {fragment.reward.dtype for fragment in client.fragments}
    counts = writer.counts
    assert (10, 10, 0, 0) == (counts.added, counts.sent, counts.dropped, counts.waiting)


def test_ends_keep_their_kind_and_their_true_final_observation(client: FakeClient) -> None:
    with make(client) as writer:
        walk = Walk(writer)
        for end in ".t.c":
            walk.step(end)
    (fragment,) = client.fragments
    assert [0, 1, 0, 0] == fragment.terminated.astype(int).tolist()
    assert [0, 0, 0, 1] == fragment.truncated.astype(int).tolist()
    assert [1, 0, 1, 0] == fragment.first.astype(int).tolist()
    assert [0, 0, 1, 1] == fragment.episode_id.tolist()
    assert {1: 2.0, 3: 1004.0} == finals(fragment)
    assert [0, 2, 0, 2] == fragment.extras["episode_length"].tolist()
    assert [0.0 + 10.0, 10020.0 + 10030.0] == fragment.extras["episode_return"][[1, 3]].tolist()


def test_an_episode_that_goes_on_in_the_next_fragment_keeps_its_number(client: FakeClient) -> None:
    with make(client) as writer:
        walk = Walk(writer)
        for end in "..t...":
            walk.step(end)
    one, two = client.fragments
    assert ([0, 0, 0, 1], [1, 1]) == (one.episode_id.tolist(), two.episode_id.tolist())
    assert [False, False] == two.first.tolist()
    assert not two.discontinuity


def test_environments_are_workers_of_their_own(client: FakeClient) -> None:
    with make(client, env_count=3) as writer:
        walk = Walk(writer, 3)
        for ends in ("...", ".t.", "...", "..."):
            walk.step(ends)
    assert ["w-0", "w-1", "w-2"] == [fragment.worker_id for fragment in client.fragments]
    assert [0.0, 1.0, 2.0, 3.0] == column(client.fragments[0].obs)
    assert [100.0, 101.0, 1102.0, 1103.0] == column(client.fragments[1].obs)
    assert [{}, {1: 102.0}, {}] == [finals(fragment) for fragment in client.fragments]


def test_a_reset_in_mid_episode_ends_it_truncated_and_nothing_bridges_it(
    client: FakeClient,
) -> None:
    with make(client) as writer:
        walk = Walk(writer)
        walk.step()
        walk.step()
        walk.obs = walk.obs + 500
        walk.step()
        walk.step()
    (fragment,) = client.fragments
    assert [0, 1, 0, 0] == fragment.truncated.astype(int).tolist()
    assert [0, 0, 0, 0] == fragment.terminated.astype(int).tolist()
    assert [1, 0, 1, 0] == fragment.first.astype(int).tolist()
    assert {1: 2.0} == finals(fragment)
    assert [0, 0, 1, 1] == fragment.episode_id.tolist()


def test_a_reset_right_after_a_fragment_was_cut_is_a_discontinuity(client: FakeClient) -> None:
    with make(client) as writer:
        walk = Walk(writer)
        for _ in range(4):
            walk.step()
        walk.obs = walk.obs + 500
        for _ in range(4):
            walk.step()
    one, two = client.fragments
    assert (False, True) == (one.discontinuity, two.discontinuity)
    assert [4.0] == one.next_obs.tolist()
    assert (0, 1, True) == (one.episode_id[-1], two.episode_id[0], bool(two.first[0]))


def sense(writer: StepWriter, steps: int, ends: str = "") -> None:
    """A robot's loop: it reads its sensors before and after each action, and never the same."""
    reading = 0.0
    for step in range(steps):
        reading += 1.0
        obs = np.array([[reading]], np.float32)
        end = ends[step : step + 1]
        after = obs + np.float32(0.25)
        writer.add(obs, np.zeros(1, np.int64), [1.0], after, [end == "t"], [end == "c"])


def test_a_loop_that_reads_its_sensors_anew_is_counted_and_warned_of_once(
    client: FakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    """Its episodes were of one step each, and nothing said so."""
    with make(client) as writer:
        sense(writer, 1 + SEAMS_TO_WARN - 1)
        assert "" == caplog.text
        sense(writer, 30)
        assert 30 + SEAMS_TO_WARN - 1 == writer.counts.seams
    assert 1 == caplog.text.count('follows="flags"')


def test_a_program_that_resets_in_mid_episode_now_and_then_is_not_warned_of(
    client: FakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    with make(client) as writer:
        walk = Walk(writer)
        for step in range(20 * (SEAM_STEPS_MAX + 1)):
            if step % (SEAM_STEPS_MAX + 1) == 0:
                walk.obs = walk.obs + 1000
            walk.step()
        assert 19 == writer.counts.seams
    assert "" == caplog.text


def test_episodes_follow_the_flags_alone_where_sensors_are_read_anew(client: FakeClient) -> None:
    with make(client, follows="flags") as writer:
        sense(writer, 10, "....t..c..")
        assert 0 == writer.counts.seams
    first = [bool(x) for fragment in client.fragments for x in fragment.first]
    assert [0, 5, 8] == np.flatnonzero(first).tolist()
    assert [1.0, 2.0, 3.0, 4.0] == column(client.fragments[0].obs)
    assert {0: 5.25, 3: 8.25} == finals(client.fragments[1])
    ended = [float(x) for f in client.fragments for x in f.extras["episode_return"]]
    assert [5.0, 3.0] == [x for x in ended if not math.isnan(x)]


def test_another_way_to_follow_is_refused_by_name(client: FakeClient) -> None:
    with pytest.raises(
        errors.InvalidRequestError, match=r"follows must be one of \('obs', 'flags'"
    ):
        make(client, follows="time")


def test_steps_of_a_session_without_weights_are_of_version_0(client: FakeClient) -> None:
    """A learner that resumes starts its session at 95, and publishes weights of 96 later."""
    client.version, client.weights = 95, None
    with make(client) as writer:
        Walk(writer).step()
    (fragment,) = client.fragments
    assert 0 == fragment.model_version_max


def test_nan_in_an_observation_ends_no_episode(client: FakeClient) -> None:
    with make(client) as writer:
        walk = Walk(writer)
        walk.obs = np.array([[0.0, np.nan]], np.float32)
        for _ in range(4):
            walk.step()
    assert [False] * 4 == client.fragments[0].truncated.tolist()


def test_the_callers_arrays_may_be_used_again(client: FakeClient) -> None:
    obs, next_obs = np.zeros((1, 1), np.float32), np.zeros((1, 1), np.float32)
    with make(client) as writer:
        for time in range(4):
            obs[:], next_obs[:] = time, time + 1
            writer.add(obs, obs, [0.0], next_obs, [False], [False])
        obs[:] = next_obs[:] = -1
    assert [0.0, 1.0, 2.0, 3.0] == column(client.fragments[0].obs)
    assert [4.0] == client.fragments[0].next_obs.tolist()


def test_extras_log_probs_and_values_stand_at_their_steps(client: FakeClient) -> None:
    with make(client, env_count=2, steps_per_fragment=2) as writer:
        walk = Walk(writer, 2)
        for time in range(2):
            walk.step(
                extras={"goal": np.array([[time], [time + 10]])},
                log_prob=[-1.0 - time, 0.0],
                value=[float(time), 5.0],
            )
    one, two = client.fragments
    assert ([[0], [1]], [[10], [11]]) == (one.extras["goal"].tolist(), two.extras["goal"].tolist())
    assert one.log_prob is not None
    assert two.value is not None
    assert ([-1.0, -2.0], [5.0, 5.0]) == (one.log_prob.tolist(), two.value.tolist())


def test_model_versions_are_those_of_the_steps(client: FakeClient) -> None:
    with make(client, steps_per_fragment=2) as writer:
        walk = Walk(writer)
        walk.step()
        writer.model_version = 4
        walk.step()
    (fragment,) = client.fragments
    assert (3, 4) == (fragment.model_version_min, fragment.model_version_max)


@pytest.mark.parametrize("version", [-1, 2**63, 1.0, None, "4", np.float32(2)])
def test_a_model_version_that_is_none_is_refused_where_it_is_set(
    client: FakeClient, version: Any
) -> None:
    with make(client, steps_per_fragment=2) as writer:
        with pytest.raises(errors.InvalidRequestError, match="model_version must be a whole"):
            writer.model_version = version
        assert 3 == writer.model_version
        number: Any = np.int64(5)
        writer.model_version = number
        assert (5, int) == (writer.model_version, type(writer.model_version))


def test_help_tells_what_the_model_version_of_a_writer_is() -> None:
    told = inspect.getdoc(StepWriter.model_version)
    assert told is not None
    assert "with which the next steps are labelled" in told


# Autoreset --------------------------------------------------------------------------------------


def test_a_step_that_only_resets_is_left_out(client: FakeClient) -> None:
    with make(client, autoreset="next_step", steps_per_fragment=3) as writer:
        for obs, next_obs, terminated in ((0, 1, False), (1, 2, True), (2, 50, False), (50, 51, 0)):
            writer.add(
                np.array([[obs]]), np.zeros(1), [1.0], np.array([[next_obs]]), [terminated], [False]
            )
    (fragment,) = client.fragments
    assert [0, 1, 50] == column(fragment.obs)
    assert [1, 0, 1] == fragment.first.astype(int).tolist()
    assert {1: 2} == finals(fragment)


def test_environments_that_do_not_act_are_left_out(client: FakeClient) -> None:
    with make(client, env_count=2, steps_per_fragment=2) as writer:
        for time, acts in enumerate(([1, 1], [1, 0], [1, 1])):
            obs = np.array([[time], [sum([1, 1, 0][:time])]], np.float32)
            writer.add(obs, np.zeros(2), [0, 0], obs + 1, [False, False], [False, False], acts=acts)
    by_worker = {f.worker_id: column(f.obs) for f in client.fragments if f.fragment_index == 0}
    assert {"w-0": [0.0, 1.0], "w-1": [0.0, 2.0]} == by_worker


def test_final_observations_of_a_same_step_reset_are_put_in_their_rows() -> None:
    next_obs = {"a": np.array([[1.0], [2.0], [3.0]])}
    finals = np.array([None, {"a": np.array([9.0])}, None], object)
    infos = {"final_obs": finals, "_final_obs": np.array([False, True, False])}
    assert [[1.0], [9.0], [3.0]] == true_next_obs(next_obs, infos)["a"].tolist()
    assert [[1.0], [2.0], [3.0]] == next_obs["a"].tolist()
    assert true_next_obs(next_obs, {}) is next_obs


# Time -------------------------------------------------------------------------------------------


def test_steps_do_not_wait_for_long_for_a_full_fragment(client: FakeClient) -> None:
    with make(client, flush_s=0.02, steps_per_fragment=1000) as writer:
        walk = Walk(writer)
        walk.step()
        eventually_sync(lambda: len(client.fragments) == 1)
        walk.step()
        eventually_sync(lambda: len(client.fragments) == 2)
        assert 2 == writer.counts.fragments.admitted
    assert [1, 1] == [fragment.step_count for fragment in client.fragments]
    assert [False, False] == [fragment.discontinuity for fragment in client.fragments]


def test_where_all_fragments_have_one_length_steps_wait_and_the_rest_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = FakeClient(SchemaPolicy.ONE)
    with caplog.at_level(logging.WARNING), make(client, flush_s=0.001) as writer:
        walk = Walk(writer)
        for _ in range(6):
            walk.step()
        writer.flush()
    assert [4] == [fragment.step_count for fragment in client.fragments]
    assert (6, 4, 2) == (writer.counts.added, writer.counts.sent, writer.counts.dropped)
    assert "--schema ragged" in caplog.text


# Sessions ---------------------------------------------------------------------------------------


def test_a_writer_without_a_session_of_its_own_goes_on_in_the_next_one(client: FakeClient) -> None:
    with make(client) as writer:
        walk = Walk(writer)
        for _ in range(5):
            walk.step()
        eventually_sync(lambda: len(client.fragments) == 1)
        client.session_id, client.version = "t", 0
        writer.flush()  # One step, of a session that is over.
        for _ in range(4):
            walk.step()
        assert "t" == writer.session_id
    one, two = client.fragments
    assert ("s", "t") == (one.session_id, two.session_id)
    assert (0, 0, True) == (one.fragment_index, two.fragment_index, bool(two.first[0]))
    assert (3, 0) == (one.model_version_min, two.model_version_min)
    counts = writer.counts
    assert 1 == counts.fragments.by_outcome[AdmissionOutcome.WRONG_SESSION]
    assert (9, 9, 0) == (counts.added, counts.sent, counts.dropped)


def test_a_writer_of_one_session_says_that_it_ended(client: FakeClient) -> None:
    writer = make(client, session_id="s", steps_per_fragment=2)
    walk = Walk(writer)
    client.session_id = "t"
    walk.step()
    walk.step()
    writer.flush()
    with pytest.raises(errors.SessionEndedError, match="'t'"):
        walk.step()
    writer.close()


def test_a_session_that_is_not_current_is_refused_at_once(client: FakeClient) -> None:
    with pytest.raises(errors.SessionEndedError):
        make(client, session_id="another")


def test_without_a_session_the_remedy_is_named(client: FakeClient) -> None:
    client.session_id = ""
    with pytest.raises(errors.WaitElapsedError, match=r"a session: .*start_session"):
        make(client, session_wait_s=0.0)


def test_that_the_next_session_is_waited_for_is_said_once(
    client: FakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    with make(client, steps_per_fragment=1, session_wait_s=60.0) as writer:
        assert "" == caplog.text
        walk = Walk(writer)
        client.session_id = ""
        walk.step()
        writer.flush()
        client.begins_when_awaited = "t"
        for _ in range(3):
            walk.step()
        assert "t" == writer.session_id
    said = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert ["no session is current; waiting up to 60 s"] == [each[:41] for each in said]


# Errors -----------------------------------------------------------------------------------------


def test_what_ends_the_sending_is_raised_by_the_next_call(client: FakeClient) -> None:
    client.failure = errors.UnavailableError("gone")
    writer = make(client, steps_per_fragment=1)
    walk = Walk(writer)
    walk.step()
    with pytest.raises(errors.UnavailableError):
        writer.flush()
    with pytest.raises(errors.UnavailableError):
        walk.step()
    with pytest.raises(errors.UnavailableError):
        writer.close()
    writer.close()
    assert writer.counts.added == writer.counts.sent + writer.counts.dropped


def test_a_step_of_another_shape_is_refused_and_the_steps_before_it_stay(
    client: FakeClient,
) -> None:
    with make(client, env_count=2) as writer:
        walk = Walk(writer, 2)
        walk.step()
        good, walk.obs = walk.obs, np.zeros((2, 2), np.float32)
        with pytest.raises(errors.TreeMismatchError):
            walk.step()
        walk.obs = good
        walk.step()
    for index, fragment in enumerate(client.fragments):
        assert [100.0 * index, 100.0 * index + 1] == column(fragment.obs)
        assert [True, True] == fragment.first.tolist()
        assert [True, False] == fragment.truncated.tolist()
        assert {0: 100.0 * index + 1} == finals(fragment)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"reward": [0.0, 0.0]}, "reward"),
        ({"obs": np.zeros((2, 1), np.float32)}, "obs"),
        ({"action": np.int64(1)}, "action"),
        ({"extras": {"episode_return": np.zeros(1)}}, "extras"),
        ({"extras": {"x": 1.0}}, "extras.x"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_name(
    client: FakeClient, changes: dict[str, Any], field: str
) -> None:
    step: dict[str, Any] = {
        "obs": np.zeros((1, 1), np.float32),
        "action": np.zeros(1),
        "reward": [0.0],
        "next_obs": np.zeros((1, 1), np.float32),
        "terminated": [False],
        "truncated": [False],
    }
    with make(client) as writer:
        with pytest.raises(errors.InvalidRequestError) as refused:
            writer.add(**{**step, **changes})
        assert field == refused.value.field
        with pytest.raises(errors.TreeMismatchError, match="next_obs"):
            writer.add(**{**step, "next_obs": np.zeros((1, 1), np.float64)})
        writer.add(**step)
    assert 1 == writer.counts.added


def test_a_closed_writer_takes_nothing(client: FakeClient) -> None:
    writer = make(client)
    writer.close()
    with pytest.raises(errors.ClosedError):
        Walk(writer).step()


def test_what_waits_is_bounded_by_the_appenders_queue(client: FakeClient) -> None:
    client.may_answer.clear()
    options = AppenderOptions(flush_after_s=0, queue_count_max=2)
    writer = make(client, steps_per_fragment=1, options=options)
    walk = Walk(writer)

    def step_thrice() -> None:
        for _ in range(3):
            walk.step()

    blocked = threading.Thread(target=step_thrice)
    blocked.start()
    appender = writer._appender  # noqa: SLF001 - the writer is held by who waits
    eventually_sync(lambda: appender.counts.pending == 2)
    blocked.join(0.05)
    assert blocked.is_alive()
    client.may_answer.set()
    blocked.join(10)
    writer.close()
    assert 3 == len(client.fragments)


ROWS = np.arange(9, dtype=np.float32).reshape(3, 3)


@pytest.mark.parametrize(
    "obs",
    [
        list(ROWS),
        tuple(ROWS),
        tuple({"x": row} for row in ROWS),
        {"x": list(ROWS)},
        [{"x": row, "y": row} for row in ROWS],
    ],
    ids=["list", "tuple", "tuple of dicts", "list below a key", "list of dicts"],
)
def test_a_list_of_environments_observations_is_refused_and_not_taken_for_columns(
    obs: Any,
) -> None:
    client = FakeClient()
    with StepWriter(client, env_count=3, flush_s=math.inf) as writer:
        with pytest.raises(errors.InvalidRequestError, match=r"3 alike, for 3 env.*np\.stack"):
            writer.add(obs, np.zeros(3), [0.0] * 3, obs, [False] * 3, [False] * 3)
        assert 0 == writer.counts.added


def test_parts_of_an_observation_may_be_a_tuple() -> None:
    client = FakeClient()
    with StepWriter(client, env_count=3, flush_s=math.inf) as writer:
        obs = (ROWS, ROWS[:, 0])
        extras = {"state": (ROWS, ROWS, ROWS)}
        writer.add(obs, np.zeros(3), [0.0] * 3, obs, [False] * 3, [False] * 3, extras=extras)
    assert [0.0, 3.0, 6.0] == [fragment.obs[1][0] for fragment in client.fragments]


def test_text_of_one_axis_keeps_the_width_that_it_was_given_with() -> None:
    client = FakeClient()
    words = ["a", "longer", "", "word"]
    with StepWriter(client, steps_per_fragment=2, flush_s=math.inf) as writer:
        for word in words:
            obs = np.array([word], "U32")
            writer.add(obs, obs.astype("S32"), [0.0], obs, [word == "word"], [False])
    assert words == [word for fragment in client.fragments for word in fragment.obs.tolist()]
    assert {"<U32"} == {fragment.obs.dtype.str for fragment in client.fragments}
    assert {"<U32"} == {fragment.next_obs.dtype.str for fragment in client.fragments}
    assert {"|S32"} == {fragment.action.dtype.str for fragment in client.fragments}


@pytest.mark.parametrize("field", ["obs", "action", "reward", "next_obs", "extras", "log_prob"])
def test_a_masked_array_is_refused_because_its_mask_would_be_lost(field: str) -> None:
    client = FakeClient()
    given: dict[str, Any] = {
        "obs": np.zeros((1, 2)),
        "action": np.zeros(1),
        "reward": np.zeros(1),
        "next_obs": np.zeros((1, 2)),
        "extras": {"x": np.zeros(1)},
        "log_prob": np.zeros(1),
    }
    masked = np.ma.masked_array(np.zeros((1, 2) if "obs" in field else 1), True)
    given[field] = {"x": masked} if field == "extras" else masked
    with StepWriter(client, flush_s=math.inf) as writer:
        with pytest.raises(errors.UnsupportedArrayError, match=f"{field}.*mask apart"):
            writer.add(**given, terminated=[False], truncated=[False])
        assert 0 == writer.counts.added


def test_fragments_have_one_order_of_keys_whatever_order_each_step_has() -> None:
    client = FakeClient()
    one, other = np.full((1, 2), 1.0), np.full((1, 2), 2.0)
    with StepWriter(client, steps_per_fragment=3, flush_s=math.inf) as writer:
        for step in range(6):
            obs = {"b": other, "a": one} if step % 2 else {"a": one, "b": other}
            led_to = {"b": other, "a": one}
            ends = [step % 3 == 2]
            writer.add(obs, obs, [0.0], led_to, ends, [False], extras=led_to)
    for fragment in client.fragments:
        for tree in (fragment.obs, fragment.next_obs, fragment.final_obs, fragment.action):
            assert ["a", "b"] == [*tree]
            assert ([1.0], [2.0]) == tuple(np.unique(tree[key]).tolist() for key in tree)
