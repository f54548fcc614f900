"""`tests.compare.background` from end to end with few responses."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"), pytest.mark.long]


def test_finished_responses_and_polls_are_measured() -> None:
    command = [sys.executable, "-m", "tests.compare.background", "--responses", "20", "--tokens", "16"]
    done = subprocess.run([*command, "--pollers", "4", "--polls", "5"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    result: Any = json.loads(done.stdout.splitlines()[-1])
    assert result["polls"] == 20
    assert result["disk, MiB"] > 0
    assert result["responses/s"] > 0
