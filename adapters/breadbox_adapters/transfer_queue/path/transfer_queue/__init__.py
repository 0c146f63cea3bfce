"""The module that programs of TransferQueue import; see `breadbox_adapters.transfer_queue`."""

from breadbox_adapters.transfer_queue import *  # noqa: F403
from breadbox_adapters.transfer_queue import __all__ as __all__
