"""What `adopt` writes for each origin, served here: a table of bodies is answered as the origin's contract says.

The facts are those of the servers' sources: TGI's router (sagemaker.rs, server.rs, lib.rs) by release, DJL Serving's
handlers by release, and OpenAI's API as AWS's images of vLLM, SGLang and llama.cpp serve it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from deploy.adopt.files import read_file, written
from deploy.adopt.specification import Wishes, adopted
from deploy.adopt.variables import Container, variables
from deploy.spec.options import settings_of
from deploy.spec.reading import read_spec
from tests.app.server import serve
from tests.servers import LiveServer

ECR = "763104351884.dkr.ecr.us-east-1.amazonaws.com"
WISHES = Wishes(name="chat", role="arn:aws:iam::123456789012:role/lmi")
MODEL = "Qwen/Qwen3-8B"
CHAT = {"messages": [{"role": "user", "content": "a b c"}], "max_tokens": 2, "temperature": 0}
JSON, EVENTS, LINES = "application/json", "text/event-stream", "application/jsonlines"


class Answer(NamedTuple):
    """A response: its status, content type and JSON documents. A stream's are those of its lines, `[DONE]` included."""

    status: int
    kind: str
    documents: list[Any]

    @property
    def only(self) -> Any:
        (document,) = self.documents
        return document


def ask(server: LiveServer, body: Mapping[str, Any]) -> Answer:
    found: httpx.Response = server.post(body)
    kind = found.headers["content-type"].partition(";")[0]
    lines = [found.text] if kind == JSON else [line.removeprefix("data: ") for line in found.text.split("\n")]
    documents = [line if line == "[DONE]" else json.loads(line) for line in lines if line not in ("", ":")]
    return Answer(found.status_code, kind, documents)


def environment(directory: Path, image: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the deployment that `adopt` writes for a model's request, without the model itself."""
    file = directory / "model.json"
    container = {"Image": f"{ECR}/{image}", "Environment": dict(variables)}
    file.write_text(json.dumps({"ModelName": "m", "PrimaryContainer": container}))
    (directory / "chat.yaml").write_text(written(adopted(read_file(file, 1), WISHES), "lmi deploy adopt"))
    spec = read_spec(directory / "chat.yaml")
    length = {} if spec.model.context is None else {"OPTION_MAX_MODEL_LEN": str(spec.model.context)}
    return {**length, **{setting.name: setting.value for setting in settings_of(spec.options, spec.environment)}}


# -- TGI by release ----------------------------------------------------------------------------------------------------


class Tgi(NamedTuple):
    """A release of TGI: its image, and the number of new tokens where a request of three tokens sets none."""

    image: str
    default: int


TGI = {
    "0.9.3": Tgi("huggingface-pytorch-tgi-inference:2.0.1-tgi0.9.3-gpu-py39-cu118-ubuntu20.04", 20),
    "1.1.0": Tgi("huggingface-pytorch-tgi-inference:2.0.1-tgi1.1.0-gpu-py39-cu118-ubuntu20.04", 20),
    "2.3.1": Tgi("huggingface-pytorch-tgi-inference:2.4.0-tgi2.3.1-gpu-py311-cu124-ubuntu22.04", 100),
    "3.3.6": Tgi("huggingface-pytorch-tgi-inference:2.7.0-tgi3.3.6-gpu-py311-cu124-ubuntu22.04", 150 - 3),
    "none": Tgi("text-generation-inference:latest", 150 - 3),
}
TGI_VARIABLES = {"HF_MODEL_ID": MODEL, "MAX_INPUT_LENGTH": "100", "MAX_TOTAL_TOKENS": "150"}


@pytest.fixture(scope="module", params=[*TGI])
def of_tgi(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LiveServer, Tgi]]:
    release = TGI[request.param]
    enabled = {"MESSAGES_API_ENABLED": "true"} if request.param == "2.3.1" else {}
    env = environment(tmp_path_factory.mktemp("tgi"), release.image, {**TGI_VARIABLES, **enabled})
    with serve("--engine", "echo", env=env) as server:
        yield server, release


