"""Objects with threads or connections: no other process can use them, forked or unpickled."""

import os
from typing import Any, NoReturn, Self

from breadbox.model.errors import ClosedError


class ProcessBound:
    """Base of such objects: another process gets ClosedError, with a remedy."""

    _kind = "client"
    _remedy = "connect in each process"
    _process_id: int

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Note the process."""
        self = super().__new__(cls)
        self._process_id = os.getpid()
        return self

    @property
    def _is_here(self) -> bool:
        """True in the process that made it."""
        return os.getpid() == self._process_id

    def _check_process(self) -> None:
        """Raise ClosedError in a process that was forked since; call it before taking a lock."""
        if not self._is_here:
            raise self._elsewhere()

    def _elsewhere(self) -> ClosedError:
        return ClosedError(
            f"this {self._kind} works only in the process that made it, not after a fork, nor "
            f"pickled: {self._remedy}"
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise self._elsewhere()
