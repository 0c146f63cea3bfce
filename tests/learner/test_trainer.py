"""The loop around the updates: when it ends, what it writes, publishes and releases."""

import errno
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch

from breadbox.model.errors import SessionEndedError
from breadbox_learner.ranks import Ranks
from breadbox_learner.runs import JsonLines, Progress, RunFolderError
from breadbox_learner.settings import LearnSettings, Membership
from breadbox_learner.training.batching import EpisodeReturns
from breadbox_learner.training.ppo import PpoUpdater
from breadbox_learner.training.source import FetchedBatch, UnusableShareError
from breadbox_learner.training.trainer import (
    NullPublisher,
    Outcome,
    StarvedError,
    Trainer,
    TrainerState,
)
from breadbox_policies import PolicyModule, make_policy
from support.collating import collate
from support.local_rollout import LocalRollout
from support.local_source import LocalSource


def make_cartpole() -> gymnasium.Env[Any, Any]:
    return gymnasium.make("CartPole-v1")


class Bench:
    """A trainer with everything it needs, and what it leaves."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "progress.jsonl"
        env = make_cartpole()
        torch.manual_seed(0)
        self.policy: PolicyModule = make_policy("mlp", env.observation_space, env.action_space)
        env.close()
        rollout = LocalRollout(make_cartpole, env_count=4, steps_per_fragment=16, seed=0)
        self.source: Any = LocalSource(rollout, self.policy, rounds=2)
        self.publisher = NullPublisher("", 1)
        self.now = 0.0
        self.saved: list[int] = []
        self.progress = Progress([])

    def trainer(
        self,
        stopped: Callable[[], bool] = lambda: False,
        source: Any = None,
        ranks: Ranks | None = None,
        save: Callable[[TrainerState], None] | None = None,
        **settings: Any,
    ) -> Trainer:
        made = LearnSettings(**settings)
        self.progress = Progress([JsonLines(self.path)])
        return Trainer(
            settings=made,
            updater=PpoUpdater(self.policy, made.ppo, seed=0),
            source=source or self.source,
            publisher=self.publisher,
            progress=self.progress,
            returns=EpisodeReturns(),
            state=TrainerState(),
            stopped=stopped,
            checkpoint=save or (lambda state: self.saved.append(state.update)),
            ranks=ranks or Ranks(),
            clock=lambda: self.now,
        )

    def records(self) -> list[dict[str, Any]]:
        self.progress.close()
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def close(self) -> None:
        self.source.close()
        self.progress.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()


def test_each_update_leaves_a_record_and_a_version(bench: Bench) -> None:
    assert Outcome.UPDATES_DONE == bench.trainer(updates_max=3).run()
    records = bench.records()
    assert [1, 2, 3] == [record["update"] for record in records]
    assert [2, 3, 4] == [record["model_version"] for record in records]
    assert [8, 16, 24] == [record["fragments"] for record in records]
    assert [128, 256, 384] == [record["steps"] for record in records]
    # Everything that was made is trained on here.
    assert [128, 256, 384] == [record["environment_steps"] for record in records]
    wanted = {
        "time_s", "update", "model_version", "staleness_mean", "staleness_max", "use_count_mean",
        "staleness_at_grant_mean", "staleness_at_grant_max", "left_out",
        "fetch_wait_s", "update_s", "policy_loss", "value_loss", "entropy", "fragments", "steps",
        "waiting_reason", "return_mean_100", "episode_count",
    }  # fmt: skip
    assert set() == wanted - records[0].keys()
    assert [True] * 3 == bench.source.released


def test_a_record_has_the_staleness_at_the_grant_and_that_at_the_update(bench: Bench) -> None:
    """Each batch was granted at version 1, which was current then, and waited."""

    class Ahead(LocalSource):
        def next(self, stopped: Callable[[], bool]) -> FetchedBatch | None:
            fetched = super().next(stopped)
            if fetched is not None:
                count = len(fetched.batch)
                fetched.versions = [1] * (count - 2) + [0, 0]
                fetched.staleness = [0] * (count - 2) + [1, 1]
            return fetched

        def take_left_out_count(self) -> int:
            return 3

    source = Ahead(bench.source.rollout, bench.policy, rounds=2)
    bench.trainer(source=source, updates_max=3).run()
    names = ("staleness_mean", "staleness_max", "staleness_at_grant_mean", "staleness_at_grant_max")
    assert [
        (0.25, 1, 0.25, 1, 3),
        (1.25, 2, 0.25, 1, 6),
        (2.25, 3, 0.25, 1, 9),
    ] == [tuple(record[name] for name in (*names, "left_out")) for record in bench.records()]


def test_versions_are_published_every_so_many_updates(bench: Bench) -> None:
    bench.trainer(updates_max=4, publish_every=2).run()
    assert [1, 2, 2, 3] == [record["model_version"] for record in bench.records()]


def test_checkpoints_are_written_every_so_many_updates_and_at_the_end(bench: Bench) -> None:
    bench.trainer(updates_max=5, checkpoint_every=2).run()
    assert [2, 4, 5] == bench.saved


def test_checkpoints_are_written_without_being_asked_for(bench: Bench) -> None:
    bench.trainer(updates_max=45, epochs=1).run()
    assert [20, 40, 45] == bench.saved


def test_an_error_leaves_a_checkpoint_of_the_last_whole_update(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: PolicyModule) -> None:
        raise SessionEndedError("ours", "theirs")

    trainer = bench.trainer(updates_max=9)
    monkeypatch.setattr(bench.publisher, "publish", fail)
    with pytest.raises(SessionEndedError):
        trainer.run()
    assert [1] == bench.saved


def test_an_error_within_an_update_saves_no_half_trained_weights(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = bench.trainer(updates_max=9, checkpoint_every=2)
    whole = PpoUpdater.update

    def fail_at_third(self: PpoUpdater, *batch: Any, number: int, **options: Any) -> Any:
        if number == 2:
            raise RuntimeError("out of memory")
        return whole(self, *batch, number=number, **options)

    monkeypatch.setattr(PpoUpdater, "update", fail_at_third)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.run()
    assert [2] == bench.saved


def test_a_run_goes_on_without_checkpoints_and_says_so_once(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the last one matters enough to end with an error."""

    def full(_: TrainerState) -> None:
        raise RunFolderError(Path("run/checkpoint"), OSError(errno.ENOSPC, "No space left"))

    trainer = bench.trainer(updates_max=4, checkpoint_every=1, save=full)
    with pytest.raises(RunFolderError, match="run/checkpoint: No space left"):
        trainer.run()
    assert 4 == len(bench.records())
    assert 1 == caplog.text.count("training continues without a new checkpoint")


