"""The two ways in, also where the extra `deploy` is not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

WAYS = pytest.mark.parametrize(
    ("way", "program"),
    [
        ("from deploy.__main__ import main; sys.exit(main(['{}']))", "python -m deploy"),
        ("from handler.cli import main; sys.exit(main(['deploy', '{}']))", "lmi deploy"),
    ],
)


@WAYS
def test_a_way_in(way: str, program: str) -> None:
    said = subprocess.run(
        [sys.executable, "-c", f"import sys; {way.format('--help')}"], capture_output=True, text=True, check=True
    ).stdout
    assert said.startswith(f"usage: {program} ")


@WAYS
@pytest.mark.parametrize("missing", ["boto3", "botocore", "pydantic", "yaml", "rich"])
def test_what_the_extra_brings_is_missing(way: str, program: str, missing: str) -> None:
    refused = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.modules[{missing!r}] = None; {way.format('plan')}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 2
    assert refused.stderr == f"{program}: needs {missing}: pip install '.[deploy]' in lmi-handler's directory\n"
