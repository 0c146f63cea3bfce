"""What records of a journal are made of: the messages of their schema, and of what these hold."""

from typing import Any

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto

from breadbox_server.journal.v1 import journal_pb2 as pb


def schema() -> dict[str, dict[str, str]]:
    """By message and enum: its fields with number and type, or its values."""
    found: dict[str, dict[str, str]] = {}
    _add(pb.Turn.DESCRIPTOR, found)
    _add(pb.Snapshot.DESCRIPTOR, found)
    return dict(sorted(found.items()))


def _add(message: Any, found: dict[str, dict[str, str]]) -> None:
    if message.full_name in found:
        return
    written = DescriptorProto()
    message.CopyToProto(written)
    found[message.full_name] = {field.name: _field(field) for field in written.field}
    for field in message.fields:
        if field.message_type is not None:
            _add(field.message_type, found)
        if field.enum_type is not None:
            found[field.enum_type.full_name] = {
                value.name: str(value.number) for value in field.enum_type.values
            }


def _field(field: FieldDescriptorProto) -> str:
    is_repeated = field.label == FieldDescriptorProto.LABEL_REPEATED
    kind = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    return f"{field.number} {'repeated ' * is_repeated}{field.type_name.lstrip('.') or kind}"
