"""`lmi deploy local`, as a process, with the echo engine: what it prints, and how it and the container end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from aiohttp import web
from botocore.exceptions import ClientError

from deploy.cli import local as local_command
from deploy.cli.main import main
from deploy.emulator.endpoint import Endpoint
from deploy.emulator.serving import LocalPlan, load_adapters
from deploy.errors import Failed
from tests.deploy.local.servers import Container, LocalProcess, Loop, aws_variables, client, local_process
from tests.environment import clean_environment
from tests.process_tree import alive, descendants
from tests.servers import PATIENCE, wait_for
from tests.user_files import write_adapter

ECHO = ("--engine", "echo")


def test_the_snippet_that_it_prints_runs_and_ctrl_c_ends_all() -> None:
    with local_process(*ECHO) as local:
        first, *snippet = local.out.splitlines()
        assert first == f"endpoint local is InService: {local.url}"
        assert len(snippet) == 3
        code = textwrap.dedent("\n".join(snippet))
        env = {**clean_environment(), **aws_variables(local.url)}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith('{"generated_text":')
        assert "endpoint local is starting at" in local.log
        assert "container | ready after" in local.log
        processes = descendants(local.process.pid)
        assert len(processes) >= 1
        assert local.end(signal.SIGINT) == 0
        wait_for(lambda: not any(map(alive, processes)), 10, f"left behind: {processes}")
        assert "container | " in local.log.partition("SIGTERM")[0], "the container was not asked to stop"


def test_a_killed_emulator_leaves_no_container() -> None:
    with local_process(*ECHO) as local:
        processes = descendants(local.process.pid)
        assert local.end(signal.SIGKILL) == -signal.SIGKILL
        wait_for(lambda: not any(map(alive, processes)), 30, f"left behind: {processes}")


def test_a_container_that_dies_in_service_is_told_and_answers_fail() -> None:
    with local_process(*ECHO) as local:
        os.kill(local.container_pid(), signal.SIGKILL)
        local.wait_said("the container was killed by SIGKILL. Its last log lines:")
        assert local.log.count("container was killed") == 1
        with pytest.raises(ClientError) as raised:
            client(local.url).invoke_endpoint(EndpointName="local", Body=b"{}")
        assert raised.value.response["Error"]["Code"] == "ServiceUnavailable"
        assert local.end() == 0


def test_a_wrong_model_ends_it_with_the_container_s_words(tmp_path: Path) -> None:
    local = LocalProcess(str(tmp_path / "none.gguf"))
    assert local.wait() == 5
    assert "lmi deploy: the container exited with status 2" in local.log
    assert "none.gguf, which does not exist" in local.log.partition("Its last log lines:")[2]
    assert local.out == ""


def test_options_and_the_name_reach_it() -> None:
    with local_process(*ECHO, "-o", "option.tgi_compat=true", "--endpoint-name", "mine") as local:
        runtime = client(local.url)
        answer = runtime.invoke_endpoint(EndpointName="mine", ContentType="application/json", Body=b'{"inputs": "a"}')
        assert answer["Body"].read().startswith(b'[{"generated_text"'), "not TGI's list"
        with pytest.raises(ClientError, match="Endpoint local of account 000000000000 not found"):
            runtime.invoke_endpoint(EndpointName="local", Body=b"{}")


def test_adapters_are_components(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "sql")
    with local_process(*ECHO, "--adapter", f"sql={path}") as local:
        assert 'InferenceComponentName="base"' in local.out
        runtime = client(local.url)

        def ask(component: str) -> bytes:
            body = b'{"inputs": "a b c d", "parameters": {"max_new_tokens": 1}}'
            answer = runtime.invoke_endpoint(EndpointName="local", ContentType="application/json", Body=body,
                                             InferenceComponentName=component)  # fmt: skip
            return bytes(answer["Body"].read())

        assert ask("base") != ask("sql"), "the adapter did not answer"
        with pytest.raises(ClientError, match="Inference Component Name header is required"):
            runtime.invoke_endpoint(EndpointName="local", Body=b"{}")


def test_a_container_that_runs_already(loop: Loop) -> None:
    container = Container()
    container.may_go_on.set()
    with loop.serving(container.app()) as url:
        with local_process("--container", url, "--part-bytes", "2") as local:
            runtime = client(local.url)
            asked = json.dumps({"do": "stream", "pieces": [b"abcde".hex()]})
            body = runtime.invoke_endpoint_with_response_stream(EndpointName="local", Body=asked)["Body"]
            assert [part["PayloadPart"]["Bytes"] for part in body] == [b"ab", b"cd", b"e"]
            with pytest.raises(ClientError, match="The endpoint has no AsyncInferenceConfig"):
                runtime.invoke_endpoint_async(EndpointName="local", Body=b"{}", InferenceId="i")
            assert local.end() == 0
        assert container.paths == ["/invocations"], "a container that was there is left as it is"


def test_by_default_its_ways_are_sagemaker_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """SageMaker's guide: 60 s, 8 minutes, 25 MB; /ping has 2 s, and 8 minutes to begin."""
    plans: list[LocalPlan] = []

    async def taken(plan: LocalPlan, **more: object) -> int:
        plans.append(plan)
        return 0

    monkeypatch.setattr(local_command, "serve", taken)
    assert main(["local", "--container", "http://127.0.0.1:8080/"]) == 0
    [plan] = plans
    assert (plan.host, plan.port, plan.commands) == ("127.0.0.1", 8081, {})
    assert (plan.endpoint.name, plan.endpoint.container) == ("local", "http://127.0.0.1:8080")
    limits = plan.endpoint.limits
    assert (limits.invoke, limits.stream, limits.asynchronous) == (60, 480, 900)
    assert (limits.body, limits.small_body, limits.inline_body) == (26_214_400, 6_291_456, 128_000)
    assert (plan.probing.window, plan.probing.timeout) == (480, 2)


