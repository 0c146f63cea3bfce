"""Reads pickles that hold numpy data, without executing anything.

A pickle is a program for a small stack machine. The machine here knows only the instructions that
numpy's own pickles need, and the "functions" they may call are six names, each answered by code in
this module: no name in the data is ever looked up or imported. Everything else is refused.
"""

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from breadbox_offline.decoding.dtypes import (
    RefusedError,
    array_from_bytes,
    plain_dtype,
    plain_shape,
)
from breadbox_offline.errors import PackedValueError, named
from breadbox_offline.limits import DEFAULT_LIMITS, DataLimits

# protocol, frame, numpy.core.numeric._frombuffer, mark, and how many bytes of contents follow
_HEAD = re.compile(
    rb"\x80[\x04\x05](?:\x95.{8})?"
    rb"(?:\x8c\x13numpy\._core\.numeric|\x8c\x12numpy\.core\.numeric)\x94"
    rb"\x8c\x0b_frombuffer\x94\x93\x94\("
    rb"(?:[\x96\x8e](?P<size8>.{8})|B(?P<size4>.{4})|C(?P<size1>.))",
    re.DOTALL,
)
# numpy.dtype(name, False, True) with its byte order, the shape, and the order of axes
_TAIL = re.compile(
    rb"(?:\x95.{8})?\x94\x8c\x05numpy\x94\x8c\x05dtype\x94\x93\x94"
    rb"\x8c\x02(?P<name>[biufc][1-9])\x94\x89\x88\x87\x94R\x94"
    rb"\(K\x03\x8c\x01(?P<byte_order>[<|])\x94NNNJ\xff{4}J\xff{4}K\x00t\x94b"
    rb"(?P<many>\(?)(?P<sizes>(?:K.|M.{2}|J.{4})+)(?P<end>[\x85-\x87t])\x94"
    rb"\x8c\x01(?P<order>[CF])\x94t\x94R\x94\.",
    re.DOTALL,
)
_SIZE = re.compile(rb"K(.)|M(.{2})|J(.{4})", re.DOTALL)
_TAIL_BYTES_MAX = 400
"""Bytes of the longest tail, with 32 sizes of 5 bytes, and to spare; longer ones are forgotten."""
_SMALL_TUPLES = {1: b"\x85", 2: b"\x86", 3: b"\x87"}


def read_usual_array(data: bytes, limits: DataLimits) -> NDArray[Any] | None:
    """The array that `data` holds, read-only; None when it is of any other form."""
    head = _HEAD.match(data)
    if head is None:
        return None
    size = head["size8"] or head["size4"] or head["size1"]
    start = head.end()
    stop = start + int.from_bytes(size, "little")
    is_near_end = 0 < len(data) - stop <= _TAIL_BYTES_MAX
    try:
        form = _form_of(data[stop:]) if is_near_end else None
        if form is None:
            return None
        dtype, shape, order = form
        return array_from_bytes(
            data[start:stop], dtype, shape, order=order, bytes_max=limits.array_bytes_max
        )
    except RefusedError:
        return None


_Form = tuple[np.dtype[np.generic], tuple[int, ...], Literal["C", "F"]]


# The samples of a column end alike.
@lru_cache(maxsize=64)
def _form_of(tail: bytes) -> _Form | None:
    """What the bytes behind the contents say; None when they are of any other form."""
    found = _TAIL.fullmatch(tail)
    shape = None if found is None else _shape(found)
    if found is None or shape is None:
        return None
    return plain_dtype(found["name"]), shape, "C" if found["order"] == b"C" else "F"


def _shape(tail: re.Match[bytes]) -> tuple[int, ...] | None:
    """The shape that a tail states; None when the numbers make no tuple."""
    shape = tuple(
        int.from_bytes(byte or short or word, "little", signed=bool(word))
        for byte, short, word in _SIZE.findall(tail["sizes"])
    )
    is_many = bool(tail["many"])
    end = b"t" if is_many else _SMALL_TUPLES.get(len(shape))
    if tail["end"] != end or len(shape) > 32 or min(shape) < 0:
        return None
    return shape


_MARK = object()


@dataclass(slots=True)
class _PendingDtype:
    """What numpy.dtype(...) made, until its state names the byte order."""

    name: str
    byte_order: str = "="

    def resolve(self) -> np.dtype[np.generic]:
        order = self.byte_order if self.byte_order in "<>" else ""
        return plain_dtype(order + self.name)


@dataclass(slots=True)
class _PendingArray:
    """What _reconstruct(...) made, until its state brings the contents."""

    array: NDArray[Any] | None = None


def _dtype(_machine: "_Machine", name: object, *_flags: object) -> _PendingDtype:
    if not isinstance(name, str):
        raise RefusedError("a dtype is no name")
    plain_dtype(name)
    return _PendingDtype(name)


