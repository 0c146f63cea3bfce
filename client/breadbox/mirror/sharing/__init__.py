"""A mirror in a process of its own, and its shared memory."""
