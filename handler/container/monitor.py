"""Monitor of DJL Serving's process: connections that wait for an answer, and the loss of its Python worker.

Java tells neither. The kernel tells of each connection when bytes last came and last went (sock_diag(7), tcp_info).
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_SOCK_DIAG = 4  # NETLINK_SOCK_DIAG
_BY_FAMILY = 20  # SOCK_DIAG_BY_FAMILY
_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_DONE, _ERROR = 3, 2  # NLMSG_DONE, NLMSG_ERROR
_INFO = 2  # INET_DIAG_INFO: the attribute with struct tcp_info
_STATES = 1 << 1 | 1 << 8  # ESTABLISHED, CLOSE_WAIT
_HEADER = struct.Struct("=IHHII")  # nlmsghdr
_REQUEST = struct.Struct("=BBBxI2s2s44x")  # inet_diag_req_v2
_MESSAGE = 72  # inet_diag_msg, before the attributes
_SENT, _RECEIVED, _BYTES = 44, 52, 128  # in tcp_info: tcpi_last_data_sent, tcpi_last_data_recv, tcpi_bytes_received


class Connection(NamedTuple):
    """Milliseconds since bytes last went to the client (`sent`) and came from it; all bytes that came."""

    sent: int
    received: int
    num_bytes: int

    def waits(self, quiet: int) -> bool:
        """Whether a request came after the last answer, or the last bytes of one went less than `quiet` ms ago."""
        return self.num_bytes > 0 and (self.received < self.sent or self.sent < quiet)


def connections(port: int) -> list[Connection]:
    """List the open connections to the server on a port.

    Raises:
        OSError: this kernel has no such list.
    """
    return [each for family in (socket.AF_INET, socket.AF_INET6) for each in _of_family(family, port)]


def _of_family(family: int, port: int) -> Iterator[Connection]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG) as kernel:
        kernel.settimeout(2)
        body = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << _INFO - 1, _STATES, port.to_bytes(2, "big"), b"\0\0")
        kernel.send(_HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, _DUMP, 1, 0) + body)
        while True:
            data = kernel.recv(1 << 18)
            while data:
                length, kind, *_ = _HEADER.unpack_from(data)
                message, data = data[_HEADER.size : length], data[(length + 3) & ~3 :]
                if kind == _DONE:
                    return
                if kind == _ERROR:
                    number = -struct.unpack_from("=i", message)[0]
                    raise OSError(number, os.strerror(number))
                yield from _tcp_info(message[_MESSAGE:])


def _tcp_info(attributes: bytes) -> Iterator[Connection]:
    while len(attributes) >= 4:
        length, kind = struct.unpack_from("=HH", attributes)
        value, attributes = attributes[4:length], attributes[(length + 3) & ~3 :]
        if kind == _INFO and len(value) >= _BYTES + 8:
            sent, received, num_bytes = (
                struct.unpack_from(form, value, place)[0]
                for form, place in (("=I", _SENT), ("=I", _RECEIVED), ("=Q", _BYTES))
            )
            yield Connection(sent, received, num_bytes)


PATIENCE = 6.0  # seconds without a worker; Java starts another one within two, if at all
_WORKER = b"djl_python_engine.py"  # also in the command line of an mpirun around it


class WorkerWatch:
    """Detects that DJL Serving has no Python worker any more.

    In rolling and dynamic batching Java starts no other one. Each request then gets 400 "Backend Python process is
    stopped.", and /ping stays 200. The same holds for a model that Java has given up (`retry_threshold`).

    Args:
        group: process group of DJL Serving and its workers.
        patience: seconds without a worker after which it counts as lost.
    """

    def __init__(self, group: int, patience: float = PATIENCE) -> None:
        self._group = group
        self._patience = patience
        self._last_seen: float | None = None

    def is_lost(self) -> bool:
        """Whether there was a worker once, and there has been none for a while."""
        now = time.monotonic()
        if _has_worker(self._group):
            self._last_seen = now
        return self._last_seen is not None and now - self._last_seen > self._patience


def _has_worker(group: int) -> bool:
    return any(_is_worker(Path("/proc") / name, group) for name in os.listdir("/proc") if name.isdigit())


def _is_worker(process: Path, group: int) -> bool:
    with contextlib.suppress(OSError):  # it has just ended
        state, _, its_group = (process / "stat").read_text().rpartition(")")[2].split()[:3]
        return state != "Z" and int(its_group) == group and _WORKER in (process / "cmdline").read_bytes()
    return False
