"""`lmi move`: each way in which it ends, and that nothing is called equal that was not compared."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy.spec.reading import read_spec
from handler.cli import main
from handler.core.child_processes import python
from proof.bench import processes
from proof.move.contract import NoForm, fault
from proof.move.local import local_server
from proof.move.run import CONFORM, UNCOMPARED, Findings
from proof.replay.exchange import Request, Response
from tests.deploy.public_endpoints import PUBLIC

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]  # each move starts three processes

TGI = PUBLIC["DeepSeek-R1-Distill-8B, TGI"]
PROMPT = {"inputs": "one two three", "parameters": {"max_new_tokens": 3}}
BODIES: list[dict[str, Any]] = [
    PROMPT,
    {**PROMPT, "stream": True},
    {"inputs": "one two", "parameters": {"max_new_tokens": 2, "details": True}},
    {"messages": [{"role": "user", "content": "one"}], "max_tokens": 2},
]
QUICK = ("--engine", "echo", "--rule", "ping.ready")  # the other rules of ping have limits of time


@pytest.fixture
def endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a TGI endpoint, in the working directory."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"Model": TGI.model, "EndpointConfig": TGI.endpoint_config}))
    return path


def write(path: Path, lines: list[Any]) -> str:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return str(path)


def found(*words: str) -> tuple[int, dict[str, Any]]:
    """The exit status, and the report with its lists as `name: text`."""
    status = main(["move", *words])
    report = json.loads(Path("lmi-move/move.json").read_text())
    assert report["status"] == status
    lists = ("proven", "failed", "not_proven")
    return status, {name: [f"{item['name']}: {item['text']}" for item in report[name]] for name in lists}


def has(items: list[str], text: str) -> bool:
    return any(text in item for item in items)


def test_bodies_alone_are_checked_and_never_called_equal(
    endpoint: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    requests = write(
        endpoint.with_name("requests.jsonl"), [*BODIES, {"path": "/v1/embeddings", "body": {"input": "x"}}]
    )
    for name, value in {"OPTION_DTYPE": "int3", "SERVING_JOB_QUEUE_SIZE": "nothing", "LMI_API_KEY": "k"}.items():
        monkeypatch.setenv(name, value)  # of another server: it does not reach this one
    status, report = found(endpoint.name, requests, *QUICK, "--rule", "key")
    assert (status, report["failed"]) == (0, [])
    assert has(report["not_proven"], "key.right (sagemaker): requires a key: LMI_API_KEY")
    assert [item.partition(":")[0] for item in report["proven"]] == ["adopt", "check", "start", "replay", "conform"]
    assert has(report["proven"], "4 of 4 responses have status 2xx and text, as the contract tgi demands")
    assert not has(report["proven"], "equal")
    assert has(report["not_proven"], "equality: no response of the old endpoint was compared")
    assert has(report["not_proven"], "model deepseek-ai/DeepSeek-R1-Distill-Llama-8B: replaced here by demo")
    assert has(report["not_proven"], "options.llm_engine=vllm: of the replaced model or its engine")
    assert has(report["not_proven"], "requests.jsonl:5: not checked: it has none of the fields inputs, messages")
    assert has(report["not_proven"], "other rules: only ping.ready, key was tested")
    shown = capfd.readouterr()
    assert "not proven:\n" in shown.out
    assert "$ lmi deploy adopt --file old.json" in shown.err
    assert Path("lmi-move/specification.yaml").read_text().startswith("# Written by `lmi deploy adopt")


def test_without_a_request_nothing_is_compared_and_an_earlier_specification_is_kept(
    endpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("lmi-move").mkdir()
    Path("lmi-move/specification.yaml").write_text("mine")
    assert main(["move", endpoint.name, *QUICK]) == 2
    assert "add --restart to replace it" in capfd.readouterr().err
    assert Path("lmi-move/specification.yaml").read_text() == "mine"
    assert main(["move", endpoint.name, *QUICK, "--restart", "--json"]) == 10
    report = json.loads(capfd.readouterr().out)
    assert report == json.loads(Path("lmi-move/move.json").read_text())
    assert {"name": "requests", "text": "no request was compared or checked"} in report["not_proven"]
    assert (report["status"], report["failed"]) == (10, [])


def answered(text: str, *, as_list: bool = True) -> dict[str, Any]:
    """A request with the response of a TGI endpoint."""
    body = [{"generated_text": text}] if as_list else {"generated_text": text}
    answer = {"status": 200, "content_type": "application/json", "body": body}
    return {"path": "/invocations", "body": PROMPT, "answer": answer}


def test_a_recording_is_compared_and_another_model_s_texts_are_not(endpoint: Path) -> None:
    lines = [answered("of another model"), {"path": "/x", "body": PROMPT}, answered("x", as_list=False)]
    status, report = found(endpoint.name, write(endpoint.with_name("recording.jsonl"), lines), *QUICK)
    assert status == 8
    assert has(report["proven"], "1 of 2 responses have the status, framing and fields of those of recorded")
    assert not has(report["proven"], "equal")
    (failed,) = report["failed"]
    assert failed.startswith("shape: 1 request: ")
    assert has(report["not_proven"], "texts: not compared, as demo replaces the model")
    assert has(report["not_proven"], "recording.jsonl:2: has no recorded response")


def test_with_the_endpoint_s_own_model_greedy_texts_are_compared_and_sampled_ones_are_not(endpoint: Path) -> None:
    content = json.loads(endpoint.read_text())
    content["Model"]["PrimaryContainer"]["Environment"]["HF_MODEL_ID"] = "demo"
    endpoint.write_text(json.dumps(content))
    sampled = {**PROMPT, "parameters": {"max_new_tokens": 3, "do_sample": True}}
    lines = [answered("one two three one two three"), answered("other"), {**answered("any"), "body": sampled}]
    status, report = found(endpoint.name, write(endpoint.with_name("recording.jsonl"), lines), *QUICK)
    assert status == 8
    assert has(report["proven"], "2 of 3 responses do not differ from those of recorded")
    assert has(report["failed"], "text: 1 request: text $[].generated_text")
    assert has(report["not_proven"], "texts of 1 sampled requests: sampled texts differ by themselves")


def test_the_first_step_that_fails_decides_the_status_and_all_are_named(endpoint: Path) -> None:
    requests = write(endpoint.with_name("requests.jsonl"), [{"inputs": "x", "parameters": {"max_new_tokens": -1}}])
    status, report = found(endpoint.name, requests, *QUICK, "--rule", "tgi.metrics")
    assert status == 8
    assert has(report["failed"], "requests.jsonl:1: status 422")
    assert has(report["failed"], "tgi.metrics (tgi): expected: the names tgi_")
    assert has(report["proven"], "conform: 1 of 1 rules of sagemaker")
    findings = Findings()
    findings.fail(CONFORM, ("rule", "text"))
    findings.fail(UNCOMPARED)
    assert findings.status == CONFORM == 9


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (["--engine", "vllm"], 6, "vllm"),
        (["--model", "owner/missing", "--engine", "openvino"], 7, "the server did not start"),
        (["--engine", "echo", "-o", "max_modl_len=3"], 2, ""),
        (["--container", "lmi", "--variant", "none"], 2, ""),
    ],
)
def test_each_step_has_its_own_exit_status(
    endpoint: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], status: int, text: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ended, report = found(endpoint.name, *words, "--restart")
    assert ended == status
    assert has(report["failed"], text) or not text
    assert report["not_proven"][-1] == "conform: not reached"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_that_was_just_started_has_an_owner(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    started = list[subprocess.Popen[str]]()

    class Interrupted(subprocess.Popen[str]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)
            signal.raise_signal(number)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    with pytest.raises(KeyboardInterrupt), processes.interrupted_by_sigterm(), processes.process(sleep):
        pytest.fail("it was interrupted before")
    assert started[0].poll() is not None


def test_a_swallowed_interrupt_comes_at_the_end() -> None:
    with pytest.raises(KeyboardInterrupt), processes.interrupted_by_sigterm(), contextlib.suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("during", [r"^\$ env .*SAGEMAKER_BIND_TO_PORT=(\d+)", r"^listening on http://127.0.0.1:(\d+)"])
def test_an_interrupted_move_leaves_no_server(endpoint: Path, during: str) -> None:
    """By SIGTERM, while the first server starts, and while `lmi conform` tests the second."""
    command = python("handler.cli:run", json.dumps(["move", endpoint.name, "--engine", "echo"]))
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as moving:
        assert moving.stderr is not None
        ports = list[str]()
        for line in moving.stderr:
            if match := re.search(during, line):
                ports.append(match[1])
                moving.terminate()
    assert moving.returncode == 130
    assert ports
    for port in ports:
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", int(port)))
    report = json.loads(Path("lmi-move/move.json").read_text())
    assert report["status"] == 130
    assert report["not_proven"][-1] == {"name": "conform", "text": "not reached"}


def test_an_option_that_the_engine_here_refuses_is_named(endpoint: Path) -> None:
    content = json.loads(endpoint.read_text())
    container = content["Model"]["PrimaryContainer"]
    container["Environment"] |= {"SM_NUM_GPUS": "4", "QUANTIZE": "awq"}
    endpoint.write_text(json.dumps(content))
    assert main(["deploy", "adopt", "--file", endpoint.name, "--name", "chat", "--output", "chat.yaml"]) == 0
    server = local_server(read_spec(Path("chat.yaml")), "demo", "openvino", ["max_rolling_batch_size=2"])
    assert server.problems == []
    replaced = [*map(": ".join, server.replaced)]
    assert has(replaced, "options.tensor_parallel_degree=4: omitted here: the engine openvino runs on one device")
    assert has(replaced, "options.quantize=awq: omitted here: must be one of int8, int4")
    assert "OPTION_MAX_ROLLING_BATCH_SIZE=2" in server.command(1234)
    assert server.profile() == "tgi"


def test_without_the_option_that_names_the_engine_the_schema_stays(endpoint: Path) -> None:
    tag = "djl-inference:0.36.0-lmi22.0.0-cu129"  # whose default is async mode, unless an option names an engine
    endpoint.write_text(json.dumps({"Model": PUBLIC["Phi-3-mini"].but(image=tag).model}))
    assert main(["deploy", "adopt", "--file", endpoint.name, "--name", "phi", "--output", "phi.yaml"]) == 0
    server = local_server(read_spec(Path("phi.yaml")), "demo", "echo", [])
    assert has([name for name, _ in server.replaced], "options.rolling_batch=vllm")
    assert "OPTION_ASYNC_MODE=false" in server.command(1234)
    assert server.profile() == "lmi-0.28"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["missing.json"], "missing.json: No such file"),
        (["old.json", "missing.jsonl"], "missing.jsonl"),
        (["old.json", "--against", "recorded"], "--against needs REQUESTS"),
        (["old.json", "requests.jsonl", "--against", "endpoint"], "needs the endpoint's name"),
    ],
)
def test_wrong_arguments(endpoint: Path, capfd: pytest.CaptureFixture[str], words: list[str], text: str) -> None:
    write(endpoint.with_name("requests.jsonl"), BODIES)
    assert main(["move", *words]) == 2
    assert text in capfd.readouterr().err
    assert not Path("lmi-move/specification.yaml").exists()


# -- the contract of one response --------------------------------------------------------------------------------------

EVENT = 'data:{"token":{"text":"a"}}\n\n'


@pytest.mark.parametrize(
    ("profile", "body", "media", "response", "wrong"),
    [
        ("tgi", PROMPT, "application/json", '[{"generated_text":"a"}]', ""),
        ("tgi", PROMPT, "application/json", '{"generated_text":"a"}', "an object, not a list"),
        ("lmi-0.28", PROMPT, "application/json", '{"generated_text":"a"}', ""),
        ("lmi-0.38", PROMPT, "application/json", '[{"generated_text":"a"}]', "a list, not an object"),
        ("lmi-0.28", BODIES[2], "application/json", '{"generated_text":"a"}', "no details"),
        ("lmi-0.28", BODIES[2], "application/json", '{"generated_text":"a","details":{}}', ""),
        ("tgi", PROMPT, "application/json", '[{"text":"a"}]', "no text"),
        ("tgi", PROMPT, "application/json", '{"error":"x"}', "an error with status 200"),
        ("tgi", PROMPT, "text/plain", "hello", "not a JSON object or list"),
        ("tgi", BODIES[1], "text/event-stream; charset=utf-8", EVENT, ""),
        ("lmi-0.28", BODIES[1], "text/event-stream", EVENT, "not application/jsonlines"),
        ("lmi-0.28", BODIES[1], "application/jsonlines", '{"token":{"text":"a"}}\n', ""),
        ("lmi-0.28", {**BODIES[3], "stream": True}, "application/jsonlines", '{"choices":[{"delta":{}}]}\n', ""),
        ("openai", {**BODIES[3], "stream": True}, "text/event-stream", 'data: {"choices":[{"delta":{}}]}\n\n', ""),
        ("openai", {**BODIES[3], "stream": True}, "text/event-stream", 'data: {"error":{}}\n\n', "an error with"),
        ("tgi", BODIES[1], "text/event-stream", 'data:{"x":1}\n\n', "no event with text"),
        ("openai", BODIES[3], "application/json", '{"choices":[{"message":{"content":"a"}}]}', ""),
        ("openai", BODIES[3], "application/json", '[{"generated_text":"a"}]', ""),
    ],
)
def test_the_form_of_a_response(profile: str, body: dict[str, Any], media: str, response: str, wrong: str) -> None:
    request = Request("1", "/invocations", {}, json.dumps(body).encode())
    found = fault(profile, request, Response(200, media, response.encode()))
    assert wrong in found
    assert bool(found) == bool(wrong)


def test_a_lost_response_and_a_refusal_are_faults() -> None:
    request = Request("1", "/invocations", {}, json.dumps(PROMPT).encode())
    assert fault("tgi", request, Response(0, "", b"", "cut")) == "no complete response: cut"
    assert fault("tgi", request, Response(422, "application/json", b"{}")) == "status 422"
    for body in (b"x", b"[]", b'{"input": "x"}'):
        with pytest.raises(NoForm):
            fault("tgi", request._replace(body=body), Response(200, "application/json", b"{}"))
