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

class PayloadHeader(_message.Message):
    __slots__ = ("tree", "arrays", "body_size_bytes", "checksum_block_bytes", "attributes")
    class AttributesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TREE_FIELD_NUMBER: _ClassVar[int]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    BODY_SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    tree: TreeNode
    arrays: _containers.RepeatedCompositeFieldContainer[ArrayHeader]
    body_size_bytes: int
    checksum_block_bytes: int
    attributes: _containers.ScalarMap[str, str]
    def __init__(self, tree: _Optional[_Union[TreeNode, _Mapping]] = ..., arrays: _Optional[_Iterable[_Union[ArrayHeader, _Mapping]]] = ..., body_size_bytes: _Optional[int] = ..., checksum_block_bytes: _Optional[int] = ..., attributes: _Optional[_Mapping[str, str]] = ...) -> None: ...

class TreeNode(_message.Message):
    __slots__ = ("array_index", "dict", "list", "tuple", "none")
    ARRAY_INDEX_FIELD_NUMBER: _ClassVar[int]
    DICT_FIELD_NUMBER: _ClassVar[int]
    LIST_FIELD_NUMBER: _ClassVar[int]
    TUPLE_FIELD_NUMBER: _ClassVar[int]
    NONE_FIELD_NUMBER: _ClassVar[int]
    array_index: int
    dict: DictNode
    list: ListNode
    tuple: TupleNode
    none: NoneNode
    def __init__(self, array_index: _Optional[int] = ..., dict: _Optional[_Union[DictNode, _Mapping]] = ..., list: _Optional[_Union[ListNode, _Mapping]] = ..., tuple: _Optional[_Union[TupleNode, _Mapping]] = ..., none: _Optional[_Union[NoneNode, _Mapping]] = ...) -> None: ...

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

class ArrayHeader(_message.Message):
    __slots__ = ("name", "dtype", "shape", "codec", "offset_bytes", "size_bytes", "block_checksums", "codec_parameters")
    class CodecParametersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    CODEC_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    codec: Codec
    offset_bytes: int
    size_bytes: int
    block_checksums: _containers.RepeatedScalarFieldContainer[int]
    codec_parameters: _containers.ScalarMap[str, str]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., codec: _Optional[_Union[Codec, str]] = ..., offset_bytes: _Optional[int] = ..., size_bytes: _Optional[int] = ..., block_checksums: _Optional[_Iterable[int]] = ..., codec_parameters: _Optional[_Mapping[str, str]] = ...) -> None: ...
