"""docs/troubleshooting.md: each message is the code's own."""

from __future__ import annotations

import ast
import json
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from deploy.diagnostics import causes
from handler.config.loader import read_config, read_server_config
from handler.container.arguments import find_model
from handler.core import errors
from handler.core.devices import GpuDriver, check_driver
from handler.core.errors import ConfigError
from handler.engines.process.supervisor import State
from handler.http.security import read_access
from handler.http.server import bind
from handler.protocols import registry
from handler.protocols.kernel.dialect import Dialect
from handler.serving.check import check
from handler.serving.engine import replica_places
from tests.app.server import serve
from tests.docs.blocks import ANY
from tests.docs.pages import ROOT, section
from tests.one_test import in_one_test
from tests.servers import LiveServer, http, options, wait_for
from tests.unit.config.gguf_files import SPLIT, WHOLE, gguf_file

TEXT = (ROOT / "docs" / "troubleshooting.md").read_text()
VAGUE = 10
"""Characters that a message has at least besides its values."""

FOREIGN = {
    "CUDA out of memory": "torch",
    "No available memory for the cache blocks": "vLLM",
    "larger than the available KV cache memory": "vLLM",
    "Backend Python process is stopped.": "DJL Serving: PyPredictor.java",
    "Batch output size mismatch": "DJL Serving: PyPredictor.java",
    "Inference Engine Failure": "DJL Serving: AsyncRequestManager.java",
    "cannot listen on …: Address already in use": "EADDRINUSE",
}
"""Messages of other projects, and of the system, by their sources."""

# -- the page ----------------------------------------------------------------------------------------------------------


def rows(title: str) -> list[list[str]]:
    """The cells of a section's tables, without their heads."""
    table = [line for line in section(TEXT, title).splitlines() if line.startswith("|")]
    heads = {index - 1 for index, line in enumerate(table) if line.startswith("|---")}
    kept = [line for index, line in enumerate(table) if index not in heads and not line.startswith("|---")]
    assert kept, f"no table under {title!r}"
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in kept]


def spans(cell: str) -> list[str]:
    return cell.split("`")[1::2]


SECTIONS = (
    "Ten messages that people meet",
    "The model's files",
    "Options, engine, container",
    "Refused: change the request",
    "Overload: retry later",
    "Failed: the engine or the server",
    "The engine is lost",
    "Under DJL Serving",
)
MESSAGES = [span for title in SECTIONS for cell, *_ in rows(title) for span in spans(cell) if " " in span]


def matches(message: str, text: str) -> bool:
    """Whether a text has the message, with anything in the place of `…`."""
    parts = message.split(ANY)
    return all(part in text for part in parts) and bool(re.search(".*?".join(map(re.escape, parts)), text, re.DOTALL))


# -- the code ----------------------------------------------------------------------------------------------------------


