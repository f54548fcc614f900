"""The scripts in examples/, as they are, against `lmi deploy local` with the demo model."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.clients import venvs
from tests.deploy.local.processes import LocalProcess, descendants, environment, local_process

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


def run(script: str, local: LocalProcess, python: str = sys.executable, **more: str) -> str:
    """What it prints. If it streams, its first word is there while the rest is not made: the container is held then.

    A short answer may be whole before the container is held; one that does not stream always is.
    """
    for _ in range(4):
        with contextlib.suppress(pytest.fail.Exception):
            return _run(script, local, python, **more)
    return _run(script, local, python, **more)


def _run(script: str, local: LocalProcess, python: str, **more: str) -> str:
    processes = descendants(local.process.pid)  # looked for before: it takes as long as a few tokens
    with subprocess.Popen(
        [python, str(EXAMPLES / script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**environment(local.url), **more},
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        printed = os.read(process.stdout.fileno(), 65536)
        if script != "invoke.py":
            with held(processes), pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.5)
        printed += process.stdout.read()
        errors = process.stderr.read().decode()
        assert (process.wait(60), errors) == (0, "")
    return printed.decode()


@contextmanager
def held(processes: Sequence[int]) -> Iterator[None]:
    """The container and its engine do nothing."""
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in processes:
            os.kill(pid, signal.SIGCONT)


def test_invoke(lmi: LocalProcess) -> None:
    answer, _, finish = run("invoke.py", lmi).rstrip().rpartition("\n")
    assert answer.startswith(ANSWER)
    assert finish == "length after 24 tokens"


@pytest.mark.parametrize(
    ("script", "served", "start"),
    [("stream_lmi.py", "lmi", ANSWER), ("tgi_compat.py", "tgi", ANSWER), ("openai_chat.py", "lmi", CHAT)],
)
def test_streams_come_token_by_token(script: str, served: str, start: str, request: pytest.FixtureRequest) -> None:
    assert run(script, request.getfixturevalue(served)).startswith(start)


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
    assert run("openai_client.py", lmi, str(venvs.python("openai")), PYTHONPATH=str(tmp_path)) == f"{CHAT}\n"
