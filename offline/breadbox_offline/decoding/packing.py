"""Unpack column values: base64 of an lz4 frame of a pickled numpy array, as RLlib writes them.

The stack machine here knows only the instructions and the six names of numpy's own pickles. Code in
this module answers each name: nothing in the data is looked up or imported. Nearly every array has
the form that `read_usual_array` recognises as a whole, in a tenth of the time.
"""

import binascii
import pickletools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import lz4.frame
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

# Protocol, frame, numpy.core.numeric._frombuffer, mark, and the number of bytes of contents.
_HEAD = re.compile(
    rb"\x80[\x04\x05](?:\x95.{8})?"
    rb"(?:\x8c\x13numpy\._core\.numeric|\x8c\x12numpy\.core\.numeric)\x94"
    rb"\x8c\x0b_frombuffer\x94\x93\x94\("
    rb"(?:[\x96\x8e](?P<size8>.{8})|B(?P<size4>.{4})|C(?P<size1>.))",
    re.DOTALL,
)
# numpy.dtype(name, False, True) with its byte order, the shape, and the order of axes.
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
"""Bytes of the longest tail, with 32 sizes of 5 bytes, and a margin; `_form_of` caches them."""
_SMALL_TUPLES = {1: b"\x85", 2: b"\x86", 3: b"\x87"}


def read_usual_array(data: bytes, limits: DataLimits) -> NDArray[Any] | None:
    """Return the array in `data`, read-only, or None if `data` is of any other form."""
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


# Samples of a column have the same tail.
@lru_cache(maxsize=64)
def _form_of(tail: bytes) -> _Form | None:
    found = _TAIL.fullmatch(tail)
    shape = None if found is None else _shape(found)
    if found is None or shape is None:
        return None
    return plain_dtype(found["name"]), shape, "C" if found["order"] == b"C" else "F"


def _shape(tail: re.Match[bytes]) -> tuple[int, ...] | None:
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
    """A numpy.dtype(...), until its state sets the byte order."""

    name: str
    byte_order: str = "="


@dataclass(slots=True)
class _PendingArray:
    """A _reconstruct(...), until its state sets the contents."""

    array: NDArray[Any] | None = None


@dataclass(slots=True)
class _Machine:
    data: bytes
    limits: DataLimits
    stack: list[Any] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)
    charged_bytes: int = 0
    """Bytes of the arrays made so far; the memo allows to use the same bytes repeatedly."""

    def push(self, value: object) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise RefusedError("the stack holds a mark where a value belongs")
        return value

    def push_tuple(self, size: int) -> None:
        self.push(tuple(reversed([self.pop() for _ in range(size)])))

    def push_marked_tuple(self) -> None:
        values: list[Any] = []
        while (value := self.stack.pop()) is not _MARK:
            values.append(value)
        self.push(tuple(reversed(values)))

    def push_answer(self, module: object, name: object) -> None:
        answer = None
        if isinstance(module, str) and isinstance(name, str):
            answer = _ANSWERS.get((module, name))
        if answer is None:
            raise RefusedError(
                f"names {named(module)} {named(name)}; only numpy arrays and scalars are read"
            )
        self.push(answer)

    def push_named(self) -> None:
        name, module = self.pop(), self.pop()
        self.push_answer(module, name)

    def reduce(self) -> None:
        arguments, answer = self.pop(), self.pop()
        if not isinstance(arguments, tuple) or not callable(answer):  # only answers are callable
            raise RefusedError("calls something that is no function of numpy's")
        self.push(answer(self, *arguments))

    def build(self) -> None:
        state, target = self.pop(), self.stack[-1]
        if isinstance(target, _PendingDtype) and isinstance(state, tuple) and len(state) >= 2:
            if state[1] not in ("<", ">", "|", "="):
                raise RefusedError("a dtype's byte order is unknown")
            target.byte_order = state[1]
        elif isinstance(target, _PendingArray) and isinstance(state, tuple) and len(state) == 5:
            _version, shape, dtype, is_fortran, contents = state
            target.array = self.make_array(contents, dtype, shape, "F" if is_fortran else "C")
        else:
            raise RefusedError(f"sets a state on a {type(target).__name__}")

    def make_array(
        self, contents: object, dtype: object, shape: object, order: object
    ) -> NDArray[Any]:
        if not isinstance(dtype, _PendingDtype):
            raise RefusedError(f"{type(dtype).__name__} where a dtype belongs")
        if order not in ("C", "F"):
            raise RefusedError("an array's order of axes is unknown")
        self.charged_bytes += len(contents) if isinstance(contents, bytes | bytearray) else 0
        if self.charged_bytes > len(self.data):
            raise RefusedError("makes arrays of the same bytes again and again")
        byte_order = dtype.byte_order if dtype.byte_order in "<>" else ""
        return array_from_bytes(
            contents,
            plain_dtype(byte_order + dtype.name),
            plain_shape(shape),
            order="F" if order == "F" else "C",
            bytes_max=self.limits.array_bytes_max,
        )


