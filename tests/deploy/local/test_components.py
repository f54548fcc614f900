"""`lmi deploy local FILE`: components side by side, each a process group with a model of its own."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from botocore.exceptions import ClientError

from deploy.cli import local as local_command
from deploy.cli.main import main
from deploy.emulator.serving import LocalPlan
from deploy.emulator.specification import Machine, started, this_machine
from deploy.errors import SpecError
from deploy.spec import Spec
from handler.core.devices import GpuDriver
from tests.deploy.local.servers import LocalProcess, client, local_process
from tests.process_tree import alive, descendants
from tests.servers import wait_for
from tests.user_files import write_adapter

ECHOED = b'{"generated_text":" a b c d'
IMAGE = {"repository": "lmi-handler", "tag": "x-cu130"}
GIVEN: dict[str, Any] = {
    "name": "both",
    "role": "arn:aws:iam::111122223333:role/endpoint",
    "image": IMAGE,
    "options": {"llm_engine": "echo"},
}


def model(directory: Path, *options: str) -> Path:
    """A model's directory, whose own options tell in the answers that it is this one."""
    directory.mkdir(parents=True)
    (directory / "serving.properties").write_text("\n".join(["option.llm_engine=echo", *options]))
    return directory


def components(directory: Path) -> list[dict[str, Any]]:
    plain, list_of_tgi = model(directory / "plain"), model(directory / "tgi", "option.tgi_compat=true")
    return [
        {"name": "plain", "model": {"path": str(plain), "upload": "s3://models/plain/"}, "copies": 2},
        {"name": "tgi", "model": {"path": str(list_of_tgi), "upload": "s3://models/tgi/"}},
        {"name": "options", "model": {"id": "demo"}, "options": {"max_model_len": 6}, "environment": {"LMI_LOG": "x"}},
        {"name": "idle", "model": {"id": "demo"}, "copies": 0},
    ]


def written(directory: Path, content: dict[str, Any]) -> str:
    path = directory / "spec.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalProcess]:
    directory = tmp_path_factory.mktemp("side-by-side")
    path = written(directory, {**GIVEN, "components": components(directory)})
    with local_process(path) as process:
        yield process


def ask(local: LocalProcess, component: str, text: str = "a b c d", **parameters: Any) -> bytes:
    body = json.dumps({"inputs": text, "parameters": parameters})
    answer = client(local.url).invoke_endpoint(
        EndpointName="both", ContentType="application/json", Body=body, InferenceComponentName=component
    )
    return bytes(answer["Body"].read())


def test_each_answers_with_its_own_model_and_options(local: LocalProcess) -> None:
    assert ask(local, "plain").startswith(ECHOED)
    assert ask(local, "tgi").startswith(b'[{"generated_text"')
    with pytest.raises(ClientError, match="maximum context length is 6 tokens"):
        ask(local, "options")
    assert json.loads(ask(local, "options", max_new_tokens=2)) == {"generated_text": " a b"}
    assert 'InferenceComponentName="plain"' in local.out
    assert "component plain: only one of 2 copies runs here." in local.log
    assert "plain | " in local.log
    assert "tgi | " in local.log


def test_each_streams(local: LocalProcess) -> None:
    for component, start in (("plain", b'{"'), ("tgi", b"data:")):
        body = json.dumps({"inputs": "a b c d", "stream": True})
        answer = client(local.url).invoke_endpoint_with_response_stream(
            EndpointName="both", ContentType="application/json", Body=body, InferenceComponentName=component
        )
        parts = [part["PayloadPart"]["Bytes"] for part in answer["Body"]]
        assert b"".join(parts).startswith(start), component


def test_each_is_a_process_group(local: LocalProcess) -> None:
    groups = {os.getpgid(pid) for pid in descendants(local.process.pid) if alive(pid)}
    assert len(groups - {os.getpgid(local.process.pid)}) == 3, "one for each component with copies"


