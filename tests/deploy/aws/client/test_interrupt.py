"""Ctrl-C in a real conversation, while nothing comes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.deploy.aws.client.double import Double, streams
from tests.deploy.aws.client.wire import golden
from tests.servers import PATIENCE

CHAT = golden("chat/stream").body


def test_ctrl_c_ends_an_answer_that_does_not_come(aws: Double) -> None:
    first, _, _ = CHAT.partition(b"\n")
    aws.answers = [streams(first, then="stall"), streams(CHAT)]
    process = subprocess.Popen(
        [sys.executable, "-m", "deploy", "chat", "e"],
        cwd=Path(__file__).parents[4],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUTF8": "1"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"Hi\n")
    process.stdin.flush()
    assert process.stdout.read(4) == b"Deep"  # it comes before the answer ends
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(b"And?\n", timeout=PATIENCE)
    assert (process.returncode, error) == (0, b"")
    assert out.decode() == ' ...\nDeep "Learning" 😀\n\n'
    assert [turn["content"] for turn in aws.requests[1].json["messages"]] == ["Hi", "Deep", "And?"]