def _dtype(_machine: _Machine, name: object, *_flags: object) -> _PendingDtype:
    if not isinstance(name, str):
        raise RefusedError("a dtype is no name")
    plain_dtype(name)
    return _PendingDtype(name)


def _frombuffer(
    machine: _Machine, contents: object, dtype: object, shape: object, order: object, *_axis: object
) -> NDArray[Any]:
    return machine.make_array(contents, dtype, shape, order)


def _reconstruct(_machine: _Machine, subtype: object, _shape: object, _code: object) -> object:
    if subtype is not _ndarray:
        raise RefusedError("only plain arrays are rebuilt")
    return _PendingArray()


def _scalar(machine: _Machine, dtype: object, contents: object) -> object:
    scalar: object = machine.make_array(contents, dtype, (), "C")[()]
    return scalar


def _ndarray(_machine: _Machine, *_arguments: object) -> None:
    raise RefusedError("numpy.ndarray is a type here, it cannot be called")


_ANSWERS: dict[tuple[str, str], Callable[..., object]] = {
    ("numpy", "dtype"): _dtype,
    ("numpy", "ndarray"): _ndarray,
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

_Instruction = Callable[[_Machine, Any], None]
_VALUES = (
    *("BININT1", "BININT2", "BININT", "BINFLOAT"),
    *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
)
_INSTRUCTIONS: dict[str, _Instruction] = {
    **dict.fromkeys(_VALUES, _Machine.push),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "MARK": lambda machine, _: machine.push(_MARK),
    "TUPLE": lambda machine, _: machine.push_marked_tuple(),
    "TUPLE1": lambda machine, _: machine.push_tuple(1),
    "TUPLE2": lambda machine, _: machine.push_tuple(2),
    "TUPLE3": lambda machine, _: machine.push_tuple(3),
    "GLOBAL": lambda machine, names: machine.push_answer(*names.split(" ", 1)),
    "STACK_GLOBAL": lambda machine, _: machine.push_named(),
    "REDUCE": lambda machine, _: machine.reduce(),
    "BUILD": lambda machine, _: machine.build(),
    **dict.fromkeys(
        ("BINPUT", "LONG_BINPUT"),
        lambda machine, key: machine.memo.update({key: machine.stack[-1]}),
    ),
    "MEMOIZE": lambda machine, _: machine.memo.update({len(machine.memo): machine.stack[-1]}),
    **dict.fromkeys(
        ("BINGET", "LONG_BINGET"), lambda machine, key: machine.push(machine.memo[key])
    ),
    **dict.fromkeys(("PROTO", "FRAME"), lambda _machine, _: None),
}


def read_numpy_pickle(data: bytes, *, limits: DataLimits = DEFAULT_LIMITS) -> Any:
    """Return the value in `data`, arrays as views; PackedValueError for all but plain numpy."""
    usual = read_usual_array(data, limits)
    return run_machine(data, limits) if usual is None else usual


def run_machine(data: bytes, limits: DataLimits) -> Any:
    """Do what `read_numpy_pickle` does, but always by the stack machine."""
    machine, position = _Machine(data, limits), 0
    try:
        for count, (opcode, argument, at) in enumerate(pickletools.genops(data)):
            position = at or 0
            if count >= limits.opcodes_max:
                raise RefusedError(f"more than {limits.opcodes_max} instructions")
            if opcode.name == "STOP":
                break
            _INSTRUCTIONS.get(opcode.name, _refuse)(machine, argument)
        return _finished(machine)
    # Warning: Python warns of some invalid texts, and callers may turn warnings into errors.
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, Warning) as error:
        problem = str(error) or type(error).__name__
        raise PackedValueError(f"pickle refused at byte {position}: {problem}") from error