def test_nothing_is_published_while_only_the_value_is_trained(bench: Bench) -> None:
    bench.trainer(updates_max=3, value_warmup_updates=2).run()
    assert [1, 1, 2] == [record["model_version"] for record in bench.records()]


def test_a_stop_is_noticed_before_the_next_batch(bench: Bench) -> None:
    assert Outcome.STOPPED == bench.trainer(stopped=lambda: len(bench.source.released) == 2).run()
    assert 2 == len(bench.records())


def test_the_target_counts_only_after_a_hundred_episodes(bench: Bench) -> None:
    assert Outcome.TARGET_REACHED == bench.trainer(target_return=1.0, updates_max=200).run()
    last, before = bench.records()[-1], bench.records()[-2]
    assert last["episode_count"] >= 100 > before["episode_count"]


def test_the_time_limit_ends_training(bench: Bench) -> None:
    class SlowSource(LocalSource):
        def next(self, stopped: Callable[[], bool]) -> FetchedBatch | None:
            bench.now += 4.0
            return super().next(stopped)

    source = SlowSource(bench.source.rollout, bench.policy, rounds=1)
    assert Outcome.TIME_LIMIT == bench.trainer(source=source, time_limit_s=10.0).run()
    assert 2 == len(bench.records())


def test_a_learner_without_data_gives_up_after_its_limit(bench: Bench) -> None:
    class EmptySource(LocalSource):
        def next(self, stopped: Callable[[], bool]) -> FetchedBatch | None:
            while not stopped():
                bench.now += 1.0
            return None

    source = EmptySource(bench.source.rollout, bench.policy)
    with pytest.raises(StarvedError, match="no batch for 31 s"):
        bench.trainer(source=source, wait_limit_s=30.0).run()