def refused(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "deploy", "local", *arguments], capture_output=True, text=True, timeout=PATIENCE
    )
    return done.returncode, done.stderr


def test_a_taken_port_is_said_before_a_container_is_started() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        status, said = refused(*ECHO, "--port", port)
    assert status == 1
    assert said == (
        f"lmi deploy: cannot listen on 127.0.0.1:{port}: Address already in use\n"
        "Choose another port with --port, or --port 0 for any free port.\n"
    )


def test_one_that_never_gets_ready_fails_as_on_sagemaker(loop: Loop) -> None:
    with loop.serving(Container(pings=503).app()) as url:
        status, said = refused("--port", "0", "--container", url, "--start-timeout", "0.3")
    assert status == 5
    assert "did not pass the ping health check within 0.3 s. Last ping: /ping responds with status 503." in said


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("m.gguf", "--container", "http://127.0.0.1:1"), 1, "--container cannot be combined with a model"),
        (("--container", "http://127.0.0.1:1", "-o", "a=b"), 1, "--container cannot be combined with -o"),
        (("-o", "nothing"), 1, "-o nothing: must be KEY=VALUE"),
        (("--adapter", "a=/nowhere"), 1, "--adapter a=/nowhere: must be NAME=PATH"),
        (("--part-bytes", "0"), 2, "must be a whole number from 1 to"),
        (("--port", "x"), 2, "must be a number from 0 to 65535"),
        (("--start-timeout", "-1"), 2, "must be a number of seconds"),
        (("--start-timeout", "0"), 2, "must be greater than 0"),
    ],
)
def test_arguments_that_make_no_sense(
    arguments: tuple[str, ...], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        found = main(["local", *arguments])
    except SystemExit as error:
        found = int(str(error.code))
    assert found == status
    assert said in capsys.readouterr().err


# -- adapters, loaded when the container is ready ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ending", "said"), [("cut", "the container did not respond"), ("bytes", "responded with status 500: \ufffd")]
)
def test_one_that_the_container_cannot_load(loop: Loop, ending: str, said: str) -> None:
    async def load(request: web.Request) -> web.Response:
        if ending == "cut":
            assert request.transport is not None
            request.transport.abort()
        return web.Response(status=500, body=b"\xff", content_type="text/plain")

    app = web.Application()
    app.router.add_post("/adapters", load)
    with loop.serving(app) as url, pytest.raises(Failed, match=f"adapter one: .*{said}"):
        asyncio.run(load_adapters(LocalPlan(Endpoint(url), adapters={"one": "/adapters/one"})))
