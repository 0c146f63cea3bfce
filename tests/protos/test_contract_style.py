"""The wire contract keeps the rules of the house that a descriptor can show."""

import re

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor

from support import descriptors

UNSIGNED = {
    FieldDescriptor.TYPE_UINT32,
    FieldDescriptor.TYPE_UINT64,
    FieldDescriptor.TYPE_FIXED32,
}
PREPOSITIONS = {"of", "for", "from", "to", "at", "by", "with", "in", "on"}
WORDS_WITH_MEANING = {"sample_to_insert_ratio": "the name of the limiter in the literature"}
"""Fields excused from the rule about prepositions, with the reason."""


def upper_snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).upper()


def fields() -> list[FieldDescriptor]:
    return [field for message in descriptors.messages() for field in message.fields]


def all_enums() -> list[EnumDescriptor]:
    return list(descriptors.enums())


def test_the_package_is_the_directory() -> None:
    assert {"breadbox/v1"} == {file.name.rpartition("/")[0] for file in descriptors.files()}
    assert {"breadbox.v1"} == {file.package for file in descriptors.files()}


def test_every_enum_starts_with_an_unspecified_zero() -> None:
    zeros = {enum.name: enum.values_by_number[0].name for enum in all_enums()}
    assert {enum.name: f"{upper_snake(enum.name)}_UNSPECIFIED" for enum in all_enums()} == zeros


def test_every_enum_value_carries_the_prefix_of_its_enum() -> None:
    bare = [
        value.name
        for enum in all_enums()
        for value in enum.values
        if not value.name.startswith(f"{upper_snake(enum.name)}_")
    ]
    assert [] == bare


def test_enums_stand_at_package_level() -> None:
    assert [] == [enum.full_name for enum in all_enums() if enum.containing_type is not None]


def test_every_rpc_owns_its_request_and_its_response() -> None:
    owned = {
        method.name: (method.input_type.name, method.output_type.name)
        for method in descriptors.service().methods
    }
    assert {name: (f"{name}Request", f"{name}Response") for name in owned} == owned


def test_only_payloads_stream() -> None:
    """A stream needs credits: for bytes HTTP/2 has them, for anything else there are none."""
    streams = [
        method.name
        for method in descriptors.service().methods
        if method.client_streaming or method.server_streaming
    ]
    assert ["WritePayloads", "ReadPayloads"] == streams


def test_the_service_is_called_a_service() -> None:
    assert descriptors.service().name.endswith("Service")


def test_integers_are_signed() -> None:
    """A checksum is 64 bits without a sign, and is no count."""
    unsigned = [field.full_name for field in fields() if field.type in UNSIGNED]
    assert [] == unsigned


def test_no_field_name_has_a_count_prefix_a_preposition_or_is() -> None:
    offending = [
        field.full_name
        for field in fields()
        if field.name not in WORDS_WITH_MEANING
        and not field.containing_type.GetOptions().map_entry
        and "_by_" not in field.name
        and (
            field.name.startswith(("num_", "is_")) or PREPOSITIONS & set(field.name.split("_")[1:])
        )
    ]
    assert [] == offending


def test_spans_of_time_are_durations_and_never_numbers() -> None:
    suspicious = [
        field.full_name
        for field in fields()
        if re.search(r"(_s|_ms|_seconds|_millis|timeout)$", field.name)
    ]
    assert [] == suspicious
    spans = [field for field in fields() if re.search(r"(_duration|_delay|max_wait)$", field.name)]
    assert {"google.protobuf.Duration"} == {field.message_type.full_name for field in spans}


def test_a_version_that_may_be_absent_can_be_told_from_version_zero() -> None:
    """0 is a legal version. Where absent means something, presence must be known."""
    excused = {"FetchGrant", "PublishModelResponse", "StartSessionResponse"}
    without_presence = [
        field.full_name
        for field in fields()
        if field.name == "model_version"
        and not field.has_presence
        and field.containing_type.name not in excused
    ]
    assert [] == without_presence


def test_field_numbers_of_removed_fields_are_reserved() -> None:
    """Numbers run without a hole, but for those that are reserved."""

    def holes(message: Descriptor) -> list[str]:
        from google.protobuf import descriptor_pb2

        raw = descriptor_pb2.DescriptorProto()
        message.CopyToProto(raw)
        used = {field.number for field in message.fields}
        for span in raw.reserved_range:
            used.update(range(span.start, span.end))
        return [
            f"{message.full_name}:{number}"
            for number in range(1, max(used, default=0) + 1)
            if number not in used
        ]

    assert [] == [hole for message in descriptors.messages() for hole in holes(message)]