def _refuse(_machine: _Machine, _argument: object) -> None:
    raise RefusedError("an instruction is not one of numpy data")


def _finished(machine: _Machine) -> Any:
    value = machine.pop()
    if isinstance(value, _PendingArray):
        value = value.array
    if not isinstance(value, np.ndarray | np.generic | bool | int | float | str | None):
        raise RefusedError(f"holds a {type(value).__name__}, no numpy data")
    return value


_FRAME_MAGIC_BASE64 = "BCJNG"
_EXPANSION_MAX = 255
"""Most bytes that one byte of an lz4 frame can expand to."""


def looks_packed(value: object) -> bool:
    """Return True if `value` is text that starts like a packed value."""
    if isinstance(value, bytes):
        return value.startswith(_FRAME_MAGIC_BASE64.encode())
    return isinstance(value, str) and value.startswith(_FRAME_MAGIC_BASE64)


def unpack(value: str | bytes, *, limits: DataLimits = DEFAULT_LIMITS) -> Any:
    """Return a packed value: an array (read-only), a numpy scalar or a plain number."""
    return read_numpy_pickle(_decompress(value, limits), limits=limits)


def unpack_if_packed(value: Any, *, limits: DataLimits = DEFAULT_LIMITS) -> Any:
    """Unpack text and bytes; return anything else as it is, because columns may be mixed."""
    if isinstance(value, str | bytes):
        return unpack(value, limits=limits)
    return value


def _decompress(value: str | bytes, limits: DataLimits) -> bytes:
    try:
        frame = binascii.a2b_base64(value, strict_mode=True)
    except (binascii.Error, ValueError) as error:
        raise PackedValueError(f"packed value is not base64: {error}") from error
    held_bytes_max = _EXPANSION_MAX * len(frame)
    try:
        stated_bytes: int = lz4.frame.get_frame_info(frame)["content_size"]  # 0: not stated
        if stated_bytes > min(held_bytes_max, limits.value_bytes_max):
            raise PackedValueError(
                f"packed value of {len(frame)} compressed bytes states {stated_bytes}; "
                f"the limit is {min(held_bytes_max, limits.value_bytes_max)}"
            )
        if held_bytes_max <= limits.value_bytes_max:
            # It cannot exceed the limit, and this is ten times as fast for a small one.
            whole: bytes = lz4.frame.decompress(frame)
            return whole
        decompressor = lz4.frame.LZ4FrameDecompressor()
        bytes_max = stated_bytes or limits.value_bytes_max
        data: bytes = decompressor.decompress(frame, max_length=bytes_max)
    except (RuntimeError, EOFError) as error:
        raise PackedValueError(f"packed value is not an lz4 frame: {error}") from error
    if not decompressor.eof:
        if len(data) >= bytes_max:
            raise PackedValueError(f"packed value holds more than the limit of {bytes_max} bytes")
        raise PackedValueError("packed value is a truncated lz4 frame")
    return data


def unpack_column(
    values: Any, name: str, *, limits: DataLimits = DEFAULT_LIMITS
) -> list[Any] | Any:
    """Unpack the packed values of one column; return a numeric array as it is."""
    if isinstance(values, np.ndarray) and values.dtype.kind not in "OUS":
        return values
    unpacked = []
    for row, value in enumerate(values):
        try:
            unpacked.append(unpack_if_packed(value, limits=limits))
        except PackedValueError as error:
            error.row = row
            error.column = name
            raise
    return unpacked
