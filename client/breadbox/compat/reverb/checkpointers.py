"""Where a server keeps its tables; what Reverb has in `reverb.platform.checkpointers_lib`."""

from breadbox.compat.reverb.server import DefaultCheckpointer

__all__ = ["DefaultCheckpointer"]
