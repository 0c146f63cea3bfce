"""A DNS server on the loopback that knows one name."""

import socket
import struct
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self

_TYPE_A: Final = 1
_ANSWERED: Final = 0x8180
"""Flags of an answer: recursion was asked for, and is available; no error."""
_NO_SUCH_NAME: Final = _ANSWERED | 3


class NameServer:
    """Answers for one name with the IPv4 addresses that it has at that moment; a context manager.

    Args:
        name: Whose records it has; every other name is none.
        hosts: Its addresses; may be set anew.
    """

    def __init__(self, name: str, hosts: Sequence[str]) -> None:
        self.hosts = tuple(hosts)
        self._name = b"".join(bytes([len(part)]) + part.encode() for part in name.split("."))
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # An empty datagram is no question, and wakes the thread.
        self._socket.sendto(b"", self._socket.getsockname())
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while True:
            question, caller = self._socket.recvfrom(4096)
            if not question:
                return
            self._socket.sendto(self._answer(question), caller)

    def _answer(self, question: bytes) -> bytes:
        end = question.index(b"\0", 12)
        name, asked = question[12:end], question[12 : end + 5]
        (kind,) = struct.unpack(">H", question[end + 1 : end + 3])
        is_known = name.lower() == self._name.lower()
        hosts = self.hosts if is_known and kind == _TYPE_A else ()
        flags = _ANSWERED if is_known else _NO_SUCH_NAME
        records = b"".join(
            b"\xc0\x0c" + struct.pack(">HHIH", _TYPE_A, 1, 0, 4) + socket.inet_aton(host)
            for host in hosts
        )
        return question[:2] + struct.pack(">5H", flags, 1, len(hosts), 0, 0) + asked + records
