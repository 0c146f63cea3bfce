"""What became of groups, by a number of their members and by length."""

from dataclasses import replace

from breadbox.v1 import replay_buffer_service_pb2 as pb
from breadbox_server.core.model.config import AssemblyPolicy, BufferConfig, SchemaPolicy
from breadbox_server.core.model.events import StepsEnd, StepsEnded
from breadbox_server.core.model.ids import BufferName
from breadbox_server.core.model.inputs import UpdateBuffer
from breadbox_server.limits import TAGS_MAX
from breadbox_server.reading.tagged_groups import TaggedGroups
from support.metadata import make_fragment
from support.served import CALL_S, Served, served

B = BufferName("default")
TAGGED = BufferConfig(
    fragments_per_chunk=2,
    assembly=AssemblyPolicy.GROUPS,
    sampler="oldest_first",
    staleness_max=1,
    schema=SchemaPolicy.RAGGED,
    tag="task",
)


def ended(end: StepsEnd, *groups: str, task: str = '"math"', length: int = 1) -> StepsEnded:
    members = tuple(
        make_fragment(group, member, numbers=f'{{"task":{task}}}', step_count=length * (1 + member))
        for group in groups
        for member in range(2)
    )
    return StepsEnded(B, end, members)


def rows(it: TaggedGroups) -> list[tuple[str, int, int, int]]:
    return [
        (each.tag, each.length_min, each.delivered_count, each.dropped_count)
        for each in it.messages(B)
    ]


def test_a_group_counts_once_by_its_tag_and_its_longest_member() -> None:
    groups = TaggedGroups(lambda buffer: "task")
    groups.note([ended(StepsEnd.TRAINED, "a", "b", length=300), ended(StepsEnd.EVICTED, "c")])
    groups.note([ended(StepsEnd.EVICTED, "d", length=512), ended(StepsEnd.EVICTED, "e", task="7")])
    groups.note([ended(StepsEnd.TRAINED, "f", task="true", length=2**20)])
    assert [
        ("7", 0, 0, 1),
        ("True", 65_536, 1, 0),
        ("math", 0, 0, 1),
        ("math", 256, 2, 0),
        ("math", 1024, 0, 1),
    ] == rows(groups)


def test_a_delivery_that_is_given_back_is_none() -> None:
    groups = TaggedGroups(lambda buffer: "task")
    for end in (StepsEnd.TRAINED, StepsEnd.RETURNED, StepsEnd.EVICTED):
        groups.note([ended(end, "a")])
    assert [("math", 0, 0, 1)] == rows(groups)


def test_tags_are_bounded_shown_as_they_can_be_and_begin_anew_with_another_number() -> None:
    name = ["task"]
    groups = TaggedGroups(lambda buffer: name[0])
    for number in range(TAGS_MAX + 3):
        groups.note([ended(StepsEnd.TRAINED, "a", task=str(number))])
    assert TAGS_MAX + 1 == len(rows(groups))
    assert ("other", 0, 3, 0) in rows(groups)
    name[0] = "missing"
    assert [] == rows(groups)
    groups.note([ended(StepsEnd.TRAINED, "a")])
    assert [("", 0, 1, 0)] == rows(groups)
    name[0] = "task"
    groups.note([ended(StepsEnd.TRAINED, "a", task=r'"\u001b[2J"')])
    assert [(r"'\x1b[2J'", 0, 1, 0)] == rows(groups)
    groups.forget(B)
    assert [] == rows(groups)


async def append(it: Served, group: str, *, task: str, count: int = 2, length: int = 8) -> None:
    sent = [it.metadata(member, worker_id=group, step_count=length) for member in range(count)]
    for each in sent:
        each.numbers = f'{{"task":"{task}"}}'
    await it.append(*sent)


async def test_a_description_and_the_metrics_say_which_groups_are_dropped() -> None:
    async with served(TAGGED) as it:
        await it.start()
        await append(it, "a", task="easy")
        await it.fetch(2)
        await append(it, "b", task="math", count=1, length=5000)
        publish = pb.PublishModelRequest(session_id="run", model_version=2)
        await it.stub.PublishModel(publish, timeout=CALL_S)
        driver, metrics = it.server.driver, it.server.metrics
        request = pb.GetBufferRequest(name="default")
        found = (await it.stub.GetBuffer(request, timeout=CALL_S)).buffer
        told = [
            (each.tag, each.length_min, each.delivered_count, each.dropped_count)
            for each in found.state.tagged_groups
        ]
        assert [("easy", 0, 1, 0), ("math", 4096, 0, 1)] == told

        def shown(**labels: str) -> float | None:
            labels = {"buffer": "default", **labels}
            return metrics.registry.get_sample_value("breadbox_tagged_groups", labels)

        metrics.show_tagged_groups(B, driver.tagged_groups.messages(B))
        assert 1.0 == shown(tag="math", length="4096-", end="dropped")
        assert 0.0 == shown(tag="math", length="4096-", end="delivered")
        driver.core.apply_now(UpdateBuffer(B, replace(TAGGED, tag="")))
        metrics.show_tagged_groups(B, driver.tagged_groups.messages(B))
        assert shown(tag="math", length="4096-", end="dropped") is None