@pytest.mark.parametrize(
    ("component", "code", "message"),
    [
        ("nobody", "ValidationError", "Inference Component nobody of endpoint both not found"),
        ("idle", "ValidationError", "Inference Component has no capacity"),
        (None, "ValidationError", "header is required .* Endpoint both has: plain, tgi, options, idle"),
    ],
)
def test_what_is_not_there_is_refused_by_name(
    local: LocalProcess, component: str | None, code: str, message: str
) -> None:
    named = {"InferenceComponentName": component} if component is not None else {}
    for call in ("invoke_endpoint", "invoke_endpoint_with_response_stream"):
        with pytest.raises(ClientError, match=message) as raised:
            getattr(client(local.url), call)(EndpointName="both", Body=b"{}", **named)
        assert raised.value.response["Error"]["Code"] == code
    assert ask(local, "plain").startswith(ECHOED)


def test_a_request_that_is_wrong_at_one_names_its_log(local: LocalProcess) -> None:
    with pytest.raises(ClientError) as raised:
        ask(local, "plain", temperature=-1)
    assert raised.value.response["OriginalStatusCode"] == 424
    assert "log-group:/aws/sagemaker/InferenceComponents/plain" in raised.value.response["LogStreamArn"]


def test_one_that_dies_leaves_its_neighbours_in_service(tmp_path: Path) -> None:
    path = written(tmp_path, {**GIVEN, "model": {"id": "demo"}, "components": [{"name": "a"}, {"name": "b"}]})
    with local_process(path) as local:
        processes = descendants(local.process.pid)
        dying = next(pid for pid in processes if named(pid, local, "a"))
        os.kill(dying, signal.SIGKILL)
        local.wait_said("inference component a: the container was killed by SIGKILL")
        with pytest.raises(ClientError, match="No copy of Inference Component a passes") as raised:
            ask(local, "a")
        assert raised.value.response["Error"]["Code"] == "ServiceUnavailable"
        assert ask(local, "b").startswith(ECHOED)
        assert local.end(signal.SIGTERM) == 0
        wait_for(lambda: not any(map(alive, processes)), 10, f"left behind: {processes}")


def named(pid: int, local: LocalProcess, component: str) -> bool:
    """Whether a process is the container of a component: the port stands in the log's line of it."""
    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    ports = [item.partition(b"=")[2].decode() for item in environment if item.startswith(b"SAGEMAKER_BIND_TO_PORT=")]
    lines = [line for line in local.log.splitlines() if line.startswith(f"{component} | ")]
    return bool(ports) and os.getpgid(pid) == pid and any(f"port {ports[0]}" in line for line in lines)


def test_one_that_does_not_start_ends_all_with_its_name(tmp_path: Path) -> None:
    bad = {"name": "bad", "model": {"id": str(tmp_path / "none.gguf")}, "options": {"llm_engine": "openvino"}}
    path = written(tmp_path, {**GIVEN, "model": {"id": "demo"}, "components": [{"name": "good"}, bad]})
    local = LocalProcess(path)
    assert local.wait() == 5
    assert "lmi deploy: inference component bad: the container exited with status 2" in local.log
    assert local.out == ""


def test_adapters_are_those_of_their_component(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "sql")
    own = [
        {"name": "with", "adapters": [{"name": "sql", "artifact": "s3://models/sql.tar.gz"}]},
        {"name": "without", "model": {"id": "demo"}},
    ]
    path = written(tmp_path, {**GIVEN, "model": {"id": "demo"}, "components": own})
    with local_process(path, "--adapter", f"sql={adapter}") as local:
        assert ask(local, "sql", max_new_tokens=1) != ask(local, "with", max_new_tokens=1)
        assert ask(local, "without", max_new_tokens=1) == ask(local, "with", max_new_tokens=1)


# What is refused before anything is started.


