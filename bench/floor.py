"""The floor: a minimal asyncio server for streams, without a model and without HTTP except one prepared head.

It answers any POST with a chunked head. Then one task writes the given chunks in turn, one per tick, to every client.

    python bench/floor.py --pace 50 --loop uvloop --chunks '["5\\r\\nhello\\r\\n"]'
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
import time
from typing import cast

HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/jsonlines\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
BACKLOG = 4096


class Client(asyncio.Protocol):
    """A connection that streams from its first POST until it is closed."""

    def __init__(self, streaming: set[asyncio.Transport]) -> None:
        self._streaming = streaming

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it

    def data_received(self, data: bytes) -> None:
        if data.startswith(b"POST "):
            self._transport.write(HEAD)
            self._streaming.add(self._transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._streaming.discard(self._transport)


async def pump(streaming: set[asyncio.Transport], chunks: list[bytes], pace: float) -> None:
    """Write one chunk per tick of a clock, as the echo engine does."""
    due = time.monotonic()
    while True:
        for chunk in chunks:
            due += 1 / pace
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            for transport in streaming:
                transport.write(chunk)


async def serve(chunks: list[bytes], pace: float) -> None:
    streaming: set[asyncio.Transport] = set()
    loop = asyncio.get_running_loop()
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = await loop.create_server(lambda: Client(streaming), sock=listener, backlog=BACKLOG)
    host, port = listener.getsockname()
    print(f"listening on http://{host}:{port}", file=sys.stderr, flush=True)
    async with server:
        await pump(streaming, chunks, pace)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pace", type=float, default=50.0, help="tokens a second for each client")
    parser.add_argument("--loop", choices=("uvloop", "asyncio"), default="uvloop")
    parser.add_argument("--chunks", required=True, help="JSON array of what is written in turn, framing included")
    arguments = parser.parse_args()
    chunks = [chunk.encode() for chunk in json.loads(arguments.chunks)]
    if arguments.loop == "uvloop":
        import uvloop

        uvloop.run(serve(chunks, arguments.pace))
    else:
        asyncio.run(serve(chunks, arguments.pace))


if __name__ == "__main__":
    main()