def _resolve_dtype(value: object) -> np.dtype[np.generic]:
    if not isinstance(value, _PendingDtype):
        raise RefusedError(f"{type(value).__name__} where a dtype belongs")
    return value.resolve()


def _array(
    machine: "_Machine",
    contents: object,
    dtype: np.dtype[np.generic],
    shape: object,
    order: object,
) -> NDArray[Any]:
    if order not in ("C", "F"):
        raise RefusedError("an array's order of axes is unknown")
    machine.charge(contents)
    return array_from_bytes(
        contents,
        dtype,
        plain_shape(shape),
        order="F" if order == "F" else "C",
        bytes_max=machine.limits.array_bytes_max,
    )


def _frombuffer(
    machine: "_Machine",
    contents: object,
    dtype: object,
    shape: object,
    order: object,
    *_axis: object,
) -> NDArray[Any]:
    return _array(machine, contents, _resolve_dtype(dtype), shape, order)


def _reconstruct(
    _machine: "_Machine", subtype: object, _shape: object, _code: object
) -> _PendingArray:
    if subtype is not _NDARRAY:
        raise RefusedError("only plain arrays are rebuilt")
    return _PendingArray()


def _scalar(machine: "_Machine", dtype: object, contents: object) -> np.generic:
    array: Any = _array(machine, contents, _resolve_dtype(dtype), (), "C")
    scalar: np.generic = array[()]
    return scalar


def _ndarray(_machine: "_Machine", *_arguments: object) -> None:
    raise RefusedError("numpy.ndarray is a type here, it cannot be called")


_Answer = Callable[..., Any]
_NDARRAY: _Answer = _ndarray
_ANSWERS: dict[tuple[str, str], _Answer] = {
    ("numpy", "dtype"): _dtype,
    ("numpy", "ndarray"): _NDARRAY,
    **{
        (f"numpy.{core}.{module}", name): answer
        for core in ("_core", "core")
        for module, name, answer in (
            ("numeric", "_frombuffer", _frombuffer),
            ("multiarray", "_reconstruct", _reconstruct),
            ("multiarray", "scalar", _scalar),
        )
    },
}


@dataclass(slots=True)
class _Machine:
    """The stack, the memo and the position of one pickle."""

    data: bytes
    limits: DataLimits
    position: int = 0
    stack: list[Any] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)
    charged_bytes: int = 0
    """Contents of the arrays made so far; what is remembered may be used again and again."""

    def charge(self, contents: object) -> None:
        """Refuse arrays that hold more bytes together than there are."""
        self.charged_bytes += len(contents) if isinstance(contents, bytes) else 0
        if self.charged_bytes > len(self.data):
            raise RefusedError("makes arrays of the same bytes again and again")

    def read(self, size: int) -> bytes:
        piece = self.data[self.position : self.position + size]
        if size < 0 or len(piece) != size:
            raise RefusedError(f"ends early: {size} bytes wanted, {len(piece)} there")
        self.position += size
        return piece

    def number(self, layout: struct.Struct) -> int:
        number: int = layout.unpack(self.read(layout.size))[0]
        return number

    def push(self, value: object) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise RefusedError("the stack holds a mark where a value belongs")
        return value

    def pop_to_mark(self) -> list[Any]:
        values: list[Any] = []
        while (value := self.stack.pop()) is not _MARK:
            values.append(value)
        values.reverse()
        return values

    def line(self) -> str:
        end = self.data.index(b"\n", self.position)
        text = self.data[self.position : end].decode("ascii")
        self.position = end + 1
        return text


_U8 = struct.Struct("<B")
_U16 = struct.Struct("<H")
_I32 = struct.Struct("<i")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_F64 = struct.Struct(">d")


def _look_up(machine: _Machine, module: object, name: object) -> None:
    answer = _ANSWERS.get((module, name))  # type: ignore[arg-type]
    if answer is None:
        raise RefusedError(
            f"names {named(module)} {named(name)}; only numpy arrays and scalars are read"
        )
    machine.push(answer)


def _stack_global(machine: _Machine) -> None:
    name, module = machine.pop(), machine.pop()
    if not isinstance(module, str) or not isinstance(name, str):
        raise RefusedError("names something that is no text")
    _look_up(machine, module, name)


def _global(machine: _Machine) -> None:
    module = machine.line()
    _look_up(machine, module, machine.line())


def _reduce(machine: _Machine) -> None:
    arguments, answer = machine.pop(), machine.pop()
    if not isinstance(arguments, tuple) or not callable(answer):  # only answers are callable
        raise RefusedError("calls something that is no function of numpy's")
    machine.push(answer(machine, *arguments))


