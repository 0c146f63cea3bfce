"""The library's values: fragments, buffers' limits, errors, options. No I/O."""
