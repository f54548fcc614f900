"""The two ways in, also where the extra `deploy` is not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

_WITHOUT_BOTO3 = "import sys; sys.modules['boto3'] = None; "


@pytest.mark.parametrize(
    ("way", "program"),
    [
        ("from deploy.__main__ import main; sys.exit(main(['{}']))", "python -m deploy"),
        ("from handler.cli import main; sys.exit(main(['deploy', '{}']))", "lmi deploy"),
    ],
)
def test_a_way_in(way: str, program: str) -> None:
    said = subprocess.run(
        [sys.executable, "-c", f"import sys; {way.format('--help')}"], capture_output=True, text=True, check=True
    ).stdout
    assert said.startswith(f"usage: {program} ")
    refused = subprocess.run(
        [sys.executable, "-c", _WITHOUT_BOTO3 + way.format("plan")], capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2
    assert refused.stderr == f"{program}: needs boto3: pip install 'lmi-handler[deploy]'\n"
