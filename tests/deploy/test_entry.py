"""The two ways in, also where the extra `deploy` is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from handler.core.package import install

EXAMPLE = Path(__file__).parents[2] / "examples" / "llama-3-8b-g6e.yaml"

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
    assert refused.stderr == f"{program}: needs {missing}: {install('lmi-handler[deploy]')}\n"


def test_plan_names_every_wrong_option() -> None:
    settings = ("options.tgi_compt=true", "options.dtype=int3", "options.batch_size=2", "options.enable_streaming=true")
    refused = subprocess.run(
        [sys.executable, "-m", "deploy", "plan", str(EXAMPLE), "--offline", *(f"--set={one}" for one in settings)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (refused.returncode, refused.stdout) == (2, "")
    head, *lines = refused.stderr.splitlines()
    assert head == "lmi deploy: 3 problems:"
    for line, start in zip(
        lines,
        [
            "options.tgi_compt: unknown option 'tgi_compt'; did you mean 'tgi_compat'?",
            "options.dtype: dtype=int3: must be one of auto, fp32",
            "options.enable_streaming: enable_streaming=true needs batch_size=1, but batch_size=2",
            "`lmi options` lists the options",
        ],
        strict=True,
    ):
        assert line.strip().startswith(start)
