from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MOST = 12
"""Frames between a plain stream's bytes and the engine's command. What only forwards belongs into what it calls."""


def test_few_frames_lie_between_the_socket_and_the_engines_command() -> None:
    command = [sys.executable, "-m", "tests.tools.frames", "--json"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    walks = json.loads(done.stdout)
    assert walks.keys() == {"LMI stream, HTTP", "LMI stream, DJL", "chat with tools, HTTP", "embeddings, HTTP"}
    too_deep = {name: walk["stack"] for name, walk in walks.items() if len(walk["stack"]) > MOST}
    assert too_deep == {}
    assert all(
        walk["stack"][-2:] == ["engines/process/supervisor._send", "engines/process/instance.put"]
        for walk in walks.values()
    )