def test_tgi_answers_prompts_with_the_prompt_and_details_on_request_only(of_tgi: tuple[LiveServer, Tgi]) -> None:
    server, release = of_tgi
    text = {"inputs": "one two three"}
    assert ask(server, {**text, "parameters": {"max_new_tokens": 2}}) == (
        200,
        JSON,
        [[{"generated_text": "one two three one two"}]],
    )
    for full, before in ((True, "one two three"), (False, "")):
        ((item,),) = ask(server, {**text, "parameters": {"max_new_tokens": 2, "return_full_text": full}}).documents
        assert item == {"generated_text": f"{before} one two"}
    ((detailed,),) = ask(server, {**text, "parameters": {"max_new_tokens": 2, "details": True}}).documents
    assert detailed["generated_text"] == "one two three one two"
    assert detailed["details"].keys() == {"finish_reason", "generated_tokens", "seed", "prefill", "tokens"}
    assert detailed["details"]["tokens"][0].keys() == {"id", "text", "logprob", "special"}
    ((unlimited,),) = ask(server, {**text, "parameters": {"details": True}}).documents
    assert unlimited["details"]["generated_tokens"] == release.default


def test_tgi_streams_events(of_tgi: tuple[LiveServer, Tgi]) -> None:
    server, _ = of_tgi
    status, kind, (first, last) = ask(
        server, {"inputs": "one two", "parameters": {"max_new_tokens": 2}, "stream": True}
    )
    assert (status, kind, first["generated_text"], first["details"]) == (200, EVENTS, None, None)
    assert (last["generated_text"], last["details"]) == ("one two one two", None)
    assert first["token"].keys() == {"id", "text", "logprob", "special"}
    *_, end = ask(
        server, {"inputs": "one", "parameters": {"max_new_tokens": 1, "details": True}, "stream": True}
    ).documents
    assert {"finish_reason", "generated_tokens", "seed"} <= end["details"].keys()


TGI_REFUSED: dict[str, Any] = {
    "range": {"inputs": "one", "parameters": {"top_p": 1.0}},
    "zero": {"inputs": "one", "parameters": {"temperature": 0}},
    "length": {"inputs": "one two", "parameters": {"max_new_tokens": 149}},
    "no sampling": {"inputs": "one", "parameters": {"best_of": 2}},
    "type": {"inputs": ["one"]},
    "nothing": {"text": "one"},
    "chat": {**CHAT, "top_p": 5},
    "chat's type": {"messages": 5},
    "completion": {"prompt": "a", "top_p": 5},
}


def test_tgi_refuses_with_422_and_its_kind(of_tgi: tuple[LiveServer, Tgi]) -> None:
    for name, body in TGI_REFUSED.items():
        found = ask(of_tgi[0], body)
        assert (found.status, found.kind, found.only.keys()) == (422, JSON, {"error", "error_type"}), name
        assert found.only["error_type"] == "validation"
    streamed = ask(of_tgi[0], {"inputs": "one", "parameters": {"top_p": 1.0}, "stream": True})
    assert (streamed.status, streamed.kind, streamed.only["error_type"]) == (200, EVENTS, "validation")


def test_tgi_answers_chats_as_openai_by_the_models_name(of_tgi: tuple[LiveServer, Tgi]) -> None:
    server, _ = of_tgi
    for sent, told in (({}, MODEL), ({"model": "tgi"}, MODEL), ({"model": "my-model"}, "my-model")):
        whole = ask(server, {**CHAT, **sent})
        assert (whole.status, whole.only["object"], whole.only["model"]) == (200, "chat.completion", told)
        *chunks, done = (streamed := ask(server, {**CHAT, **sent, "stream": True})).documents
        assert (streamed.kind, done) == (EVENTS, "[DONE]")
        assert {(chunk["object"], chunk["model"]) for chunk in chunks} == {("chat.completion.chunk", told)}
    completion = ask(server, {"prompt": "a b", "max_tokens": 2})
    assert (completion.only["object"], completion.only["model"]) == ("text_completion", MODEL)


def test_tgi_2_ends_chats_after_100_tokens(of_tgi: tuple[LiveServer, Tgi]) -> None:
    server, release = of_tgi
    usage = ask(server, {"messages": CHAT["messages"]}).only["usage"]
    assert usage["completion_tokens"] == min(release.default, 150 - usage["prompt_tokens"])


# -- LMI by release ----------------------------------------------------------------------------------------------------


LMI = {
    "0.28": "djl-inference:0.28.0-lmi10.0.0-cu124",
    "0.31": "djl-inference:0.31.0-lmi13.0.0-cu124",
    "0.36": "djl-inference:0.36.0-lmi18.0.0-cu128",
}


@pytest.fixture(scope="module", params=[*LMI])
def of_lmi(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LiveServer, bool]]:
    """The server, and whether the release has the async mode by default."""
    env = environment(tmp_path_factory.mktemp("lmi"), LMI[request.param], {"HF_MODEL_ID": MODEL})
    with serve("--engine", "echo", env=env) as server:
        yield server, request.param == "0.36"


