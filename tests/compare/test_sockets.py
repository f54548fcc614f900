"""`tests.compare.sockets` from end to end with few clients, and how its clients count frames."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from websockets.frames import Frame, Opcode

from tests.compare.sockets import SocketStreaming, frame_sizes
from tests.compare.test_busy_host import Transport

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, binds processes to cores"),
    pytest.mark.long,
]


def test_both_transports_are_measured() -> None:
    command = [sys.executable, "-m", "tests.compare.sockets", "--clients", "4", "--seconds", "1", "--repeat", "1"]
    done = subprocess.run([*command, "--idle", "20"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    result: Any = json.loads(done.stdout.splitlines()[-1])
    assert [(row["clients"], row["transport"]) for row in result["streams"]] == [(4, "SSE"), (4, "WebSocket")]
    for row in result["streams"]:
        assert row["cpu_us"] > 0
        assert row["ratio"] > 0
    assert [(row["connections"], row["transport"]) for row in result["idle"]] == [(20, "SSE"), (20, "WebSocket")]


@pytest.mark.parametrize("size", [7, 1000, 1_000_000])
def test_a_client_counts_frames_however_they_are_cut(size: int) -> None:
    client = SocketStreaming(b"GET / HTTP/1.1\r\n\r\nthe message")
    client.connection_made(Transport())
    frames = [Frame(Opcode.TEXT, b"x" * length).serialize(mask=False) for length in (1, 125, 126, 65535, 65536)]
    stream = b"HTTP/1.1 101 Switching Protocols\r\n\r\n" + b"".join(frames)
    for start in range(0, len(stream), size):
        client.data_received(stream[start : start + size])
    assert client.tokens == len(frames)
    assert client.streaming


def test_only_whole_frames_are_counted() -> None:
    whole = Frame(Opcode.TEXT, b"x" * 200).serialize(mask=False)
    assert frame_sizes(whole + whole[:-1]) == (1, len(whole))
    assert frame_sizes(whole[:3]) == (0, 0)
