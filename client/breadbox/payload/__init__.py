"""Payloads: arrays as bytes and back, and straight into place. The format is in `format`."""

from breadbox.payload.format import FORMAT_VERSION as FORMAT_VERSION
from breadbox.payload.format import decode_tree as decode_tree
from breadbox.payload.format import encode_tree as encode_tree
from breadbox.payload.fragments import Written as Written
from breadbox.payload.fragments import describe_arrays as describe_arrays
from breadbox.payload.fragments import encode_fragment as encode_fragment
from breadbox.payload.fragments import read_fragments as read_fragments
from breadbox.payload.fragments import write_and_describe as write_and_describe
from breadbox.payload.fragments import write_fragments as write_fragments
from breadbox.payload.weights import read_weights as read_weights
from breadbox.payload.weights import write_weights as write_weights
