"""The library's values: fragments, limits of buffers, errors, options. No I/O."""
