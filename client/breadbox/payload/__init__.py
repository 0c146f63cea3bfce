"""Payloads: arrays as bytes and back, and straight into place. The format is in `format`."""

from breadbox.payload.format import FORMAT_VERSION, decode_tree, encode_tree
from breadbox.payload.fragments import (
    Written,
    describe_arrays,
    encode_fragment,
    read_fragments,
    write_and_describe,
    write_fragments,
)
from breadbox.payload.weights import read_weights, write_weights

__all__ = [
    "FORMAT_VERSION",
    "Written",
    "decode_tree",
    "describe_arrays",
    "encode_fragment",
    "encode_tree",
    "read_fragments",
    "read_weights",
    "write_and_describe",
    "write_fragments",
    "write_weights",
]
