"""Which of a server's connections still wait for an answer, as the kernel knows it (sock_diag(7), tcp_info).

Java does not say how many requests it has; the kernel does say for each connection when bytes last came and last went.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
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
    """Milliseconds since bytes last went to the client and last came from it; bytes that came in all."""

    sent: int
    received: int
    num_bytes: int

    def waits(self, quiet: int) -> bool:
        """Whether a request came after the last answer, or the answer's last bytes are younger than `quiet` ms."""
        return self.num_bytes > 0 and (self.received < self.sent or self.sent < quiet)


def connections(port: int) -> list[Connection]:
    """The open connections of whoever listens on a port.

    Raises:
        OSError: this kernel does not tell.
    """
    return [found for family in (socket.AF_INET, socket.AF_INET6) for found in _of_family(family, port)]


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