def texts(node: ast.AST) -> Iterator[str]:
    """The strings of a module, with `…` for the values in them."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else ANY for part in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):  # a docstring
        for child in ast.iter_child_nodes(node):
            yield from texts(child)


@cache
def literals() -> frozenset[str]:
    paths = [path for package in ("handler", "deploy") for path in (ROOT / package).rglob("*.py")]
    return frozenset(text for path in paths for text in texts(ast.parse(path.read_text())))


# -- what provokes a message -------------------------------------------------------------------------------------------


def files(directory: Path, *names: str) -> str:
    for name in names:
        (directory / name).write_text("{}")
    return str(directory)


def start(*given: str, model: str | None = None, engine: str = "echo") -> str:
    return "\n".join(map(str, check(read_server_config(model, engine, None, given))))


def incomplete(directory: Path) -> str:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    files(directory, "config.json", "tokenizer.json")
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return start(model=str(directory), engine="vllm")


def two_quantizations(directory: Path) -> str:
    for name in ("q4.gguf", "q8.gguf"):
        (directory / name).write_bytes(WHOLE)
    return start(model=str(directory), engine="openvino")


def in_parts(directory: Path) -> str:
    for number in (1, 2, 3):
        (directory / f"m-0000{number}-of-00003.gguf").write_bytes(gguf_file(SPLIT))
    return start(model=str(directory), engine="openvino")


def cut_short(directory: Path) -> str:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    files(directory, "config.json", "tokenizer.json")
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"1234")
    return start(model=str(directory), engine="vllm")


def refused(raise_it: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        raise_it()
    return str(caught.value)


def taken_port() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        return refused(lambda: bind("127.0.0.1", taken.getsockname()[1], 1))


def of_container(directory: Path, *names: str, **environ: str) -> str:
    (directory / "model").mkdir()
    files(directory / "model", *names)
    return refused(lambda: find_model({"SAGEMAKER_MODEL_PATH": str(directory / "model"), **environ}))


DRIVER = GpuDriver("535.1", (12, 2), 1)
STARTS: Mapping[str, Callable[[Path], str]] = {
    "a misspelt option": lambda tmp: start("option.tgi_compt=true"),
    "a wrong value": lambda tmp: start("option.dtype=int3"),
    "another engine's option": lambda tmp: start("option.load_format=dummy", engine="openvino"),
    "two engines": lambda tmp: start("option.rolling_batch=vllm", engine="openvino"),
    "dynamic batching": lambda tmp: start("batch_size=2", "option.enable_streaming=true"),
    "a wrong path": lambda tmp: start(model="/no/such/model", engine="openvino"),
    "an empty directory": lambda tmp: start(model=str(tmp), engine="openvino"),
    "two GGUF files": two_quantizations,
    "three parts": in_parts,
    "a missing shard": incomplete,
    "a short file": cut_short,
    "no tokenizer": lambda tmp: start(model=files(tmp, "config.json"), engine="vllm"),
    "GGUF with vllm": lambda tmp: start(model=files(tmp, "a.gguf"), engine="vllm"),
    "a task": lambda tmp: start("option.task=rerank", model=files(tmp, "config.json"), engine="openvino"),
    "an engine without the task": lambda tmp: start("option.task=rerank", engine="trtllm"),
    "no such engine here": lambda tmp: start(engine="trtllm"),
    "devices": lambda tmp: start("option.tensor_parallel_degree=2", engine="openvino"),
    "no URL": lambda tmp: start(engine="openai"),
    "no server at the URL": lambda tmp: start("option.base_url=http://127.0.0.1:9/v1", model=str(tmp), engine="openai"),
    "few GPUs": lambda tmp: refused(
        lambda: replica_places(read_config(overrides=["option.replicas=2"], environ={}).config, ["0"], [])
    ),
    "an old driver": lambda tmp: refused(lambda: check_driver(DRIVER, {"CUDA_VERSION": "13.0"}, tmp)),
    "no driver": lambda tmp: check_driver(None, {"CUDA_VERSION": "13.0"}, tmp).line,
    "a port in use": lambda tmp: taken_port(),
    "an address elsewhere": lambda tmp: refused(lambda: bind("203.0.113.1", 0, 1)),
    "keys": lambda tmp: refused(lambda: read_access(environ={"LMI_API_KEY": ""})),
    "no certificate": lambda tmp: refused(
        lambda: read_access(certfile=Path(files(tmp, "c.pem")) / "c.pem", environ={})
    ),
    "an empty container": of_container,
    "an archive": lambda tmp: of_container(tmp, "model.tar"),
    "two models": lambda tmp: of_container(tmp, "config.json", HF_MODEL_ID="gpt2"),
}

LIMITS = ("option.max_model_len=64", "max_request_size=1000", "option.echo_cues=true")
POST = partial(http.request, "POST")
REQUESTS: Mapping[str, Callable[[str], Any]] = {
    "not JSON": lambda url: POST(f"{url}/v1/completions", content=b'{"prompt": }'),
    "no body": lambda url: POST(f"{url}/v1/completions", content=b""),
    "no inputs": lambda url: POST(f"{url}/invocations", json={"inputz": "a"}),
    "a list": lambda url: POST(f"{url}/invocations", json={"inputs": ["a", "b"]}),
    "a long prompt": lambda url: POST(f"{url}/invocations", json={"inputs": "a " * 100}),
    "a long answer": lambda url: POST(f"{url}/invocations", json={"inputs": "a", "parameters": {"max_new_tokens": 99}}),
    "a range": lambda url: POST(f"{url}/invocations", json={"inputs": "a", "parameters": {"top_p": 2}}),
    "support": lambda url: POST(f"{url}/v1/completions", json={"prompt": "a", "guided_regex": "a"}),
    "a form": lambda url: POST(f"{url}/invocations", data={"inputs": "a"}),
    "a large body": lambda url: POST(f"{url}/invocations", json={"inputs": "a" * 2000}),
    "a host": lambda url: http.get(f"{url}/ping", headers={"host": "models.example.com"}),
    "an origin": lambda url: POST(
        f"{url}/invocations", content=b"{}", headers={"origin": "https://example.com", "content-type": "text/plain"}
    ),
    "a model": lambda url: http.get(f"{url}/v1/models/other"),
    "a route": lambda url: http.get(f"{url}/nowhere"),
    "another task": lambda url: POST(f"{url}/v1/embeddings", json={"input": "a"}),
    "a method": lambda url: http.get(f"{url}/invocations"),
    "an engine's failure": lambda url: POST(f"{url}/invocations", json={"inputs": "a <raise>"}),
}


REMEDIES: Mapping[str, str] = {
    "a wrong value": "must be one of auto, fp32",
    "two engines": "asks for vllm, but option.llm_engine=openvino",
    "dynamic batching": "needs batch_size=1, but batch_size=2",
    "a wrong path": "expected a .gguf file, an OpenVINO or Hugging Face model directory",
    "two GGUF files": "name one of them: q4.gguf, q8.gguf",
    "three parts": "merge them with `llama-gguf-split",
    "GGUF with vllm": "this engine serves Hugging Face model directories",
    "a task": "the model is a",
    "an engine without the task": "openvino, vllm compute embeddings or scores",
    "no such engine here": "to install it: pip install",
    "no URL": "for example -o option.base_url=http://host:8000/v1",
    "no server at the URL": "Start one, or set option.base_url_kind",
    "an old driver": "use an image with CUDA 12",
    "an address elsewhere": "203.0.113.1:0: Cannot assign requested address",
    "keys": "unset it to run the server without keys",
    "no certificate": "--ssl-certfile",
    "an empty container": "neither OPTION_MODEL_ID nor HF_MODEL_ID is set",
    "an archive": "set OPTION_MODEL_ID=",
    "two models": "remove one of the two",
    "no body": "the body is empty",
    "a list": "send one request per prompt, or use dynamic batching",
    "a range": "must be a number of at least 0 and at most 1",
    "a host": "start the server with --allow-host models.example.com",
    "an origin": "unless --allow-origin allows it",
    "a route": "please refer to API document",
    "another task": "/docs lists the routes that are",
    "a method": "Request method is not allowed",
}
"""Failures that the page omits, as their messages name the remedy or the fault: the words that do."""


@pytest.fixture(scope="module")
def limited() -> Iterator[LiveServer]:
    with serve("--engine", "echo", *options(*LIMITS)) as server:
        yield server


@pytest.mark.parametrize("name", STARTS)
def test_a_refused_start_is_on_the_page_or_names_its_remedy(name: str, tmp_path: Path) -> None:
    text = STARTS[name](tmp_path)
    assert (REMEDIES[name] in text) if name in REMEDIES else any(matches(message, text) for message in MESSAGES), text


@pytest.mark.parametrize("name", REQUESTS)
def test_a_failed_request_is_on_the_page_or_names_its_remedy(name: str, limited: LiveServer) -> None:
    answer = REQUESTS[name](limited.url)
    assert answer.status_code >= 400
    text = json.dumps(answer.json(), ensure_ascii=False)
    quoted = [json.dumps(message, ensure_ascii=False)[1:-1] for message in MESSAGES]
    assert (REMEDIES[name] in text) if name in REMEDIES else any(matches(message, text) for message in quoted), text


@in_one_test("message", MESSAGES)
def test_a_message_is_the_codes_own(message: str) -> None:
    assert len(message.replace(ANY, "")) >= VAGUE
    if message in FOREIGN:
        return
    assert any(matches(message, text) for text in literals()), f"nothing says {message!r}"


def test_a_message_that_nothing_says_is_noticed() -> None:
    assert not any(matches("the queue is fully booked", text) for text in literals())


# -- statuses, streams, states -----------------------------------------------------------------------------------------

PATHS: Mapping[str, Dialect] = {
    "/invocations": registry.INVOCATIONS["lmi"],
    "/generate": registry.ROUTES["/generate"],
    "/v1/chat/completions": registry.ROUTES["/v1/chat/completions"],
    "/v1/messages": registry.ROUTES["/v1/messages"],
    "/v2/models/model/generate": registry.ROUTES["/v2/models/{model}/generate"],
}
SENT: Mapping[str, tuple[dict[str, Any], errors.ServingError]] = {
    "not JSON": ({"content": b"{"}, errors.NotJson()),
    "large": ({"content": b" " * 2000}, errors.TooLarge()),
    "an encoding": ({"content": b"{}", "headers": {"content-encoding": "br"}}, errors.UnsupportedMedia()),
}


@pytest.mark.parametrize("cause", SENT)
def test_a_server_sends_the_statuses(cause: str, limited: LiveServer) -> None:
    """Those of docs/wire/README.md, by the dialects' own answers."""
    body, error = SENT[cause]
    sent = {**body, "headers": {"content-type": "application/json", **body.get("headers", {})}}
    statuses = {path: POST(limited.url + path, **sent).status_code for path in PATHS}
    assert statuses == {path: schema.errors.status(error) for path, schema in PATHS.items()}


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "LMI, JSON lines": ("/invocations", {"inputs": "a b", "parameters": {"max_new_tokens": 2000}}),
    "TGI's `/generate_stream`": ("/generate_stream", {"inputs": "a b", "parameters": {"max_new_tokens": 2000}}),
    "OpenAI": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a b"}]}),
    "Anthropic": ("/v1/messages", {"messages": [{"role": "user", "content": "a b"}], "max_tokens": 2000}),
    "Triton": ("/v2/models/model/generate_stream", {"text_input": "a b", "max_tokens": 2000}),
}


