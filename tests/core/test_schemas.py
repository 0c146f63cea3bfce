"""B30: fragments of a session have one schema, unless the buffer takes any."""

import random

import pytest

from breadbox_server.core.buffers import DEFAULT_BUFFER, BufferSet
from breadbox_server.core.model.config import SchemaPolicy
from breadbox_server.core.model.errors import SchemaMismatchError
from breadbox_server.core.model.ids import SessionId
from breadbox_server.core.model.inputs import AdmissionOutcome, DeclareSchema
from breadbox_server.core.model.schemas import (
    ORIGINS_MAX,
    SCHEMAS_MAX,
    UNSAID,
    Schema,
    SchemaArray,
    SchemaOrigin,
)
from core.test_entries import replayed
from core.world import World

ADMITTED, UNKNOWN = AdmissionOutcome.ADMITTED, AdmissionOutcome.SCHEMA_UNKNOWN
DUPLICATE = AdmissionOutcome.DUPLICATE

IMAGES: Schema = (
    SchemaArray("action", "<i8", ()),
    SchemaArray("obs.image", "|u1", (84, 84, 3)),
    SchemaArray("reward", "<f4", ()),
)
SEQUENCES: Schema = (SchemaArray("tokens.ids", "<i8", ()),)
FLOATS: Schema = (IMAGES[0], SchemaArray("obs.image", "<f4", (84, 84)), IMAGES[2])


def tell(world: World, schema_hash: int, schema: Schema, session_id: str = "s0") -> None:
    told = DeclareSchema(DEFAULT_BUFFER, SessionId(session_id), schema_hash, schema)
    world.buffers.apply(told, now=world.now)


@pytest.fixture
def world() -> World:
    return World()


def test_a_schema_has_to_be_told_once(world: World) -> None:
    assert UNKNOWN == world.append(index=0, schema_hash=7)
    tell(world, 7, IMAGES)
    assert ADMITTED == world.append(index=0, schema_hash=7)
    assert ADMITTED == world.append("w1", schema_hash=7)
    assert (IMAGES,) == world.seen().schemas


def test_a_fragment_whose_schema_is_not_known_changes_nothing(world: World) -> None:
    """It is sent again, and its index must be new then; what is over is told as ever."""
    tell(world, 7, IMAGES)
    world.append(index=0, schema_hash=7)
    before = world.buffers.snapshot()
    assert UNKNOWN == world.append(index=1, schema_hash=8)
    assert DUPLICATE == world.append(index=0, schema_hash=8)
    wrong = world.append(index=1, schema_hash=8, session_id="other")
    assert AdmissionOutcome.WRONG_SESSION == wrong
    assert before == world.buffers.snapshot()


def test_another_schema_is_refused_before_it_is_admitted(world: World) -> None:
    tell(world, 7, IMAGES)
    with pytest.raises(SchemaMismatchError) as refused:
        tell(world, 8, FLOATS)
    error = refused.value
    wanted = ("obs.image", "uint8[84, 84, 3]", "float32[84, 84]")
    assert wanted == (error.path, error.wanted, error.got)
    assert "obs.image: uint8[84, 84, 3] wanted, float32[84, 84] got; " in str(error)
    assert "--schema any" in str(error)
    assert UNKNOWN == world.append("w1", schema_hash=8)
    assert ADMITTED == world.append("w0", schema_hash=7)