@pytest.mark.parametrize(
    ("content", "arguments", "said"),
    [
        (
            {"components": [{"name": "a", "model": {"id": "demo"}}, {"name": "b"}]},
            [],
            "components.1.model: set exactly one of id, s3, path",
        ),
        (
            {"model": {"id": "demo"}, "components": [{"name": "a"}, {"name": "a"}]},
            [],
            "components: duplicate names: a",
        ),
        (
            {"model": {"id": "demo"}, "components": [{"name": "a"}, {"name": "b", "memory_mb": 10**9}]},
            [],
            "component b: memory_mb: 1000000000 MB are requested, but only ",
        ),
        (
            {"model": {"id": "demo"}, "components": [{"name": "a"}, {"name": "b", "model": {"s3": "s3://models/x/"}}]},
            [],
            "component b: model.s3: s3://models/x/ is not on this machine",
        ),
        (
            {"model": {"path": "/nowhere", "upload": "s3://models/x/"}, "components": [{"name": "a"}]},
            [],
            "component a: model.path: /nowhere is not a directory on this machine",
        ),
        (
            {"model": {"id": "demo"}, "components": [{"name": "a"}, {"name": "b", "options": {"max_tokens": "x"}}]},
            [],
            "component b: options.max_tokens: ",
        ),
        (
            {
                "model": {"id": "demo"},
                "components": [{"name": "a", "adapters": [{"name": "sql", "artifact": "s3://models/sql.tar.gz"}]}],
            },
            [],
            "component a: adapters: sql is in S3",
        ),
        ({"model": {"id": "demo"}, "components": [{"name": "a", "copies": 0}]}, [], "components[].copies: all comp"),
        ({"model": {"id": "demo"}}, ["--container-port", "1"], "--container-port applies to one container"),
    ],
)
def test_bad_input_is_refused_by_name(
    content: dict[str, Any], arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(local_command, "serve", None)
    monkeypatch.chdir(tmp_path)
    assert main(["local", written(tmp_path, {**GIVEN, **content}), *arguments]) in (1, 2)
    assert said in capsys.readouterr().err


def test_gpus_are_given_to_one_component_each() -> None:
    ports = iter([1, 1, 2, 3])
    spec = Spec.model_validate(
        {
            **GIVEN,
            "model": {"id": "org/model"},
            "options": {"llm_engine": "vllm"},
            "components": [{"name": "a", "accelerators": 2}, {"name": "b"}, {"name": "c", "copies": 0}],
        }
    )

    def given(*gpus: str) -> dict[str, str | None]:
        commands = started(spec, lambda: next(ports), machine=Machine(10**6, gpus), adapters={}).commands
        return {name: one.environment.get("CUDA_VISIBLE_DEVICES") for name, one in commands.items()}

    assert given("0", "1", "GPU-x", "3") == {"a": "0,1", "b": "GPU-x"}
    with pytest.raises(
        SpecError, match="component b: accelerators: 1 GPUs are requested, but only 0 of this machine's 2 GPUs are left"
    ):
        given("0", "1")


def test_the_gpus_are_those_of_the_driver_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.emulator.specification.read_driver", lambda: GpuDriver("580.1", (13, 0), 2))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-x, 1,-1,0")
    assert this_machine().gpus == ("GPU-x", "1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert this_machine().gpus == ("0", "1")
    monkeypatch.setattr("deploy.emulator.specification.read_driver", lambda: None)
    assert this_machine().gpus == ()


def test_one_without_components_is_started_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[LocalPlan] = []

    async def taken(plan: LocalPlan, **more: object) -> int:
        plans.append(plan)
        return 0

    monkeypatch.setattr(local_command, "serve", taken)
    content = {**GIVEN, "model": {"id": "demo", "context": 64}, "options": {"max_rolling_batch_size": 3}}
    assert main(["local", written(tmp_path, content), "--engine", "echo", "-o", "option.max_tokens=5"]) == 0
    [plan] = plans
    variables = plan.commands[""].environment
    assert (plan.endpoint.name, dict(plan.endpoint.components)) == ("both", {})
    assert plan.endpoint.container == plan.commands[""].url
    expected = {"OPTION_LLM_ENGINE": "echo", "OPTION_MAX_TOKENS": "5", "OPTION_MAX_ROLLING_BATCH_SIZE": "3"}
    expected |= {"OPTION_MODEL_ID": "demo", "OPTION_MAX_MODEL_LEN": "64"}
    assert expected.items() <= variables.items()