def test_each_dialects_broken_stream_ends_as_the_page_says() -> None:
    ends = dict(rows("Streams that end early")[: len(BODIES)])
    assert ends.keys() == BODIES.keys()
    cues = options("option.echo_cues=true", "option.echo_tokens_per_second=50")
    with serve("--engine", "echo", *cues) as server, ThreadPoolExecutor(len(BODIES)) as pool:
        ask = {name: (path, {**body, "stream": True}) for name, (path, body) in BODIES.items()}
        streams = {name: pool.submit(server.post, body, path) for name, (path, body) in ask.items()}
        begun = "lmi_time_to_first_token_seconds_count"
        wait_for(lambda: server.metric(begun) == len(BODIES), 5, "the streams do not run")
        server.post({"inputs": "<raise>"})
        for name, future in streams.items():
            answer = future.result()
            assert answer.status_code == 200
            end = r"\s*".join(".*?".join(map(re.escape, span.split(ANY))) for span in spans(ends[name]))
            assert re.search(rf"{end}\s*\Z", answer.text), f"{name}: {answer.text[-400:]}"


def test_every_state_of_ping_is_on_the_page() -> None:
    states = {state.value for state in State} | {"stopping"}
    assert {span for cell, *_ in rows("/ping") for span in spans(cell)} == states - {State.READY.value}


# -- deployments -------------------------------------------------------------------------------------------------------

AFTER = rows("After the start")


@in_one_test(("cell", "cure"), AFTER)
def test_a_text_of_aws_has_the_advice_of_the_code(cell: str, cure: str) -> None:
    recognized = [causes(span.replace(ANY, "10")) for span in spans(cell)]
    assert all(recognized)
    assert len({found[0].name for found in recognized}) == 1
    assert [field for field in spans(cure) if field not in recognized[0][0].says] == []
