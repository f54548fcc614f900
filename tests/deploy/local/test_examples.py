"""The scripts in examples/, as they are, against `lmi deploy local` with the demo model."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients import venvs
from tests.deploy.local.processes import LocalProcess, environment, local_process

pytestmark = pytest.mark.model

EXAMPLES = Path(__file__).parents[3] / "examples"
ANSWER = " Paris."
CHAT = "The capital of France is Paris."
AWS_PACKAGES = ("boto3", "botocore", "s3transfer", "jmespath", "dateutil", "six")


@pytest.fixture(scope="module")
def model_directory(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As SageMaker's model data: with the file's own weights, whose greedy answers are the same everywhere."""
    directory = tmp_path_factory.mktemp("opt") / "model"
    directory.mkdir()
    (directory / demo_model.name).symlink_to(demo_model)
    (directory / "serving.properties").write_text("option.dtype=fp32\n")
    directory.chmod(0o555)
    return directory


@pytest.fixture(scope="module")
def lmi(model_directory: Path) -> Iterator[LocalProcess]:
    """It is only read: SageMaker's is mounted so. Root may write to anything, so what is there is looked at."""
    before = contents(model_directory)
    with local_process(str(model_directory), "--part-bytes", "11") as local:
        yield local
    assert contents(model_directory) == before


def contents(directory: Path) -> list[tuple[str, int, int]]:
    found = ((path, path.stat()) for path in directory.rglob("*"))
    return sorted((str(path.relative_to(directory)), stat.st_mtime_ns, stat.st_size) for path, stat in found)


@pytest.fixture(scope="module")
def tgi(demo_model: Path) -> Iterator[LocalProcess]:
    with local_process(str(demo_model), "-o", "option.dtype=fp32", "-o", "option.tgi_compat=true") as local:
        yield local


def run(
    script: str, local: LocalProcess, python: str = sys.executable, **more: str
) -> tuple[list[tuple[float, str]], str]:
    """What it prints as it prints it, each with the time of its arrival; and its errors."""
    command = [python, str(EXAMPLES / script)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**environment(local.url), **more}
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        pieces = []
        while data := os.read(process.stdout.fileno(), 65536):
            pieces.append((time.monotonic(), data.decode()))
        errors = process.stderr.read().decode()
        assert process.wait(60) == 0, errors
    return pieces, errors


def text(pieces: list[tuple[float, str]]) -> str:
    return "".join(piece for _, piece in pieces)


def test_invoke(lmi: LocalProcess) -> None:
    pieces, _ = run("invoke.py", lmi)
    assert text(pieces).startswith(ANSWER)
    assert text(pieces).endswith("\nlength after 24 tokens\n")


@pytest.mark.parametrize(
    ("script", "served", "start"),
    [("stream_lmi.py", "lmi", ANSWER), ("tgi_compat.py", "tgi", ANSWER), ("openai_chat.py", "lmi", CHAT)],
)
def test_streams_come_token_by_token(script: str, served: str, start: str, request: pytest.FixtureRequest) -> None:
    local = request.getfixturevalue(served)
    pieces, errors = run(script, local)
    assert errors == ""
    assert text(pieces).startswith(start)
    # Every token is flushed by itself; the pipe joins some of them only where this test is slower than the model.
    assert len(pieces) >= 5, f"in {len(pieces)} pieces"


def test_tgi_compat_says_what_the_endpoint_lacks(lmi: LocalProcess) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "tgi_compat.py")], env=environment(lmi.url), capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr == "the endpoint answers application/jsonlines: it runs without option.tgi_compat=true\n"


@pytest.mark.clients
@pytest.mark.timeout(600)
def test_openai_s_client(lmi: LocalProcess, tmp_path: Path) -> None:
    """OpenAI's client lives in an environment of its own; boto3 is lent to it."""
    for name in AWS_PACKAGES:
        found = importlib.util.find_spec(name)
        assert found is not None
        assert found.origin is not None
        path = Path(found.origin)
        path = path.parent if path.name == "__init__.py" else path
        (tmp_path / path.name).symlink_to(path)
    pieces, errors = run("openai_client.py", lmi, str(venvs.python("openai")), PYTHONPATH=str(tmp_path))
    assert errors == ""
    assert text(pieces) == f"{CHAT}\n"
    assert len(pieces) >= 5