def _build(machine: _Machine) -> None:
    state, target = machine.pop(), machine.pop()
    if isinstance(target, _PendingDtype) and isinstance(state, tuple) and len(state) >= 2:
        if state[1] not in ("<", ">", "|", "="):
            raise RefusedError("a dtype's byte order is unknown")
        target.byte_order = state[1]
        machine.push(target)
        return
    if isinstance(target, _PendingArray) and isinstance(state, tuple) and len(state) == 5:
        _version, shape, dtype, is_fortran, contents = state
        order = "F" if is_fortran else "C"
        target.array = _array(machine, contents, _resolve_dtype(dtype), shape, order)
        machine.push(target)
        return
    raise RefusedError(f"sets a state on a {type(target).__name__}")


def _put(machine: _Machine, key: int) -> None:
    machine.memo[key] = machine.stack[-1]


def _small_tuple(size: int) -> Callable[[_Machine], None]:
    def make(machine: _Machine) -> None:
        values = [machine.pop() for _ in range(size)]
        machine.push(tuple(reversed(values)))

    return make


def _constant(value: object) -> Callable[[_Machine], None]:
    return lambda machine: machine.push(value)


def _counted_bytes(layout: struct.Struct) -> Callable[[_Machine], None]:
    return lambda machine: machine.push(machine.read(machine.number(layout)))


def _counted_text(layout: struct.Struct) -> Callable[[_Machine], None]:
    return lambda machine: machine.push(machine.read(machine.number(layout)).decode())


def _skip(machine: _Machine, size: int) -> None:
    machine.read(size)


_INSTRUCTIONS: dict[int, Callable[[_Machine], None]] = {
    ord("("): lambda machine: machine.stack.append(_MARK),
    ord("t"): lambda machine: machine.push(tuple(machine.pop_to_mark())),
    ord(")"): _constant(()),
    ord("N"): _constant(None),
    ord("K"): lambda machine: machine.push(machine.number(_U8)),
    ord("M"): lambda machine: machine.push(machine.number(_U16)),
    ord("J"): lambda machine: machine.push(machine.number(_I32)),
    ord("G"): lambda machine: machine.push(machine.number(_F64)),
    ord("C"): _counted_bytes(_U8),
    ord("B"): _counted_bytes(_U32),
    ord("X"): _counted_text(_U32),
    ord("c"): _global,
    ord("R"): _reduce,
    ord("b"): _build,
    ord("q"): lambda machine: _put(machine, machine.number(_U8)),
    ord("r"): lambda machine: _put(machine, machine.number(_U32)),
    ord("h"): lambda machine: machine.push(machine.memo[machine.number(_U8)]),
    ord("j"): lambda machine: machine.push(machine.memo[machine.number(_U32)]),
    0x80: lambda machine: _skip(machine, 1),  # protocol
    0x85: _small_tuple(1),
    0x86: _small_tuple(2),
    0x87: _small_tuple(3),
    0x88: _constant(True),
    0x89: _constant(False),
    0x8C: _counted_text(_U8),
    0x8D: _counted_text(_U64),
    0x8E: _counted_bytes(_U64),
    0x93: _stack_global,
    0x94: lambda machine: _put(machine, len(machine.memo)),
    0x95: lambda machine: _skip(machine, 8),  # frame
    0x96: _counted_bytes(_U64),
}
_STOP = ord(".")


def read_numpy_pickle(data: bytes, *, limits: DataLimits = DEFAULT_LIMITS) -> Any:
    """The array, scalar or plain value that `data` holds; arrays are read-only views of it.

    Nothing in `data` is executed, imported or looked up.
    """
    usual = read_usual_array(data, limits)
    return run_machine(data, limits) if usual is None else usual


def run_machine(data: bytes, limits: DataLimits) -> Any:
    """`read_numpy_pickle` by the stack machine alone, whatever form the pickle has."""
    machine = _Machine(data, limits)
    try:
        for _ in range(limits.opcodes_max):
            opcode = machine.read(1)[0]
            if opcode == _STOP:
                return _finished(machine)
            _INSTRUCTIONS.get(opcode, _unknown)(machine)
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        problem = str(error) or type(error).__name__
        raise PackedValueError(f"pickle refused at byte {machine.position}: {problem}") from error
    raise PackedValueError(f"pickle refused: more than {limits.opcodes_max} instructions")


def _unknown(machine: _Machine) -> None:
    opcode = machine.data[machine.position - 1 : machine.position]
    raise RefusedError(f"instruction {opcode!r} is not one of numpy data")


def _finished(machine: _Machine) -> Any:
    value = machine.pop()
    if isinstance(value, _PendingArray):
        value = value.array
    if not isinstance(value, np.ndarray | np.generic | bool | int | float | str | None):
        raise RefusedError(f"holds a {type(value).__name__}, no numpy data")
    return value
