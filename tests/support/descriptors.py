"""Walks over the compiled descriptors of package breadbox.v1."""

from collections.abc import Iterator
from importlib import import_module

from google.protobuf.descriptor import (
    Descriptor,
    EnumDescriptor,
    FieldDescriptor,
    FileDescriptor,
    ServiceDescriptor,
)

PACKAGE = "breadbox.v1"
MODULES = ("buffer", "fragment", "payload", "replay_buffer_service")


def files() -> list[FileDescriptor]:
    """Every file of the package."""
    return [import_module(f"{PACKAGE}.{name}_pb2").DESCRIPTOR for name in MODULES]


def messages() -> Iterator[Descriptor]:
    """Every message, nested ones and map entries included."""
    for file in files():
        for message in file.message_types_by_name.values():
            yield from _with_nested(message)


def _with_nested(message: Descriptor) -> Iterator[Descriptor]:
    yield message
    for nested in message.nested_types:
        yield from _with_nested(nested)


def enums() -> Iterator[EnumDescriptor]:
    """Every enum."""
    for file in files():
        yield from file.enum_types_by_name.values()
    for message in messages():
        yield from message.enum_types


def service() -> ServiceDescriptor:
    """The one service."""
    return files()[-1].services_by_name["ReplayBufferService"]


def contract() -> dict[str, dict[str, str]]:
    """What a change would break on the wire: numbers, types, labels, enum values, methods."""
    return {
        **{message.full_name: _fields(message) for message in messages()},
        **{
            enum.full_name: {value.name: str(value.number) for value in enum.values}
            for enum in enums()
        },
        service().full_name: {
            method.name: f"{method.input_type.full_name} -> {method.output_type.full_name}"
            for method in service().methods
        },
    }


def _fields(message: Descriptor) -> dict[str, str]:
    return {field.name: f"{field.number} {_label(field)}{_type(field)}" for field in message.fields}


def _label(field: FieldDescriptor) -> str:
    if field.label == FieldDescriptor.LABEL_REPEATED:
        return "repeated "
    if field.containing_oneof is not None and len(field.containing_oneof.fields) > 1:
        return f"oneof {field.containing_oneof.name} "
    return "optional " if field.has_presence and field.message_type is None else ""


def _type(field: FieldDescriptor) -> str:
    if field.message_type is not None:
        return str(field.message_type.full_name)
    if field.enum_type is not None:
        return str(field.enum_type.full_name)
    return _SCALARS[field.type]


_SCALARS = {
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_BYTES: "bytes",
    FieldDescriptor.TYPE_DOUBLE: "double",
    FieldDescriptor.TYPE_FIXED64: "fixed64",
    FieldDescriptor.TYPE_INT32: "int32",
    FieldDescriptor.TYPE_INT64: "int64",
    FieldDescriptor.TYPE_STRING: "string",
}
