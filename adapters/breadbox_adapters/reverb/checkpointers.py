"""Where a server keeps its tables; what Reverb has in `reverb.platform.checkpointers_lib`."""

from breadbox_adapters.reverb.server import DefaultCheckpointer

__all__ = ["DefaultCheckpointer"]
