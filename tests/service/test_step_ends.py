"""What a server knows of where workers' steps went: reports, and what became of fragments."""

from typing import Any

import grpc
import pytest

from breadbox.v1 import buffer_pb2
from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox_server.core.model.errors import InvalidArgumentError
from breadbox_server.core.model.events import StepsEnd, StepsEnded
from breadbox_server.core.model.ids import BufferName, ModelVersion
from breadbox_server.limits import LEFT_OUT_NAMES_MAX, REPORT_WORKERS_MAX, REPORTED_WORKERS_MAX
from breadbox_server.reading.step_ends import StepEnds, check_reports
from support.metadata import make_fragment
from support.served import CALL_S, served

B = BufferName("default")


def report(worker_id: str, **fields: Any) -> buffer_pb2.WorkerSteps:
    return buffer_pb2.WorkerSteps(worker_id=worker_id, **fields)


def ended(end: StepsEnd, worker_id: str, version: int | None = None) -> StepsEnded:
    fragment = make_fragment(worker_id, 0)
    return StepsEnded(B, end, (fragment,), None if version is None else ModelVersion(version))


def only(ends: StepEnds, now: float = 0.0) -> buffer_pb2.WorkerSteps:
    [message] = ends.messages(B, now)
    return message


def test_a_use_that_is_given_back_is_no_training() -> None:
    ends, steps = StepEnds(), make_fragment("w", 0).step_count
    ends.note([ended(StepsEnd.TRAINED, "w", 7)])
    assert (steps, 7) == (only(ends).trained_count, only(ends).trained_version)
    ends.note([ended(StepsEnd.RETURNED, "w"), ended(StepsEnd.EVICTED, "w")])
    assert (0, steps) == (only(ends).trained_count, only(ends).evicted_count)
    assert not only(ends).HasField("report_age_duration")


def test_the_latest_report_of_a_worker_is_kept_with_its_age() -> None:
    ends = StepEnds()
    ends.report(B, [report("w", acted_count=5, dropped_count=5)], 10.0)
    ends.report(B, [report("w", acted_count=9, dropped_count=9)], 12.0)
    assert (9, 3) == (only(ends, 15.0).dropped_count, only(ends, 15.0).report_age_duration.seconds)


def test_a_worker_that_starts_again_under_its_name_starts_at_nothing() -> None:
    ends = StepEnds()
    ends.report(B, [report("w", acted_count=50, admitted_count=50)], 0.0)
    ends.note([ended(StepsEnd.TRAINED, "w", 1), ended(StepsEnd.EVICTED, "w")])
    ends.report(B, [report("w", acted_count=2, filling_count=2)], 1.0)
    assert (2, 0, 0) == (only(ends).acted_count, only(ends).trained_count, only(ends).evicted_count)


def test_the_workers_that_are_known_are_bounded_and_the_silent_leave_first() -> None:
    ends = StepEnds()
    ends.report(B, [report(f"w{index}") for index in range(REPORTED_WORKERS_MAX)], 0.0)
    ends.report(B, [report("w0"), report("new")], 1.0)
    names = {each.worker_id for each in ends.messages(B, 1.0)}
    assert (REPORTED_WORKERS_MAX, True, False) == (len(names), "w0" in names, "w1" in names)
    ends.forget(B)
    assert [] == ends.messages(B, 1.0)


def test_processes_with_workers_left_out_are_counted_and_bounded() -> None:
    ends = StepEnds()
    good = {"acted_count": 640, "admitted_count": 640, "fragment_step_count": 4}
    bad = {"acted_count": 64, "dropped_count": 64, "fragment_step_count": 4}
    ends.report(B, [report("fast-0", **good)], 0.0)
    ends.note([ended(StepsEnd.TRAINED, "fast-0", 1) for _ in range(160)])
    names = [f"p{index}-{env}" for index in range(LEFT_OUT_NAMES_MAX + 2) for env in range(2)]
    ends.report(B, [report(name, **bad) for name in [*names, "alone"]], 0.0)
    steps, excluded = ends.totals(B, 0.0)
    assert (640, 64 * (len(names) + 1)) == (steps["trained"], steps["dropped"])
    assert LEFT_OUT_NAMES_MAX + 1 == len(excluded)
    assert (2, 5) == (excluded["p0"], excluded["other"])
    assert ({}, {}) == StepEnds().totals(B, 0.0)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"worker_id": ""}, "workers[1].worker_id"),
        ({"task": "t" * 65}, "workers[1].task"),
        ({"dropped_count": -1}, "workers[1].dropped_count"),
        ({"acted_count": 2**60}, "workers[1].acted_count"),
        ({"steps_per_version": float("nan")}, "workers[1].steps_per_version"),
        ({"steps_per_version": -1.0}, "workers[1].steps_per_version"),
    ],
)
def test_a_report_that_cannot_be_is_refused_by_its_field(
    fields: dict[str, Any], field: str
) -> None:
    wrong = buffer_pb2.WorkerSteps(**{"worker_id": "w", **fields})
    with pytest.raises(InvalidArgumentError) as caught:
        check_reports([report("right"), wrong])
    assert field == caught.value.field


async def test_a_report_without_episodes_needs_workers_and_a_description_has_them_if_asked() -> (
    None
):
    async with served() as it:

        async def reported(request: pb.ReportEpisodesRequest) -> Any:
            return await it.stub.ReportEpisodes(request, timeout=CALL_S).code()

        async def described(**fields: Any) -> list[buffer_pb2.WorkerSteps]:
            call = it.stub.GetBuffer(pb.GetBufferRequest(name="default", **fields), timeout=CALL_S)
            return list((await call).buffer.workers)

        steps = report("w", task="t", acted_count=3, filling_count=3)
        refused = grpc.StatusCode.INVALID_ARGUMENT
        assert refused is await reported(pb.ReportEpisodesRequest())
        many = [report(f"w{index}") for index in range(REPORT_WORKERS_MAX + 1)]
        assert refused is await reported(pb.ReportEpisodesRequest(workers=many))
        assert [] == await described(with_workers=True)
        assert grpc.StatusCode.OK is await reported(pb.ReportEpisodesRequest(workers=[steps]))
        assert [] == await described()
        [found] = await described(with_workers=True)
    assert ("w", "t", 3, 3) == (found.worker_id, found.task, found.acted_count, found.filling_count)
    assert found.HasField("report_age_duration")


async def test_the_metrics_have_the_steps_by_end_and_name_the_process_of_the_slow() -> None:
    async with served() as it:
        fast = report("fast-0", acted_count=64, admitted_count=64, fragment_step_count=4)
        slow = report("slow-0", acted_count=64, dropped_count=64, fragment_step_count=4)
        driver, registry = it.server.driver, it.server.metrics.registry
        driver.step_ends.report(B, [fast, slow], driver.core.clock.now())
        driver.step_ends.note([ended(StepsEnd.TRAINED, "fast-0", 1) for _ in range(16)])

        def shown(name: str, **labels: str) -> float | None:
            return registry.get_sample_value(name, {"buffer": "default", **labels})

        it.server.metrics.show_step_ends(B, *driver.step_ends.totals(B, 0.0))
        assert 64.0 == shown("breadbox_worker_steps", end="trained")
        assert 64.0 == shown("breadbox_worker_steps", end="dropped")
        assert 1.0 == shown("breadbox_workers_left_out", worker="slow")
        driver.step_ends.note([ended(StepsEnd.TRAINED, "slow-0", 1) for _ in range(16)])
        it.server.metrics.show_step_ends(B, *driver.step_ends.totals(B, 0.0))
        assert shown("breadbox_workers_left_out", worker="slow") is None