def test_draws_that_a_rank_cannot_use_are_skipped_counted_and_waited_through(
    bench: Bench,
) -> None:
    class OddSource(LocalSource):
        asked = 0

        def next(self, stopped: Callable[[], bool]) -> FetchedBatch | None:
            bench.now += 1.0
            self.asked += 1
            if self.asked in (1, 2, 4) or self.asked > 5:
                raise UnusableShareError(8)
            return super().next(stopped)

    source = OddSource(bench.source.rollout, bench.policy)
    trainer = bench.trainer(source=source, wait_limit_s=30.0)
    # Nothing but misfits is no batch either: the wait goes on through the draws that are skipped.
    with pytest.raises(StarvedError, match="no batch for 31 s"):
        trainer.run()
    records = bench.records()
    assert [(16, 2), (24, 3)] == [(r["misfits"], r["skipped_draws"]) for r in records]
    assert [3.0, 2.0] == [record["fetch_wait_s"] for record in records]
    assert 3 + 30 == trainer.state.skipped_draws


def test_what_another_rank_cannot_use_is_given_back(bench: Bench) -> None:
    class OddPeer(Ranks):
        asked = 0

        def largest(self, number: int) -> int:
            self.asked += 1
            # After the version the vote: the second rank has nothing for the first draw.
            return max(number, 1) if self.asked == 2 else number

    trainer = bench.trainer(ranks=OddPeer(), updates_max=2)
    assert Outcome.UPDATES_DONE == trainer.run()
    assert [False, True, True] == bench.source.released
    assert [1, 1] == [record["skipped_draws"] for record in bench.records()]


def test_a_batch_that_could_not_be_trained_on_is_given_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    trainer = bench.trainer(updates_max=1)
    monkeypatch.setattr(PpoUpdater, "update", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.run()
    assert [False] == bench.source.released


class ThreeRanks(Ranks):
    """Rank 0 of three; the two others are scripted, and their share is as large as this one's."""

    membership = Membership(0, 3)

    def __init__(self, theirs: list[float]) -> None:
        self.theirs = theirs

    def sum(self, numbers: torch.Tensor) -> torch.Tensor:
        return 3 * numbers

    def largest(self, number: int) -> int:
        return max(number, 0)

    def gathered(self, rows: torch.Tensor) -> torch.Tensor:
        values = torch.tensor(self.theirs, dtype=torch.float64).view(torch.int64)
        identities = torch.arange(len(values)) - 2**63
        return torch.cat([rows, torch.stack([identities, values], dim=1)])


def test_what_is_recorded_covers_all_ranks(bench: Bench) -> None:
    theirs = [1000.5, 2000.25, -3.0]
    trainer = bench.trainer(updates_max=1, ranks=ThreeRanks(theirs))
    trainer.run()
    (record,) = bench.records()
    batch = collate(bench.source.last)
    ours = EpisodeReturns()
    ours.observe(batch)
    assert ours.episode_count > 0
    assert 3 * len(batch) == record["fragments"] == trainer.state.fragments
    assert 3 * batch.step_count == record["steps"] == trainer.state.steps
    assert ours.episode_count + 3 == record["episode_count"]
    total = sum(ours.recent) + sum(theirs)
    assert record["return_mean_100"] == pytest.approx(total / record["episode_count"])


def test_the_target_is_judged_by_the_episodes_of_all_ranks(bench: Bench) -> None:
    ranks = ThreeRanks([1e6] * 100)
    assert Outcome.TARGET_REACHED == bench.trainer(target_return=5e5, ranks=ranks).run()
    assert 1 == len(bench.records())


def test_nothing_of_a_batch_is_used_after_its_release(bench: Bench) -> None:
    """Its memory is what the next batch is loaded into, at that very moment perhaps."""

    class SpoilingSource(LocalSource):
        def next(self, stopped: Callable[[], bool]) -> FetchedBatch | None:
            fetched = super().next(stopped)
            assert fetched is not None
            batch, release = fetched.batch, fetched.release

            def spoil(trained: bool) -> None:
                for tensor in (batch.obs, batch.reward, batch.first, batch.terminated):
                    tensor.fill_(1)
                assert batch.episode_return is not None
                batch.episode_return.fill(1e9)
                batch.worker_ids.clear()
                release(trained)

            return replace(fetched, release=spoil)

    source = SpoilingSource(bench.source.rollout, bench.policy, rounds=4)
    bench.trainer(source=source, updates_max=5).run()
    last = bench.records()[-1]
    assert last["episode_count"] > 0
    assert 8 < last["return_mean_100"] < 500


def test_numbers_that_json_cannot_say_become_null(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "progress.jsonl")
    lines.write({"update": 1, "loss": math.nan, "limit": math.inf})
    lines.close()
    text = (tmp_path / "progress.jsonl").read_text()
    assert {"update": 1, "loss": None, "limit": None} == json.loads(text)
