"""LoRA adapters of llama-server over HTTP: their names, what dialects get of them, and the calls that change them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from handler.config.loader import read_config
from handler.engines.base import EngineConfig
from handler.engines.huggingface.files import load_tokenizer
from handler.engines.huggingface.tokenizer import HfTokenizer
from handler.serving.check import check
from tests.app.server import AppServer, serve
from tests.doubles import llama_server, tiny
from tests.doubles.llama_server import LlamaServer
from tests.process.engines.llamacpp.test_llamacpp import own
from tests.servers import http, options

GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
TEXT = "town 5"


class Front:
    """Our server, and llama-server with three adapters behind it, of which one has two names."""

    def __init__(self, server: AppServer, upstream: LlamaServer, tokenizer: HfTokenizer) -> None:
        self.server, self.upstream, self.tokenizer = server, upstream, tokenizer

    def own(self, used: int | None) -> str:
        """The server's own text with an adapter."""
        scales = [{"id": id, "scale": scale * (id == used)} for id, (_, scale) in enumerate(self.upstream.adapters)]
        more: dict[str, Any] = {"lora": scales, "n_predict": 8, "ignore_eos": True, "cache_prompt": False}
        assert self.tokenizer.vocabulary is not None
        return self.tokenizer.vocabulary.decode(own(self.upstream, self.tokenizer.encode(TEXT).ids, **more)["tokens"])

    def call(self, method: str, path: str = "", status: int = 200, **query: Any) -> Any:
        found = http.request(method, f"{self.server.url}/adapters{path}", params=query)
        assert found.status_code == status, found.text
        return found.json()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("tiny"))


def arguments(model: Path, upstream: LlamaServer, *more: str) -> tuple[str, ...]:
    url = f"option.base_url={upstream.url}/v1"
    template = "option.chat_template={{ messages[-1]['content'] }}"
    return (str(model), "--engine", "openai", *options(url, template, "option.enable_lora=true", *more))


@pytest.fixture(scope="module")
def front(model: Path) -> Iterator[Front]:
    tokenizer = load_tokenizer(EngineConfig(model=model))
    assert tokenizer.vocabulary is not None
    with llama_server.listening(tokenizer.vocabulary.pieces) as upstream:
        upstream.adapters = [("/m/sql.gguf", 1.0), ("/m/poem.gguf", 0.5), ("/m/a name.gguf", 1.0)]
        with serve(*arguments(model, upstream, "option.lora_modules=verse=poem.gguf")) as server:
            server.wait_ready()
            yield Front(server, upstream, tokenizer)


def test_the_servers_adapters_are_registered(front: Front) -> None:
    listed = {entry["name"]: entry["src"] for entry in front.call("GET")["adapters"]}
    assert listed == {"verse": "poem.gguf", "sql": "/m/sql.gguf", "poem": "/m/poem.gguf"}
    models = http.get(f"{front.server.url}/v1/models").json()["data"]
    assert {entry["id"] for entry in models} >= {"sql", "poem", "verse"}


@pytest.mark.parametrize(("name", "used"), [(None, None), ("sql", 0), ("poem", 1), ("verse", 1)])
def test_dialects_use_the_adapter_that_they_name(front: Front, name: str | None, used: int | None) -> None:
    expected, named = front.own(used), {} if name is None else {"model": name}
    post = front.server.post
    answer = post({"prompt": TEXT, **GREEDY, **named}, "/v1/completions")
    assert answer.json()["choices"][0]["text"] == expected
    chat = {"messages": [{"role": "user", "content": TEXT}], **GREEDY, **named}
    assert post(chat, "/v1/chat/completions").json()["choices"][0]["message"]["content"] == expected
    message = {"messages": chat["messages"], "max_tokens": 8, "temperature": 0, "model": name or "model"}
    assert expected.startswith(post(message, "/v1/messages").json()["content"][0]["text"][:3])
    parameters = {"max_new_tokens": 8, "ignore_eos_token": True}
    lmi: dict[str, Any] = {"inputs": TEXT, "parameters": parameters}
    if name is not None:
        lmi["adapters"] = [name]
    assert front.server.post(lmi, "/invocations").json()["generated_text"] == expected


def test_an_unknown_adapter_is_an_error_of_the_request(front: Front) -> None:
    answer = front.server.post({"prompt": TEXT, **GREEDY, "model": "unknown"}, "/v1/completions")
    assert answer.status_code == 404
    answer = front.server.post({"inputs": TEXT, "adapters": ["unknown"]}, "/invocations")
    assert answer.status_code in (400, 404, 424)
    assert "unknown" in answer.text


def test_calls_change_names_and_not_files(front: Front) -> None:
    assert "registered" in str(front.call("POST", name="lines", src="/m/a name.gguf"))
    answer = front.server.post({"prompt": TEXT, **GREEDY, "model": "lines"}, "/v1/completions")
    assert answer.json()["choices"][0]["text"] == front.own(2)
    front.call("POST", "/lines/update", src="sql.gguf")
    answer = front.server.post({"prompt": TEXT, **GREEDY, "model": "lines"}, "/v1/completions")
    assert answer.json()["choices"][0]["text"] == front.own(0)
    refused = front.call("POST", "/lines/update", 400)
    assert "cannot be updated from sql.gguf again: set src to another adapter" in str(refused)
    front.call("DELETE", "/lines")
    assert front.server.post({"prompt": TEXT, "model": "lines"}, "/v1/completions").status_code == 404
    refused = http.post(f"{front.server.url}/adapters", params={"name": "new", "src": "/etc/passwd"})
    assert refused.status_code >= 400
    assert "has not loaded this one: restart llama-server with --lora" in refused.text


def test_an_adapter_that_the_server_lacks_prevents_the_start(model: Path) -> None:
    tokenizer = load_tokenizer(EngineConfig(model=model))
    assert tokenizer.vocabulary is not None
    with (
        llama_server.listening(tokenizer.vocabulary.pieces) as upstream,
        pytest.raises(Exception, match=r"the adapter missing cannot be used: .*restart llama-server with --lora"),
        serve(*arguments(model, upstream, "option.lora_modules=missing=/m/x.gguf")) as server,
    ):
        server.wait_ready()


def test_a_check_needs_no_file_of_the_server(model: Path) -> None:
    given = ["option.llm_engine=openai", "option.base_url=http://127.0.0.1:9/v1", "option.base_url_kind=llamacpp"]
    given += [f"option.model_id={model}", "option.enable_lora=true"]
    for modules, message in (("a=/m/x.gguf", ""), ("a/b=/m/x.gguf", "option.lora_modules: name='a/b'")):
        reading = read_config(overrides=[*given, f"option.lora_modules={modules}"], environ={})
        problems = "".join(problem.message for problem in check(reading))
        assert message in problems
        assert bool(message) is bool(problems), problems