@pytest.mark.parametrize(
    ("got", "named"),
    [
        (IMAGES[:2], ("reward", "float32[]", "nothing")),
        ((*IMAGES, SchemaArray("value", "<f4", ())), ("value", "nothing", "float32[]")),
        ((SchemaArray("action", ">i8", ()), *IMAGES[1:]), ("action", "int64[]", ">i8[]")),
        ((SchemaArray("action", "|b1", ()), *IMAGES[1:]), ("action", "int64[]", "bool[]")),
        ((SchemaArray("action", "<U5", ()), *IMAGES[1:]), ("action", "int64[]", "<U5[]")),
    ],
    ids=["missing", "extra", "byte order", "truth", "text"],
)
def test_what_differs_is_named(world: World, got: Schema, named: tuple[str, str, str]) -> None:
    tell(world, 7, IMAGES)
    with pytest.raises(SchemaMismatchError) as refused:
        tell(world, 8, got)
    assert named == (refused.value.path, refused.value.wanted, refused.value.got)


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        (IMAGES, SEQUENCES, ("kind", "fragments of steps", "sequences of tokens")),
        (SEQUENCES, IMAGES, ("kind", "sequences of tokens", "fragments of steps")),
    ],
    ids=["steps first", "tokens first"],
)
def test_steps_and_tokens_do_not_share_a_session(
    world: World, first: Schema, second: Schema, named: tuple[str, str, str]
) -> None:
    tell(world, 7, first)
    with pytest.raises(SchemaMismatchError, match="a buffer of their own") as refused:
        tell(world, 8, second)
    assert named == (refused.value.path, refused.value.wanted, refused.value.got)


def test_several_differences_are_counted(world: World) -> None:
    tell(world, 7, IMAGES)
    with pytest.raises(SchemaMismatchError, match=r"^action: .* \(and 1 more differ\)"):
        tell(world, 8, IMAGES[2:])


def test_no_schema_is_a_schema_of_its_own(world: World) -> None:
    assert ADMITTED == world.append(index=0)
    assert (UNSAID,) == world.seen().schemas
    with pytest.raises(SchemaMismatchError, match="action: no schema said wanted, int64"):
        tell(world, 7, IMAGES)
    assert ADMITTED == world.append("w1")
    other = World()
    tell(other, 7, IMAGES)
    with pytest.raises(SchemaMismatchError, match=r"action: int64\[\] wanted, no schema said got"):
        other.append(index=0)


PLAIN = (*IMAGES, SchemaOrigin("policy", "A"), SchemaOrigin("wrappers", "none"))
WRAPPED = (*IMAGES, SchemaOrigin("policy", "A"), SchemaOrigin("wrappers", "Normalize()"))


@pytest.mark.parametrize("policy", [SchemaPolicy.ONE, SchemaPolicy.RAGGED])
def test_another_origin_of_the_same_arrays_is_refused_before_it_is_admitted(
    policy: SchemaPolicy,
) -> None:
    world = World(schema=policy)
    tell(world, 7, PLAIN)
    with pytest.raises(SchemaMismatchError, match=r"^wrappers: none wanted, Normalize\(\) got;"):
        tell(world, 7, WRAPPED)
    with pytest.raises(SchemaMismatchError, match=r"^policy: .*\(and 1 more differ\)"):
        tell(world, 7, (*IMAGES, SchemaOrigin("policy", "B"), WRAPPED[-1]))
    tell(world, 7, PLAIN)
    assert (PLAIN,) == world.seen().schemas
    world.start("s1")
    tell(world, 7, WRAPPED, "s1")
    assert (WRAPPED,) == world.seen().schemas


def test_an_origin_is_compared_only_where_both_say_it_and_the_first_to_say_it_counts(
    world: World,
) -> None:
    tell(world, 7, IMAGES)
    assert ADMITTED == world.append("silent", schema_hash=7)
    tell(world, 7, (*IMAGES, SchemaOrigin("policy", "A")))
    tell(world, 7, PLAIN)
    tell(world, 7, IMAGES)
    assert (PLAIN,) == world.seen().schemas
    with pytest.raises(SchemaMismatchError, match=r"wrappers"):
        tell(world, 7, WRAPPED)
    assert ADMITTED == world.append("silent", 1, schema_hash=7)


def test_an_origin_of_an_arrays_name_hides_no_array(world: World) -> None:
    tell(world, 7, IMAGES)
    tell(world, 8, (*IMAGES, SchemaOrigin("reward", "scaled")))
    assert ADMITTED == world.append(schema_hash=8)
    with pytest.raises(SchemaMismatchError, match=r"^reward: float32\[\] wanted, nothing got"):
        tell(world, 9, (*IMAGES[:2], SchemaOrigin("reward", "scaled")))


def test_a_buffer_of_any_schema_compares_no_origins() -> None:
    world = World(schema=SchemaPolicy.ANY)
    tell(world, 7, PLAIN)
    tell(world, 7, WRAPPED)
    assert (PLAIN,) == world.seen().schemas


