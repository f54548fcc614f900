"""Differences between versions of DJL Serving, and a faster way to receive what djl_python reads."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import djl_python
from djl_python import Output

from handler.config import environment

MAX_FIELD = environment.netty_buffer_bytes() // 2  # room for what is around it
"""Bytes of a field that Java takes; with a larger one it gives the worker up, and everybody in it."""

_RECEIVE_BYTES = 1 << 16  # Python makes room for as many at each call


class DjlVersion(NamedTuple):
    """What differs between versions; nothing else asks which one it is.

    Attributes:
        length: of a string: two bytes before 0.28, four since.
        json_errors: a piece that is JSON of `data` and `last`, where `data` is JSON with `code` and `error`, sets the
            request's status and keeps the body; since 0.29 `code` and `error` in the piece's map do, and make the body.
        commits_early: a first piece without bytes begins the answer, with its status; since 0.29 it is passed over.
        always_steps: a rolling batch is stepped whenever option.rolling_batch is there, be it `disable`.
        steps_all_ranks: a step goes to all ranks of an MPI world, and the last one's answer counts, unless
            option.rolling_batch is `trtllm`.
    """

    length: struct.Struct
    json_errors: bool
    commits_early: bool
    always_steps: bool
    steps_all_ranks: bool

    @property
    def max_piece(self) -> int:
        """Bytes of a piece in a map of strings."""
        return 32_000 if self.length.size == 2 else MAX_FIELD

    def string(self, text: bytes) -> bytes:
        return self.length.pack(len(text)) + text


def installed_version() -> DjlVersion:
    """Return that of the djl_python that runs us."""
    probe = bytearray()
    Output.write_utf8(probe, "")
    version = tuple(int(part) for part in djl_python.__version__.split("-")[0].split(".")[:2])
    return DjlVersion(
        length=struct.Struct(">h" if len(probe) == 2 else ">i"),
        json_errors=version < (0, 29),
        commits_early=version < (0, 29),
        always_steps=version < (0, 28),
        steps_all_ranks=version < (0, 29),
    )


def read_ahead() -> None:
    """Have djl_python receive what lies there at once, not each field of a request by itself.

    A continuing request has three fields and no bytes; 128 of them are 400 system calls a step. The meaning stays:
    `length` bytes of the connection, in order; what came beyond them is the beginning of the next ones.
    """
    received, at, source = bytearray(), 0, None

    def retrieve_buffer(conn: Any, length: int) -> bytearray:
        nonlocal received, at, source
        end = at + length
        if conn is not source or end > len(received):
            if conn is not source:
                received, at, source = bytearray(), 0, conn
            del received[:at]
            at, end = 0, length
            while len(received) < length:
                more = conn.recv(max(_RECEIVE_BYTES, length - len(received)))
                if not more:
                    raise ValueError("Connection disconnected")
                received += more
        field = received[at:end]
        at = end
        return field

    djl_python.inputs.retrieve_buffer = retrieve_buffer
