"""What records of a journal are made of: the messages of their schema, and of what these hold."""

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from breadbox_server.journal.v1 import journal_pb2 as pb

_TYPES = {
    getattr(FieldDescriptor, name): name.removeprefix("TYPE_").lower()
    for name in dir(FieldDescriptor)
    if name.startswith("TYPE_")
}


def schema() -> dict[str, dict[str, str]]:
    """By message and enum: its fields with number and type, or its values."""
    found: dict[str, dict[str, str]] = {}
    for record in (pb.Turn, pb.Snapshot):
        _add(record.DESCRIPTOR, found)
    return dict(sorted(found.items()))


def _add(message: Descriptor, found: dict[str, dict[str, str]]) -> None:
    if message.full_name in found:
        return
    found[message.full_name] = {field.name: _field(field) for field in message.fields}
    for field in message.fields:
        if field.message_type is not None:
            _add(field.message_type, found)
        if field.enum_type is not None:
            found[field.enum_type.full_name] = {
                value.name: str(value.number) for value in field.enum_type.values
            }


def _field(field: FieldDescriptor) -> str:
    label = "repeated " if field.label == FieldDescriptor.LABEL_REPEATED else ""
    kind = field.message_type or field.enum_type
    return f"{field.number} {label}{kind.full_name if kind else _TYPES[field.type]}"