def test_lmi_answers_prompts_without_the_prompt_and_30_tokens(of_lmi: tuple[LiveServer, bool]) -> None:
    server, is_async = of_lmi
    body = {"inputs": "one two three", "parameters": {"max_new_tokens": 2}}
    assert ask(server, body) == (200, JSON, [{"generated_text": " one two"}])
    status, kind, documents = ask(server, {**body, "stream": True})
    assert (status, kind, len(documents)) == (200, LINES, 2)
    assert ("index" in documents[0]) == is_async
    text = ask(server, {"inputs": "one"}).only["generated_text"]
    assert len(text.split()) == 30


def test_lmi_refuses_with_424(of_lmi: tuple[LiveServer, bool]) -> None:
    found = ask(of_lmi[0], {"inputs": "one", "parameters": {"seed": "abc"}})
    assert (found.status, {"error", "code"} <= found.only.keys()) == (424, True)


def test_lmi_streams_chats_as_lines(of_lmi: tuple[LiveServer, bool]) -> None:
    server, is_async = of_lmi
    assert ask(server, CHAT).only["object"] == "chat.completion"
    status, kind, documents = ask(server, {**CHAT, "stream": True})
    assert (status, kind, "[DONE]" in documents) == (200, LINES, False)
    assert ask(server, CHAT).only.get("model") == ("lmi" if is_async else None)


# -- AWS's images with OpenAI's API ------------------------------------------------------------------------------------


AWS: dict[str, tuple[str, dict[str, str], str | None]] = {
    "vllm": ("vllm:0.11.0-gpu-py312", {"SM_VLLM_MODEL": MODEL}, MODEL),
    "vllm, hub": ("huggingface-vllm:0.11.0-gpu", {"HF_MODEL_ID": MODEL}, MODEL),
    "vllm, named": ("vllm:0.11.0-gpu", {"SM_VLLM_MODEL": MODEL, "SM_VLLM_SERVED_MODEL_NAME": "qwen"}, "qwen"),
    "sglang": ("sglang:0.5.5-gpu-py312", {"SM_SGLANG_MODEL_PATH": MODEL}, MODEL),
    "llama.cpp": ("llama-cpp:server-sagemaker-cpu-v1", {"SM_LLAMA_CPP_MODEL": MODEL}, None),
}


@pytest.fixture(scope="module", params=[*AWS])
def of_aws(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LiveServer, Any]]:
    image, variables, name = AWS[request.param]
    env = environment(tmp_path_factory.mktemp("aws"), image, variables)
    with serve("--engine", "echo", env=env) as server:
        yield server, name


def test_aws_s_images_answer_as_openai(of_aws: tuple[LiveServer, str | None]) -> None:
    server, name = of_aws
    whole = ask(server, CHAT)
    assert (whole.status, whole.only["object"]) == (200, "chat.completion")
    assert name is None or whole.only["model"] == name
    *chunks, done = (streamed := ask(server, {**CHAT, "stream": True})).documents
    assert (streamed.kind, done, chunks[0]["object"]) == (EVENTS, "[DONE]", "chat.completion.chunk")
    for wrong in ({**CHAT, "top_p": 5}, {"text": "a"}):
        refused = ask(server, wrong)
        assert (refused.status, refused.only["error"].keys()) == (400, {"message", "type", "param", "code"})


# -- Triton ------------------------------------------------------------------------------------------------------------


def tensor(name: str, datatype: str, *values: object) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": [1, len(values)], "data": list(values)}


def by_generate(server: LiveServer) -> None:
    found = ask(server, {"text_input": "one two", "max_tokens": 2})
    assert found.status == 200
    assert {"model_name", "model_version", "text_output"} <= found.only.keys()


def by_tensors(server: LiveServer) -> None:
    body = {"inputs": [tensor("text_input", "BYTES", "one two"), tensor("max_tokens", "INT32", 2)]}
    (output,) = ask(server, body).only["outputs"]
    assert (output["name"], output["datatype"]) == ("text_output", "BYTES")
    refused = ask(server, {"inputs": [tensor("text_input", "BYTES", "one"), tensor("max_tokens", "BYTES", "x")]})
    assert (refused.status, refused.only.keys()) == (400, {"error"})


@pytest.mark.parametrize("does", [by_generate, by_tensors])
def test_triton_answers_its_tensors_and_its_generate_extension(does: Callable[[LiveServer], None]) -> None:
    found = variables({}, Container("triton", "vllm"))
    env = {setting.name: setting.value for setting in settings_of(found.options, found.environment)}
    with serve("--engine", "echo", env=env) as server:
        does(server)
