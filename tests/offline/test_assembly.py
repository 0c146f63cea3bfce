"""Goal: rows become the episodes that were recorded, in whatever order they come, and whatever does
not fit is reported and never guessed at.

Method: rows of toy episodes (obs of step k is [k]), disturbed in one way per test; a property over
random shuffles and batch cuts.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from breadbox_offline.episodes.episode import Episode
from breadbox_offline.episodes.validation import validate_episodes
from breadbox_offline.errors import (
    MissingColumnError,
    OfflineDataError,
    SchemaError,
    ValidationError,
)
from breadbox_offline.report import (
    FindingKind,
    FindingPolicy,
    ValidationPolicy,
    ValidationReport,
)
from breadbox_offline.rows.assembly import RowAssembler, map_rows
from breadbox_offline.rows.options import MappingOptions, OfflineSchema, RowGrouping
from support import growth

Columns = dict[str, Any]


def rows(episode_id: str, length: int, *, end: str = "term", t0: int = 0) -> Columns:
    """Rows of one toy episode."""
    t = np.arange(t0, t0 + length)
    last = t == t0 + length - 1
    return {
        "eps_id": np.array([episode_id] * length),
        "t": t,
        "obs": t.astype(np.float32)[:, None],
        "new_obs": (t + 1).astype(np.float32)[:, None],
        "actions": t,
        "rewards": (t + 1).astype(np.float32),
        "terminateds": last & (end == "term"),
        "truncateds": last & (end == "trunc"),
        "lp": t.astype(np.float32),
    }


def chain(*parts: Columns) -> Columns:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def pick(columns: Columns, order: Any) -> Columns:
    return {name: values[np.asarray(order)] for name, values in columns.items()}


def assemble(columns: Columns, **how: Any) -> tuple[list[Episode], ValidationReport]:
    report = ValidationReport(how.pop("policy", ValidationPolicy()))
    return map_rows(columns, MappingOptions(**how), report), report


def shapes(episodes: list[Episode]) -> list[tuple[str, int, int, bool, bool]]:
    return [(e.id, e.t_started, e.t, e.terminated, e.truncated) for e in episodes]


class TestOrder:
    def test_rows_of_one_id_are_one_episode(self) -> None:
        episodes, report = assemble(chain(rows("a", 3), rows("b", 2, end="trunc")))
        assert [("a", 0, 3, True, False), ("b", 0, 2, False, True)] == shapes(episodes)
        assert [0, 1, 2, 3] == episodes[0].observations[:, 0].tolist()
        assert [0, 1] == episodes[1].extra_model_outputs["lp"].tolist()
        assert not report.counts

    def test_interleaved_and_reversed_rows_are_put_in_order(self) -> None:
        columns = chain(rows("a", 3), rows("b", 2))
        episodes, _ = assemble(pick(columns, [4, 2, 0, 3, 1]))
        whole, _ = assemble(columns)
        by_id = sorted(episodes, key=lambda episode: episode.id)
        assert [e.content_digest() for e in whole] == [e.content_digest() for e in by_id]

    def test_without_t_rows_count_in_their_order(self) -> None:
        columns = chain(rows("a", 3), rows("b", 2))
        del columns["t"]
        assert [("a", 0, 3, True, False), ("b", 0, 2, True, False)] == shapes(assemble(columns)[0])

    def test_without_ids_an_end_or_a_restart_of_t_separates(self) -> None:
        columns = chain(rows("a", 3), rows("b", 2, end=""), rows("c", 2))
        del columns["eps_id"]
        episodes, _ = assemble(columns)
        assert [3, 2, 2] == [len(episode) for episode in episodes]

    def test_without_ids_the_same_rows_are_named_the_same(self) -> None:
        columns = rows("a", 3)
        del columns["eps_id"]
        (first,), (again,) = assemble(columns)[0], assemble(columns)[0]
        assert first.id == again.id
        report = ValidationReport()
        assert [first] == validate_episodes([first, again], report)
        assert 1 == report.counts[FindingKind.DUPLICATE]

    @given(seed=st.integers(0, 2**31), cuts=st.lists(st.integers(1, 19), max_size=4))
    @settings(max_examples=60, deadline=None)
    def test_any_order_and_any_batches_give_the_same_episodes(
        self, seed: int, cuts: list[int]
    ) -> None:
        columns = chain(rows("a", 6), rows("b", 4, end="trunc"), rows("c", 9), rows("d", 1))
        order = np.random.default_rng(seed).permutation(20)
        if cuts:
            # Within a batch any order goes, but an episode is over when its end was seen.
            order = order[np.argsort(columns["t"][order], kind="stable")]
        report = ValidationReport(ValidationPolicy.strict())
        assembler = RowAssembler(MappingOptions(), report)
        found: list[Episode] = []
        for part in np.split(order, sorted(set(cuts))):
            if len(part):
                found += assembler.add(pick(columns, part))
        found += assembler.finish()
        assert {("a", 6), ("b", 4), ("c", 9), ("d", 1)} == {(e.id, len(e)) for e in found}
        for episode in found:
            assert np.arange(len(episode) + 1).tolist() == episode.observations[:, 0].tolist()

    @growth.marked
    def test_each_row_of_a_long_episode_takes_as_long_to_assemble_as_one_of_a_short(self) -> None:
        def assembling(batch_count: int) -> Callable[[], object]:
            whole = rows("a", 8 * batch_count)
            batches = [pick(whole, range(at, at + 8)) for at in range(0, 8 * batch_count, 8)]
            assembler = RowAssembler(MappingOptions(), ValidationReport())

            def assemble() -> None:
                assert [8 * batch_count] == [
                    len(each) for batch in batches for each in assembler.add(batch)
                ]

            return assemble

        growth.check(assembling, 1024)


class TestWhatDoesNotFit:
    def test_a_gap_cuts_the_episode_and_keeps_both_parts(self) -> None:
        episodes, report = assemble(pick(rows("a", 6), [0, 1, 4, 5]))
        assert [("a", 0, 2, False, True), ("a", 4, 6, True, False)] == shapes(episodes)
        assert [0, 1, 2] == episodes[0].observations[:, 0].tolist()
        (finding,) = report.findings
        assert (FindingKind.GAP, "a", 4, 2) == (
            finding.kind,
            finding.episode_id,
            finding.t,
            finding.row,
        )

    def test_a_gap_can_leave_the_episode_out_or_raise(self) -> None:
        columns = chain(pick(rows("a", 6), [0, 1, 4, 5]), rows("b", 1))
        skip = ValidationPolicy({FindingKind.GAP: FindingPolicy.SKIP})
        assert [("b", 0, 1, True, False)] == shapes(assemble(columns, policy=skip)[0])
        with pytest.raises(ValidationError, match=r"gap .*episode a.*step 4"):
            assemble(columns, policy=ValidationPolicy.strict())

    def test_a_repeated_step_is_left_out_and_reported(self) -> None:
        episodes, report = assemble(pick(rows("a", 3), [0, 1, 1, 2]))
        assert [("a", 0, 3, True, False)] == shapes(episodes)
        assert (1, 2) == (report.counts[FindingKind.REPEATED_STEP], report.findings[0].row)

    def test_a_seam_cuts_where_the_next_row_starts_elsewhere(self) -> None:
        columns = rows("a", 4)
        columns["obs"][2] = 99
        episodes, report = assemble(columns)
        assert [("a", 0, 2, False, True), ("a", 2, 4, True, False)] == shapes(episodes)
        assert [0, 1, 2] == episodes[0].observations[:, 0].tolist()
        assert 1 == report.counts[FindingKind.SEAM]

    def test_nan_observations_continue_each_other(self) -> None:
        columns = rows("a", 3)
        columns["obs"][1] = columns["new_obs"][0] = np.nan
        assert not assemble(columns)[1].counts

    def test_an_end_in_the_middle_separates(self) -> None:
        columns = rows("a", 4)
        columns["terminateds"][1] = True
        assert [("a", 0, 2, True, False), ("a", 2, 4, True, False)] == shapes(assemble(columns)[0])

    @pytest.mark.parametrize(
        ("policy", "expected"),
        [
            (FindingPolicy.TRUNCATE, [("a", 0, 2, False, True)]),
            (FindingPolicy.KEEP, [("a", 0, 2, False, False)]),
            (FindingPolicy.SKIP, []),
        ],
    )
    def test_an_unfinished_episode_follows_its_policy(
        self, policy: FindingPolicy, expected: list[Any]
    ) -> None:
        chosen = ValidationPolicy({FindingKind.UNFINISHED: policy})
        episodes, report = assemble(rows("a", 2, end=""), policy=chosen)
        assert expected == shapes(validate_episodes(episodes, report))
        assert 1 == report.counts[FindingKind.UNFINISHED]

    def test_one_bad_episode_does_not_reject_the_others(self) -> None:
        columns = chain(rows("a", 2), rows("b", 2), rows("c", 2))
        columns["rewards"][3] = np.nan
        episodes, report = assemble(columns)
        assert ["a", "c"] == [episode.id for episode in validate_episodes(episodes, report)]
        assert "not_finite (episode b, step 0): reward nan at step 1 [skip]" == str(
            report.findings[0]
        )

    def test_findings_kept_are_bounded_but_all_are_counted(self) -> None:
        report = ValidationReport(findings_max=3)
        columns = chain(*(rows(str(number), 1, end="") for number in range(9)))
        validate_episodes(map_rows(columns, MappingOptions(), report), report)
        assert (9, 3) == (report.counts[FindingKind.UNFINISHED], len(report.findings))


class TestHolding:
    def test_rows_wait_for_the_rest_of_their_episode(self) -> None:
        columns = chain(rows("a", 4), rows("b", 2))
        assembler = RowAssembler(MappingOptions(), ValidationReport())
        assert [] == assembler.add(pick(columns, [0, 1]))
        assert [("b", 0, 2, True, False)] == shapes(assembler.add(pick(columns, [4, 5, 2])))
        assert [("a", 0, 4, True, False)] == shapes(assembler.add(pick(columns, [3])))
        assert [] == assembler.finish()

    def test_held_rows_are_bounded_and_the_oldest_go_first(self) -> None:
        report = ValidationReport()
        assembler = RowAssembler(MappingOptions(held_rows_max=5), report)
        assert [] == assembler.add(rows("a", 3, end=""))
        assert [("a", 0, 3, False, False)] == shapes(assembler.add(rows("b", 3, end="")))
        assert [("b", 0, 3, False, False)] == shapes(assembler.finish())

    def test_other_columns_than_before_are_refused(self) -> None:
        assembler = RowAssembler(MappingOptions(), ValidationReport())
        assembler.add(rows("a", 2, end=""))
        later = rows("a", 2, t0=2)
        later["obs"] = later["new_obs"] = np.zeros((2, 5), np.float32)
        with pytest.raises(SchemaError, match="'obs'"):
            assembler.add(later)


class TestAgents:
    def test_agents_may_act_at_different_times(self) -> None:
        columns = chain(rows("e", 2), rows("e", 2))
        columns["agent_id"] = np.array(["x", "x", "y", "y"])
        columns["t"] = np.array([0, 2, 1, 3])
        episodes, report = assemble(columns, multi_agent=True, module_of={"x": "p", "y": "q"})
        assert [("x", "p", 2), ("y", "q", 2)] == [
            (e.agent_id, e.module_id, len(e)) for e in episodes
        ]
        assert not report.counts

    def test_the_module_column_wins(self) -> None:
        columns = rows("e", 2)
        columns["agent_id"], columns["module_id"] = np.array(["x"] * 2), np.array(["m"] * 2)
        (episode,), _ = assemble(columns, multi_agent=True, module_of=lambda _agent: "other")
        assert "m" == episode.module_id

    def test_the_agent_column_is_needed(self) -> None:
        with pytest.raises(MissingColumnError, match="agent_id"):
            assemble(rows("e", 2), multi_agent=True)


class TestColumns:
    @pytest.mark.parametrize("column", ["obs", "new_obs", "actions", "rewards"])
    def test_a_missing_column_is_named(self, column: str) -> None:
        columns = rows("a", 2)
        del columns[column]
        with pytest.raises(MissingColumnError, match=f"'{column}': is missing"):
            assemble(columns)

    def test_something_must_say_where_episodes_end(self) -> None:
        columns = rows("a", 2)
        del columns["terminateds"], columns["truncateds"]
        with pytest.raises(MissingColumnError, match="where episodes end"):
            assemble(columns)

    @pytest.mark.parametrize("name", ["dones", "done"])
    def test_other_names_of_the_end_flag_are_known(self, name: str) -> None:
        columns = rows("a", 2)
        columns[name] = columns.pop("terminateds")
        (episode,), _ = assemble(columns)
        assert (True, {"lp"}) == (episode.terminated, set(episode.extra_model_outputs))

    @pytest.mark.parametrize("flag", [np.nan, 2.0, None, -1])
    def test_a_flag_that_is_none_is_refused_with_its_place(self, flag: Any) -> None:
        columns = rows("a", 3)
        columns["terminateds"] = [False, flag, True]
        with pytest.raises(OfflineDataError, match=r"row 1, column 'terminateds'"):
            assemble(columns)

    @pytest.mark.parametrize("t", [[0, 1.5, 2], [0, np.nan, 2], [0, None, 2], ["0", "1", "2"]])
    def test_a_timestep_that_is_none_is_refused(self, t: list[Any]) -> None:
        with pytest.raises(OfflineDataError, match="column 't'"):
            assemble({**rows("a", 3), "t": t})

    @pytest.mark.parametrize("rewards", [[1, "x", 2], [1, None, 2], np.zeros((3, 2))])
    def test_a_reward_that_is_none_is_refused(self, rewards: Any) -> None:
        with pytest.raises(OfflineDataError, match="column 'rewards'"):
            assemble({**rows("a", 3), "rewards": rewards})

    def test_an_id_that_is_missing_is_refused(self) -> None:
        with pytest.raises(OfflineDataError, match="row 1, column 'eps_id'"):
            assemble({**rows("a", 3), "eps_id": ["a", None, "a"]})

    @pytest.mark.parametrize(
        "obs",
        [
            [np.zeros(1), np.zeros(2), np.zeros(1)],
            [[0.0], [0.0, 1.0], [0.0]],
            [{"a": np.zeros(1)}, {"b": np.zeros(1)}, {"a": np.zeros(1)}],
            [np.zeros(1), object(), np.zeros(1)],
        ],
    )
    def test_observations_of_other_shapes_are_refused_with_the_row(self, obs: list[Any]) -> None:
        with pytest.raises(OfflineDataError, match="row 1, column 'obs'"):
            assemble({**rows("a", 3), "obs": obs})

    def test_columns_of_different_lengths_are_refused(self) -> None:
        with pytest.raises(SchemaError, match="column 'lp': has 2 rows"):
            assemble({**rows("a", 3), "lp": np.zeros(2)})

    def test_no_columns_are_refused(self) -> None:
        with pytest.raises(SchemaError, match="no columns"):
            assemble({})

    def test_text_observations_are_text(self) -> None:
        columns = rows("a", 2)
        columns["obs"], columns["new_obs"] = np.array(["go", "on"]), np.array(["on", "end"])
        (episode,), _ = assemble(columns)
        assert ["go", "on", "end"] == episode.observations.tolist()

    def test_the_final_observation_can_be_done_without(self) -> None:
        columns = rows("a", 2)
        del columns["new_obs"]
        (episode,), _ = assemble(columns, ignore_final_observation=True)
        assert [0, 1, 0] == episode.observations[:, 0].tolist()


class TestSchema:
    @pytest.mark.parametrize(
        "columns", [{"observation": "obs"}, {"obs": "x", "new_obs": "x"}], ids=["unknown", "twice"]
    )
    def test_contradictions_are_refused_before_any_data(self, columns: dict[str, str]) -> None:
        with pytest.raises(SchemaError):
            OfflineSchema(columns=columns)

    @pytest.mark.parametrize(("unmapped", "kept"), [("keep", {"lp"}), ("drop", set())])
    def test_unmapped_columns_are_kept_or_dropped(self, unmapped: Any, kept: set[str]) -> None:
        (episode,), _ = assemble(rows("a", 2), schema=OfflineSchema(unmapped=unmapped))
        assert kept == set(episode.extra_model_outputs)

    def test_unmapped_columns_can_be_refused(self) -> None:
        with pytest.raises(SchemaError, match="'lp'"):
            assemble(rows("a", 2), schema=OfflineSchema(unmapped="error"))


class TestOneStep:
    def test_every_row_stands_alone(self) -> None:
        episodes, _ = assemble(rows("a", 3), grouping=RowGrouping.ONE_STEP)
        assert [("a", 0, 1)] * 3 == [(e.id, e.t_started, len(e)) for e in episodes]
        assert [[0, 1], [1, 2], [2, 3]] == [e.observations[:, 0].tolist() for e in episodes]
