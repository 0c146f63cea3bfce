"""Values of recorded files, decoded without executing anything, for `files`, `rows`, `episodes`."""
