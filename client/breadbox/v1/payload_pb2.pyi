from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Codec(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CODEC_UNSPECIFIED: _ClassVar[Codec]
    CODEC_RAW: _ClassVar[Codec]
    CODEC_LZ4: _ClassVar[Codec]
    CODEC_ZSTD: _ClassVar[Codec]
    CODEC_H264: _ClassVar[Codec]
CODEC_UNSPECIFIED: Codec
CODEC_RAW: Codec
CODEC_LZ4: Codec
CODEC_ZSTD: Codec
CODEC_H264: Codec

class PayloadLayout(_message.Message):
    __slots__ = ("tree", "checksum_block_bytes")
    TREE_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    tree: TreeNode
    checksum_block_bytes: int
    def __init__(self, tree: _Optional[_Union[TreeNode, _Mapping]] = ..., checksum_block_bytes: _Optional[int] = ...) -> None: ...

class TreeNode(_message.Message):
    __slots__ = ("array", "dict", "list", "tuple", "none")
    ARRAY_FIELD_NUMBER: _ClassVar[int]
    DICT_FIELD_NUMBER: _ClassVar[int]
    LIST_FIELD_NUMBER: _ClassVar[int]
    TUPLE_FIELD_NUMBER: _ClassVar[int]
    NONE_FIELD_NUMBER: _ClassVar[int]
    array: ArrayLayout
    dict: DictNode
    list: ListNode
    tuple: TupleNode
    none: NoneNode
    def __init__(self, array: _Optional[_Union[ArrayLayout, _Mapping]] = ..., dict: _Optional[_Union[DictNode, _Mapping]] = ..., list: _Optional[_Union[ListNode, _Mapping]] = ..., tuple: _Optional[_Union[TupleNode, _Mapping]] = ..., none: _Optional[_Union[NoneNode, _Mapping]] = ...) -> None: ...

class DictNode(_message.Message):
    __slots__ = ("keys", "values")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[str]
    values: _containers.RepeatedCompositeFieldContainer[TreeNode]
    def __init__(self, keys: _Optional[_Iterable[str]] = ..., values: _Optional[_Iterable[_Union[TreeNode, _Mapping]]] = ...) -> None: ...

class ListNode(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[TreeNode]
    def __init__(self, items: _Optional[_Iterable[_Union[TreeNode, _Mapping]]] = ...) -> None: ...

class TupleNode(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[TreeNode]
    def __init__(self, items: _Optional[_Iterable[_Union[TreeNode, _Mapping]]] = ...) -> None: ...

class NoneNode(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ArrayLayout(_message.Message):
    __slots__ = ("dtype", "shape", "codec", "codec_parameters")
    class CodecParametersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    CODEC_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    codec: Codec
    codec_parameters: _containers.ScalarMap[str, str]
    def __init__(self, dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., codec: _Optional[_Union[Codec, str]] = ..., codec_parameters: _Optional[_Mapping[str, str]] = ...) -> None: ...

class PayloadAttributes(_message.Message):
    __slots__ = ("values",)
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.ScalarMap[str, str]
    def __init__(self, values: _Optional[_Mapping[str, str]] = ...) -> None: ...
