"""Bound the memory of a protobuf message before it is parsed.

An empty item of a repeated field is two bytes in a message and up to a hundred in memory: 4 MiB
could take 200 MiB. So fields and items are counted at all levels that may have repeated ones.
"""

from collections.abc import Iterator
from functools import lru_cache

from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto

_BYTES_PER_PART_MIN = 2
"""A tag, and a value or a length."""
_VARINT, _FIXED64, _SIZED, _FIXED32 = 0, 1, 2, 5


class _Level:
    def __init__(self) -> None:
        self.below: dict[int, _Level] = {}


def check_few_parts(raw: bytes, kind: Descriptor, parts_max: int) -> None:
    """Raise ValueError if bytes are no message, or one with too many fields and items."""
    if len(raw) < parts_max * _BYTES_PER_PART_MIN:
        return
    try:
        _walk(raw, _level_of(kind), parts_max)
    except IndexError:
        raise ValueError("ends within a field") from None


def _walk(raw: bytes, level: _Level, parts_max: int) -> None:
    position, end = 0, len(raw)
    around: list[tuple[int, _Level]] = []
    left = parts_max
    while True:
        while position >= end:
            if position > end:
                raise ValueError("has a field that ends behind it")
            if not around:
                return
            end, level = around.pop()
        left -= 1
        if left < 0:
            raise ValueError(f"has more than {parts_max} fields and items")
        tag = raw[position]
        position += 1
        if tag > 0x7F:
            tag, position = _varint(raw, position - 1)
        wire_type = tag & 7
        if wire_type == _SIZED:
            size = raw[position]
            position += 1
            if size > 0x7F:
                size, position = _varint(raw, position - 1)
            below = level.below.get(tag >> 3)
            if below is None:
                position += size
                continue
            around.append((end, level))
            if position + size > end:
                raise ValueError("has a field that ends behind it")
            end, level = position + size, below
        elif wire_type == _VARINT:
            _, position = _varint(raw, position)
        elif wire_type == _FIXED64:
            position += 8
        elif wire_type == _FIXED32:
            position += 4
        else:  # A group, which no message of the service has.
            raise ValueError(f"has a field of wire type {wire_type}")


def _varint(raw: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = raw[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError("has a number of more than ten bytes")


@lru_cache(maxsize=64)
def _level_of(kind: Descriptor) -> _Level:
    levels: dict[str, _Level] = {}

    def level_of(each: Descriptor) -> _Level:
        known = levels.get(each.full_name)
        if known is None:
            known = levels[each.full_name] = _Level()
            for number, below in _messages(each):
                if any(_has_repeated(part) for part in _reachable(below)):
                    known.below[number] = level_of(below)
        return known

    return level_of(kind)


def _messages(kind: Descriptor) -> list[tuple[int, Descriptor]]:
    return [(each.number, each.message_type) for each in kind.fields if each.message_type]


def _has_repeated(kind: Descriptor) -> bool:
    described = DescriptorProto()
    kind.CopyToProto(described)
    return any(each.label == FieldDescriptorProto.LABEL_REPEATED for each in described.field)


def _reachable(kind: Descriptor) -> Iterator[Descriptor]:
    seen: set[str] = set()
    left = [kind]
    while left:
        each = left.pop()
        if each.full_name not in seen:
            seen.add(each.full_name)
            yield each
            left += [below for _, below in _messages(each)]
