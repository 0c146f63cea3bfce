"""Decode values of recorded files, executing nothing; for `files`, `rows` and `episodes`."""
