"""vLLM's routes beside /v1: tokens and text, scores of pairs, the version, the load, LoRA adapters by its names."""

from __future__ import annotations

import base64
import json
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import handler
from handler.config.model_files import tokenizer_config
from tests.app.server import serve
from tests.doubles import tiny
from tests.servers import LiveServer, ask, http, options, wait_for
from tests.user_files import write_adapter

LORA = ("--engine", "echo", *options("option.enable_lora=true", "option.adapters_root=/"))
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server with a tokenizer of its own."""
    directory = tiny.make(tmp_path_factory.mktemp("tiny"))
    with serve("--engine", "echo", *options(f"option.echo_tokenizer={directory}")) as server:
        server.wait_ready()
        yield server


def refusal(server: LiveServer, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    error: dict[str, Any] = ask(server, path, body, status)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == status
    return error


# -- tokens --------------------------------------------------------------------------------------------------------


def test_tokens_of_a_prompt_and_back(tokenizer: LiveServer) -> None:
    found = ask(tokenizer, "/tokenize", {"model": "model", "prompt": "The capital of France"})
    info = http.get(tokenizer.url + "/info").json()
    assert found == {
        "count": len(found["tokens"]), "max_model_len": info["max_total_tokens"], "tokens": found["tokens"],
        "token_strs": None,
    }  # fmt: skip
    usage = ask(tokenizer, "/v1/completions", {"prompt": "The capital of France", "max_tokens": 1})["usage"]
    assert found["count"] == usage["prompt_tokens"] > 1
    assert ask(tokenizer, "/detokenize", {"tokens": found["tokens"]})["prompt"] == "The capital of France"
    assert ask(tokenizer, "/detokenize", {"model": "model", "tokens": []}) == {"prompt": "", "content": ""}
    more = ask(tokenizer, "/tokenize", {"prompt": "The capital", "return_token_strs": True, "add_special_tokens": True})
    assert "".join(more["token_strs"]) == "The capital"
    assert len(more["token_strs"]) == more["count"]
    bare = ask(tokenizer, "/tokenize", {"prompt": "The capital of France", "add_special_tokens": False})
    own = ask(tokenizer, "/tokenize", {"content": "The capital of France"})
    assert (bare["tokens"], bare["count"]) == (own["tokens"], len(own["tokens"]))


@pytest.mark.parametrize(
    "more",
    [{}, {"tools": [TOOL]}, {"tools": []}, {"add_generation_prompt": False}, {"chat_template_kwargs": {"a": 1}}],
)
def test_tokens_of_a_chat_are_those_that_it_is_answered_with(tokenizer: LiveServer, more: dict[str, Any]) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], **more}
    found = ask(tokenizer, "/tokenize", {**chat, "return_token_strs": True})
    asked = {name: value for name, value in chat.items() if value != []}
    usage = ask(tokenizer, "/v1/chat/completions", {**asked, "max_tokens": 1})["usage"]
    assert found["count"] == len(found["tokens"]) == usage["prompt_tokens"]
    text = "".join(found["token_strs"])
    assert ask(tokenizer, "/detokenize", {"tokens": found["tokens"]}) == {"prompt": text, "content": text}
    assert "hi" in text


def test_the_last_message_may_be_continued(tokenizer: LiveServer) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello"}]}
    found = ask(tokenizer, "/tokenize", {**chat, "continue_final_message": True, "return_token_strs": True})
    assert "".join(found["token_strs"]).endswith("Hello")
    both = {**chat, "continue_final_message": True, "add_generation_prompt": True}
    assert "add_generation_prompt" in refusal(tokenizer, "/tokenize", both)["message"]


def test_tgis_body_is_answered_as_tgi_does(tokenizer: LiveServer) -> None:
    both = ask(tokenizer, "/tokenize", {"inputs": "hi", "prompt": "other"})
    assert both == ask(tokenizer, "/tokenize", {"inputs": "hi"})
    assert both[0].keys() == {"id", "text", "start", "stop"}
    assert ask(tokenizer, "/tokenize", {}, 422)["error_type"] == "validation"


def test_names_that_mean_nothing_are_told(tokenizer: LiveServer) -> None:
    for body in ({"prompt": "a", "top_logprobs": 1}, {"messages": [{"role": "user", "content": "a"}], "other": 1}):
        found = http.post(tokenizer.url + "/tokenize", json=body)
        assert found.headers["x-lmi-ignored-parameters"] == list(body)[1]


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "words"),
    [
        ("/tokenize", {"prompt": ["a", "b"]}, 400, "BadRequestError", "'prompt' must be a non-empty string"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "NotFoundError", "other"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 7}, 400, "BadRequestError", "add_special_tokens=7"),
        ("/tokenize", {"prompt": "a", "return_token_strs": 3}, 400, "BadRequestError", "return_token_strs=3"),
        ("/tokenize", {"messages": []}, 400, "BadRequestError", "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "chat_template": "x"}, 400, "BadRequestError",
         'chat_template="x"'),
        ("/detokenize", {}, 400, "BadRequestError", "'tokens' must be a list of token ids"),
        ("/detokenize", [], 400, "BadRequestError", "the body must be a JSON object with 'tokens'"),
        ("/detokenize", {"tokens": [1, 1 << 40]}, 400, "BadRequestError", "'tokens[1]' must be a token id from 0 to"),
        ("/detokenize", {"tokens": [-1]}, 400, "BadRequestError", "'tokens[0]' must be a token id from 0 to"),
        ("/detokenize", {"tokens": [1.5]}, 400, "BadRequestError", "'tokens[0]' must be a token id from 0 to"),
        ("/detokenize", {"tokens": ["a"]}, 400, "BadRequestError", "'tokens[0]' must be a token id from 0 to"),
        ("/detokenize", {"tokens": [0], "model": "other"}, 404, "NotFoundError", "other"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_in_vllms_form(
    tokenizer: LiveServer, path: str, body: Any, status: int, kind: str, words: str
) -> None:
    error = refusal(tokenizer, path, body, status)
    assert (error["type"], words in error["message"]) == (kind, True), error


def test_too_many_ids_are_not_decoded(tokenizer: LiveServer) -> None:
    assert "the maximum is 1048576" in refusal(tokenizer, "/detokenize", {"tokens": [0] * ((1 << 20) + 1)})["message"]


def test_an_engine_without_a_vocabulary_has_no_text(echo_server: LiveServer) -> None:
    assert "no vocabulary to decode them" in refusal(echo_server, "/detokenize", {"tokens": [0]})["message"]


# -- state ---------------------------------------------------------------------------------------------------------


def test_the_version_and_the_load() -> None:
    with serve("--engine", "echo", *options("option.echo_tokens_per_second=20")) as server:
        server.wait_ready()
        assert http.get(server.url + "/version").json() == {"version": handler.__version__}
        assert http.get(server.url + "/load").json() == {"server_load": 0}
        body = {"prompt": "a " * 40, "max_tokens": 40}
        asking = threading.Thread(target=http.post, args=(server.url + "/v1/completions",), kwargs={"json": body})
        asking.start()
        wait_for(lambda: http.get(server.url + "/load").json() == {"server_load": 1}, 5, "no load")
        asking.join()
        assert http.get(server.url + "/load").json() == {"server_load": 0}


# -- scores --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["rerank", "text-embedding"])
def scoring(request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    with serve("--engine", "echo", *options(f"option.task={request.param}")) as server:
        server.wait_ready()
        yield server


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items")]
)
def test_pairs_are_scored_in_their_order(scoring: LiveServer, path: str, names: tuple[str, str]) -> None:
    first, second = names
    many = ask(scoring, path, {"model": "model", first: "a b", second: ["c d", "a b", "e"]})
    assert many.keys() == {"id", "object", "created", "model", "data", "usage"}
    assert (many["object"], many["model"]) == ("list", "model")
    assert many["id"].startswith("score-")
    assert [item["index"] for item in many["data"]] == [0, 1, 2]
    assert {item["object"] for item in many["data"]} == {"score"}
    assert many["usage"]["prompt_tokens"] == many["usage"]["total_tokens"] > 0
    scores = [item["score"] for item in many["data"]]
    [single] = ask(scoring, path, {first: "a b", second: "e"})["data"]
    assert single["score"] == pytest.approx(scores[2])
    paired = ask(scoring, path, {first: ["a b", "a b"], second: ["e", "c d"]})["data"]
    assert [item["score"] for item in paired] == pytest.approx([scores[2], scores[0]])


def test_the_score_of_an_embedding_model_is_a_cosine() -> None:
    with serve("--engine", "echo", *options("option.task=text-embedding")) as server:
        server.wait_ready()
        found = ask(server, "/score", {"text_1": "a b", "text_2": ["c", "a b"]})
        wanted = ask(server, "/similarity", {"inputs": {"source_sentence": "a b", "sentences": ["c", "a b"]}})
        assert [item["score"] for item in found["data"]] == pytest.approx(wanted)
        assert wanted[1] == pytest.approx(1)


def test_the_score_of_a_reranker_is_reranks() -> None:
    with serve("--engine", "echo", *options("option.task=rerank")) as server:
        server.wait_ready()
        for more in ({}, {"use_activation": False}):
            found = ask(server, "/score", {"text_1": "a b", "text_2": ["c", "d e"], **more})["data"]
            ranked = ask(server, "/v1/rerank", {"query": "a b", "documents": ["c", "d e"], **more})["results"]
            scores = {item["index"]: item["relevance_score"] for item in ranked}
            assert [item["score"] for item in found] == [scores[0], scores[1]]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "'text_1' and 'text_2', or 'queries' and 'documents', must be strings"),
        ({"text_1": "a", "documents": ["b"]}, "'text_1' and 'text_2', or 'queries' and 'documents', must be strings"),
        (
            {"text_1": ["a", "b"], "text_2": ["c"]},
            "'text_1' has 2 texts and 'text_2' has 1; 'text_1' must have one text, or as many as 'text_2'",
        ),
        ({"text_1": [], "text_2": ["c"]}, "'text_1' must be a string or a list of strings"),
        ({"text_1": "a", "text_2": [{"content": []}]}, "'text_2[0]' must be a non-empty string"),
        ({"text_1": "a", "text_2": "b", "instruction": "x"}, 'instruction="x"'),
        ({"text_1": "a" * 20_000, "text_2": ["b"] * 2048}, "the maximum is 16777216 in all"),
    ],
)
def test_wrong_pairs_are_named(scoring: LiveServer, body: Any, words: str) -> None:
    error = refusal(scoring, "/score", body)
    assert (error["type"], words in error["message"]) == ("BadRequestError", True), error


def test_a_model_that_generates_has_no_scores(echo_server: LiveServer) -> None:
    assert "option.task=" in refusal(echo_server, "/score", {"text_1": "a", "text_2": "b"}, 404)["message"]


# -- pooling and labels --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["text-classification", "text-embedding"])
def pooling(request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    with serve("--engine", "echo", *options(f"option.task={request.param}")) as server:
        server.wait_ready()
        yield server


def test_pooling_gives_the_numbers_of_the_task(pooling: LiveServer) -> None:
    task = "classify" if "classification" in http.get(pooling.url + "/info").text else "embed"
    found = ask(pooling, "/pooling", {"model": "model", "input": ["a b", "c"], "task": task})
    assert found.keys() == {"id", "object", "created", "model", "data", "usage"}
    assert found["id"].startswith("pooling-")
    assert [(item["index"], item["object"]) for item in found["data"]] == [(0, "pooling"), (1, "pooling")]
    first, second = (item["data"] for item in found["data"])
    if task == "embed":
        assert [first, second] == ask(pooling, "/embed", {"inputs": ["a b", "c"]})
    else:
        assert sum(first) == pytest.approx(1)
        assert sum(ask(pooling, "/pooling", {"input": "a b", "use_activation": False})["data"][0]["data"]) != 1
    encoded = ask(pooling, "/pooling", {"input": "a b", "encoding_format": "base64"})["data"][0]["data"]
    assert struct.unpack(f"<{len(first)}f", base64.b64decode(encoded)) == pytest.approx(first)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input": "a", "task": "token_embed"}, 'task="token_embed": is not supported: the engines return one vector'),
        ({"input": "a", "task": "plugin"}, 'task="plugin": is not supported: the model\'s task is '),
        ({"input": "a", "dimensions": 2}, "dimensions=2: is not supported: call /v1/embeddings"),
        ({"data": {}}, "data={}: is not supported: the engines have no plugins"),
        ({"messages": [{}]}, "messages[0].role must be one of"),
        ({}, "'input' must be a string"),
        ([], "the body must be a JSON object with 'input'"),
    ],
)
def test_what_pooling_refuses(pooling: LiveServer, body: Any, words: str) -> None:
    assert words in refusal(pooling, "/pooling", body)["message"]


def test_labels_in_vllm_routes(pooling: LiveServer) -> None:
    if "text-embedding" in http.get(pooling.url + "/info").text:
        message = refusal(pooling, "/classify", {"input": "a"}, 404)["message"]
        assert "it requires option.task=text-classification, but this model's task is text-embedding" in message
        return
    found = ask(pooling, "/classify", {"input": ["I like you.", "No."]})
    assert found["id"].startswith("classify-")
    assert found["usage"]["prompt_tokens"] > 0
    for item, predicted in zip(
        found["data"], ask(pooling, "/predict", {"inputs": [["I like you."], ["No."]]}), strict=True
    ):
        assert item["label"] == predicted[0]["label"]
        assert max(item["probs"]) == pytest.approx(predicted[0]["score"])
        assert item["num_classes"] == len(item["probs"]) == 2


def test_a_reranker_has_no_pooling() -> None:
    with serve("--engine", "echo", *options("option.task=rerank")) as server:
        server.wait_ready()
        message = refusal(server, "/pooling", {"input": "a"}, 404)["message"]
        assert "option.task=text-embedding or text-classification" in message


# -- the tokenizer -------------------------------------------------------------------------------------------------


def test_the_tokenizers_configuration_is_behind_vllms_switch(tokenizer: LiveServer, tmp_path: Path) -> None:
    found = http.get(tokenizer.url + "/tokenizer_info")
    assert found.status_code == 404
    assert "option.enable_tokenizer_info_endpoint=true" in found.json()["error"]["message"]
    directory = tiny.make(tmp_path / "tiny")
    file = directory / "tokenizer_config.json"
    own = json.loads(file.read_text())
    file.write_text(json.dumps({**own, "vocab_file": "v.json"}))
    lines = (f"option.echo_tokenizer={directory}", "option.enable_tokenizer_info_endpoint=true")
    with serve("--engine", "echo", *options(*lines)) as server:
        server.wait_ready()
        shown = http.get(server.url + "/tokenizer_info").json()
    assert isinstance(shown.pop("tokenizer_class"), str)
    assert shown.pop("chat_template")
    assert shown == {name: value for name, value in own.items() if name not in ("tokenizer_class", "chat_template")}
    token = {"content": "<unk>", "lstrip": False}
    file.write_text(json.dumps({"unk_token": token, "added_tokens_decoder": {"0": token}, "merges_file": "m"}))
    assert tokenizer_config(directory) == {"unk_token": "<unk>", "added_tokens_decoder": {"0": "<unk>"}}


def test_a_model_without_that_file_has_nothing_to_show() -> None:
    with serve("--engine", "echo", *options("option.enable_tokenizer_info_endpoint=true")) as server:
        server.wait_ready()
        found = http.get(server.url + "/tokenizer_info")
        assert (found.status_code, "tokenizer_config.json" in found.text) == (404, True)


# -- LoRA adapters -------------------------------------------------------------------------------------------------


@pytest.fixture
def lora(monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True")
    with serve(*LORA) as server:
        server.wait_ready()
        yield server


def change(server: LiveServer, what: str, body: Any, status: int = 200) -> str:
    found = http.post(f"{server.url}/v1/{what}_lora_adapter", json=body)
    assert found.status_code == status, found.text
    return found.text if status == 200 else str(found.json()["error"]["message"])


def test_an_adapter_comes_and_goes_by_vllms_names(lora: LiveServer, tmp_path: Path) -> None:
    adapter = {"lora_name": "sql", "lora_path": str(write_adapter(tmp_path / "a"))}
    assert change(lora, "load", adapter) == "Success: LoRA adapter 'sql' added successfully."
    assert [model["id"] for model in http.get(lora.url + "/v1/models").json()["data"]] == ["model", "lmi", "sql"]
    ask(lora, "/v1/completions", {"model": "sql", "prompt": "a b c", "max_tokens": 1})
    assert "already exists" in change(lora, "load", adapter, 400)
    assert change(lora, "load", {**adapter, "load_inplace": True}).startswith("Success")
    assert change(lora, "unload", {"lora_name": "sql", "lora_int_id": 1}) == (
        "Success: LoRA adapter 'sql' removed successfully."
    )
    assert refusal(lora, "/v1/unload_lora_adapter", {"lora_name": "sql"}, 404)["type"] == "NotFoundError"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "'lora_name' must be a non-empty string"),
        ({"lora_name": "a"}, "'lora_path' must be a non-empty string"),
        ([], "the body must be a JSON object with 'lora_name'"),
        ({"lora_name": "a", "lora_path": "/nowhere"}, "lora_path=/nowhere: there is no such directory"),
        ({"lora_name": "a", "lora_path": "s3://b/a"}, "lora_path=s3://b/a: must be a directory on this machine"),
        ({"lora_name": "model", "lora_path": "/nowhere"}, "conflicts with a served base model"),
        ({"lora_name": "a", "lora_path": "/nowhere", "load_inplace": 2}, "'load_inplace' must be true or false"),
        ({"lora_name": "a", "lora_path": "/nowhere", "is_3d_lora_weight": True}, "is_3d_lora_weight=true"),
    ],
)
def test_a_wrong_call_about_adapters_is_named(lora: LiveServer, body: Any, words: str) -> None:
    assert words in change(lora, "load", body, 400)


@pytest.mark.parametrize("value", [None, "0", "false"])
def test_they_need_vllms_switch(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    if value is not None:
        monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", value)
    with serve(*LORA) as server:
        server.wait_ready()
        for what in ("load", "unload"):
            told = change(server, what, {"lora_name": "a"}, 404)
            assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=true" in told


def test_a_server_without_lora_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    with serve("--engine", "echo") as server:
        server.wait_ready()
        assert "option.enable_lora=true" in change(server, "load", {"lora_name": "a"}, 400)