def test_origins_beyond_the_limit_are_not_remembered(world: World) -> None:
    for number in range(2 * ORIGINS_MAX):
        tell(world, 7, (*IMAGES, SchemaOrigin(f"n{number}", "a")))
    (schema,) = world.seen().schemas
    assert len(IMAGES) + ORIGINS_MAX == len(schema)


def test_a_new_session_may_have_another_schema(world: World) -> None:
    tell(world, 7, IMAGES)
    world.append(schema_hash=7)
    world.start("s1")
    assert () == world.seen().schemas
    tell(world, 8, FLOATS, "s0")  # Of a session that is over: nothing happens.
    assert () == world.seen().schemas
    assert UNKNOWN == world.append(session_id="s1", schema_hash=7)
    tell(world, 8, FLOATS, "s1")
    assert ADMITTED == world.append(session_id="s1", schema_hash=8)


def test_a_buffer_may_take_any_schema() -> None:
    world = World(schema=SchemaPolicy.ANY)
    tell(world, 7, IMAGES)
    tell(world, 8, FLOATS)
    assert [ADMITTED] * 3 == [world.append(f"w{n}", schema_hash=n) for n in (7, 8, 0)]
    assert (IMAGES, FLOATS, UNSAID) == world.seen().schemas


def test_a_buffer_that_takes_any_number_of_steps_still_takes_one_schema() -> None:
    world = World(schema=SchemaPolicy.RAGGED)
    tell(world, 7, IMAGES)
    with pytest.raises(SchemaMismatchError, match=r"obs\.image"):
        tell(world, 8, FLOATS)
    assert (IMAGES,) == world.seen().schemas
    world.append("w0", schema_hash=7)
    assert UNKNOWN == world.append("w1", schema_hash=8)


def test_of_very_many_schemas_the_first_are_remembered_and_no_others_asked_for() -> None:
    world = World(schema=SchemaPolicy.ANY)
    for number in range(SCHEMAS_MAX):
        assert UNKNOWN == world.append(schema_hash=1 + number)
        tell(world, 1 + number, (SchemaArray("obs", "<f4", (number,)),))
    tell(world, 100, IMAGES)
    assert SCHEMAS_MAX == len(world.seen().schemas)
    assert [ADMITTED] * 2 == [world.append(f"w{n}", schema_hash=n) for n in (100, 0)]
    assert SCHEMAS_MAX == len(world.seen().schemas)


def test_a_buffer_that_took_any_takes_the_first_once_it_takes_one() -> None:
    world = World(schema=SchemaPolicy.ANY)
    tell(world, 7, IMAGES)
    tell(world, 8, FLOATS)
    world.append("w0", schema_hash=7)
    world.append("w1", schema_hash=8)
    world.update(schema=SchemaPolicy.ONE)
    assert ADMITTED == world.append("w0", 1, schema_hash=7)
    with pytest.raises(SchemaMismatchError, match=r"obs\.image"):
        world.append("w1", 1, schema_hash=8)


@pytest.mark.parametrize("policy", SchemaPolicy)
def test_schemas_survive_a_restart(policy: SchemaPolicy) -> None:
    world = World(schema=policy)
    tell(world, 7, IMAGES)
    for index in range(3):
        world.append(index=index, schema_hash=7)
    told = IMAGES if policy is SchemaPolicy.ANY else PLAIN
    tell(world, 7, PLAIN)
    restored = BufferSet.restore(world.buffers.snapshot(), random.Random(0))
    assert (told,) == restored.describe(DEFAULT_BUFFER, now=world.now).schemas
    twin = replayed(world)
    assert (told,) == twin.describe(DEFAULT_BUFFER, now=world.now).schemas
    assert world.buffers.snapshot() == twin.snapshot()


def test_the_same_arrays_under_another_hash_are_no_other_schema(world: World) -> None:
    tell(world, 7, IMAGES)
    tell(world, 8, IMAGES)
    assert ADMITTED == world.append(index=0, schema_hash=7)
    assert ADMITTED == world.append(index=1, schema_hash=8)
