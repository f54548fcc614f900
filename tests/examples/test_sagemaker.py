"""The scripts in examples/sagemaker, as they are, against `lmi deploy local` with the demo model."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.clients import toolchains
from tests.deploy.local.servers import Loop, Relay, aws_variables, local_process
from tests.deploy.local.servers import local as make_local
from tests.docs.blocks import Block, parse
from tests.environment import clean_environment
from tests.examples.programs import EXAMPLES, ROOT, finished, run
from tests.servers import PATIENCE, free_port

pytestmark = pytest.mark.model

SCRIPTS = EXAMPLES / "sagemaker"
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


class Served(NamedTuple):
    """An emulator, and the container behind it."""

    url: str
    container: str


@contextlib.contextmanager
def in_container(*arguments: str) -> Iterator[Served]:
    port = free_port()
    with local_process("--container-port", str(port), *arguments) as local:
        yield Served(local.url, f"http://127.0.0.1:{port}")


@pytest.fixture(scope="module")
def lmi(model_directory: Path) -> Iterator[Served]:
    """It is only read: SageMaker's is mounted so. Root may write to anything, so what is there is looked at."""
    before = contents(model_directory)
    with in_container(str(model_directory), "--part-bytes", "11") as local:
        yield local
    assert contents(model_directory) == before


def contents(directory: Path) -> list[tuple[str, int, int]]:
    found = ((path, path.stat()) for path in directory.rglob("*"))
    return sorted((str(path.relative_to(directory)), stat.st_mtime_ns, stat.st_size) for path, stat in found)


@pytest.fixture(scope="module")
def tgi(demo_model: Path) -> Iterator[Served]:
    with in_container(str(demo_model), "-o", "option.dtype=fp32", "-o", "option.tgi_compat=true") as local:
        yield local


@pytest.fixture(scope="module")
def asynchronous(demo_model: Path) -> Iterator[Served]:
    """In the mode that the images `trtllm` and `lmi` select."""
    options = ("-o", "option.dtype=fp32", "-o", "option.async_mode=true", "--part-bytes", "11")
    with in_container(str(demo_model), *options) as local:
        yield local


def run_held(script: str, loop: Loop, local: Served, python: str = sys.executable, **more: str) -> str:
    """Run one that streams: its first word is there while the container holds the rest of the answer."""
    relay = Relay(local.container)
    with loop.serving(relay.app()) as at, make_local(loop, at=at, part_bytes=11) as emulator:
        command = [python, str(SCRIPTS / script)]
        environ = {**clean_environment(), **aws_variables(emulator.url), **more}
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            first = os.read(process.stdout.fileno(), 65536)
            relay.may_go_on.set()
            rest = process.stdout.read()
            errors = process.stderr.read().decode()
            assert (process.wait(PATIENCE), errors) == (0, "")
    assert first
    assert rest.strip()
    return (first + rest).decode()


def test_invoke_in_sagemaker(lmi: Served) -> None:
    answer, _, finish = run(SCRIPTS / "invoke.py", **aws_variables(lmi.url)).rstrip().rpartition("\n")
    assert answer.startswith(ANSWER)
    assert finish == "length after 24 tokens"


def test_decisions_in_sagemaker(lmi: Served) -> None:
    refund, team, urgency = run(SCRIPTS / "decide.py", **aws_variables(lmi.url)).splitlines()
    assert re.fullmatch(r"refund: (0\.\d\d|1\.00)", refund)
    assert re.fullmatch(r"team: (billing|technical) \((0\.[5-9]\d|1\.00)\)", team)
    assert re.fullmatch(r"urgency: [012]\.\d of 2", urgency)


@pytest.mark.parametrize(
    ("script", "served", "start"),
    [
        ("stream_lmi.py", "lmi", ANSWER),
        ("stream_lmi.py", "asynchronous", ""),  # this mode samples by default
        pytest.param("tgi_compat.py", "tgi", ANSWER, marks=pytest.mark.nightly),  # an endpoint of its own
        ("openai_chat.py", "lmi", CHAT),
    ],
)
def test_streams_come_token_by_token(
    script: str, served: str, start: str, loop: Loop, request: pytest.FixtureRequest
) -> None:
    assert run_held(script, loop, request.getfixturevalue(served)).startswith(start)


@pytest.mark.parametrize("served", ["lmi", "asynchronous"])
def test_the_tutorial_s_program_streams(served: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """docs/test_blocks.py runs it in rolling batch only; its endpoint's image selects async mode."""
    page = parse((ROOT / "docs" / "first-endpoint.md").read_text())
    (program,) = [item.text for item in page.items if isinstance(item, Block) and item.language == "python"]
    path = tmp_path / "stream.py"
    path.write_text(program.replace('"llama-3-8b"', '"local"'))
    assert run(path, **aws_variables(request.getfixturevalue(served).url)) == f"{CHAT}\n"


def test_tgi_compat_says_what_the_endpoint_lacks(lmi: Served) -> None:
    done = finished(SCRIPTS / "tgi_compat.py", **aws_variables(lmi.url))
    assert done.returncode == 1
    assert done.stderr == "the endpoint answers application/jsonlines: it runs without option.tgi_compat=true\n"


@pytest.mark.clients
@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_openai_s_client(lmi: Served, loop: Loop, tmp_path: Path) -> None:
    """OpenAI's client lives in an environment of its own; boto3 is lent to it."""
    for name in AWS_PACKAGES:
        found = importlib.util.find_spec(name)
        assert found is not None
        assert found.origin is not None
        path = Path(found.origin)
        path = path.parent if path.name == "__init__.py" else path
        (tmp_path / path.name).symlink_to(path)
    python = str(toolchains.python("openai"))
    assert run_held("openai_client.py", loop, lmi, python, PYTHONPATH=str(tmp_path)) == f"{CHAT}\n"
