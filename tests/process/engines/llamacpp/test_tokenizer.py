"""The tokenizer of llama.cpp's servers: read from their GGUF file, and compared with theirs."""

from __future__ import annotations

import json
import os
import random
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from handler.config.config import Config
from handler.core.errors import ConfigError
from handler.core.values import Sampling
from handler.engines.base import EngineConfig, EngineRequest
from handler.engines.huggingface.files import load_tokenizer
from handler.engines.llamacpp.files import model_directory
from handler.engines.openai import engine as openai_engine
from handler.engines.remote import servers as remote_servers
from tests.checkpoints import byte_gguf
from tests.checkpoints.gguf_header import byte_level, write_header
from tests.doubles import llama_server
from tests.doubles.llama_server import LlamaServer
from tests.process.engines.llamacpp import real
from tests.process.engines.openai.test_bad_servers import failed, run

REAL = pytest.mark.skipif(real.PROGRAM is None, reason="no llama-server on PATH or in LLAMA_SERVER")


@pytest.fixture(autouse=True)
def _quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMI_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("handler.engines.remote.engine._PAUSE", 0.01)
    monkeypatch.setattr(remote_servers, "_PAUSE", 0.01)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    template = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    return write_header(tmp_path / "model.gguf", byte_level(**{"tokenizer.chat_template": template}))


@pytest.fixture
def server(file: Path) -> Iterator[LlamaServer]:
    """A server that has loaded the file."""
    tokenizer = load_tokenizer(EngineConfig(model=model_directory(file)))
    with llama_server.listening(tokenizer.vocabulary.pieces) as found:
        found.encode, found.path = tokenizer.ids, str(file)
        yield found


def config(*urls: str, model: Path | None = None, kind: str = "llamacpp") -> EngineConfig:
    options = {"base_url": urls, "base_url_kind": kind, "base_url_connect_timeout": 5.0, "base_url_timeout": 20.0}
    return EngineConfig(Config(engine_options=options), model=model)


def load(server: LlamaServer, model: Path | None) -> Any:
    return openai_engine.load(config(f"{server.url}/v1", model=model))


def test_a_server_with_the_same_tokenizer_is_used(
    server: LlamaServer, file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    load(server, openai_engine.prepare(str(file), config(f"{server.url}/v1"))).close()
    assert server.asked["/tokenize"] == 1
    assert server.asked["/detokenize"] == 0
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("change", ["smaller", "other"])
def test_a_server_with_another_vocabulary_is_refused(server: LlamaServer, file: Path, change: str) -> None:
    directory = model_directory(file)
    pieces, server.encode = server.pieces, lambda text: [1, 2, 3]
    server.pieces = pieces[:60] if change == "smaller" else [*reversed(pieces)]
    with pytest.raises(
        ConfigError,
        match=r"has another tokenizer than option\.model_id: it reads the token ids .*; set option\.model_id to the",
    ):
        load(server, directory)


def test_another_division_of_texts_is_told_once(
    server: LlamaServer, file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = server.encode
    server.encode = lambda text: [id for part in text.split("x") for id in whole(part)]
    engine = load(server, model_directory(file))
    try:
        server.restart(server.name)
        ask(engine)
        assert server.asked["/tokenize"] > 1
    finally:
        engine.close()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(
        f"{server.url}/v1 divides some texts into other tokens than option.model_id, whose tokens are used: it has ["
    )


def test_a_server_that_returns_with_another_vocabulary_gets_no_requests(server: LlamaServer, file: Path) -> None:
    engine = load(server, model_directory(file))
    try:
        assert ask(engine, 1).finish is not None
        received = len(server.received)
        server.pieces, server.encode = [*reversed(server.pieces)], lambda text: [1]
        server.restart(server.name)
        result = ask(engine, 2)
        assert result == failed(error="the llamacpp server has another tokenizer than option.model_id")
        assert result.ids == []
        assert ask(engine, 3).error
        assert len(server.received) <= received + 1, "at most the one that finds out"
    finally:
        engine.close()


def ask(engine: Any, key: int = 1) -> Any:
    engine.add(EngineRequest(key, [3, 4, 5], Sampling(max_new_tokens=4, logprobs=False)))
    return run(engine, key)[key]


def test_a_server_that_cannot_be_asked_is_used(server: LlamaServer, file: Path, monkeypatch: Any) -> None:
    answer = LlamaServer._answer

    async def without(self: LlamaServer, method: str, path: str, *rest: Any) -> None:
        await answer(self, method, "/none" if path == "/tokenize" else path, *rest)

    monkeypatch.setattr(LlamaServer, "_answer", without)
    engine = load(server, model_directory(file))
    try:
        assert ask(engine).finish is not None
    finally:
        engine.close()


# -- the model's files: a GGUF file, a directory with one, or the server's own file ------------------------------------


def test_the_model_is_a_file_a_directory_or_what_the_server_has_loaded(server: LlamaServer, file: Path) -> None:
    expected, servers = model_directory(file), config(f"{server.url}/v1")
    for model in (str(file), str(file.parent), None):
        openai_engine.check(model, servers)
        assert openai_engine.prepare(model, servers) == expected
    assert openai_engine.prepare(str(file), config(f"{server.url}/v1", kind="auto")) == expected


def test_a_directory_with_a_tokenizer_of_its_own_is_used_as_it_is(server: LlamaServer, tmp_path: Path) -> None:
    directory = byte_gguf.make(tmp_path / "own")
    assert openai_engine.prepare(str(directory), config(server.url)) == directory


def test_a_file_that_cannot_be_read_here_is_named(server: LlamaServer) -> None:
    servers = config(server.url, "http://127.0.0.1:1")
    server.path = "/models/elsewhere.gguf"
    openai_engine.check(None, servers)  # before the servers run
    with pytest.raises(ConfigError) as refused:
        openai_engine.prepare(None, servers)
    message = str(refused.value)
    assert (
        f"{server.url}: its file '/models/elsewhere.gguf' is not on this machine; http://127.0.0.1:1: cannot" in message
    )
    assert message.endswith("the .gguf file that the servers have loaded, or to the model's Hugging Face directory")


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_file_is_not_enough_for_other_servers(file: Path, kind: str) -> None:
    for model in (str(file), "owner/model/model.gguf"):
        with pytest.raises(
            ConfigError, match=rf"option\.base_url_kind={kind}: the MODEL can be a \.gguf file only for llama"
        ):
            openai_engine.check(model, config("http://127.0.0.1:1/v1", kind=kind))


def test_servers_that_turn_out_to_be_of_another_kind_are_refused(
    file: Path, server: LlamaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_engine, "find_kind", lambda urls: "vllm")
    with pytest.raises(ConfigError, match=r"the servers are of the kind vllm: the MODEL can be a \.gguf file only for"):
        openai_engine.load(config(server.url, model=model_directory(file), kind="auto"))


# -- the original ------------------------------------------------------------------------------------------------------

_POOLS = (
    "abch ",
    "0123456789",
    " \t\n\r\u00a0\u3000",
    "'.,!-_()<>|",
    "éßĳ",
    "日本語한국",
    "😀👍🏽",
    "\u0301\x00\x7f\ufffd",
)


def _texts(count: int) -> list[str]:
    draw = random.Random(5)
    words = ["ab", "<eos>", "hello", " world", "12345", "  ", "\n\n", "don't"]
    made = []
    for _ in range(count):
        parts = [draw.choice(words) if draw.random() < 0.5 else draw.choice(draw.choice(_POOLS)) for _ in range(20)]
        made.append("".join(parts))
    return made


@REAL
def test_the_ids_are_those_of_the_original(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With the file in LLAMA_GGUF, or else with one of bytes."""
    given = os.environ.get("LLAMA_GGUF")
    file = Path(given) if given else byte_gguf.make(tmp_path / "bytes") / "model.gguf"
    directory = model_directory(file)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    with real.running(file, load_tokenizer(EngineConfig(model=directory)).vocabulary.pieces) as server:
        for parse in (True, False):
            tokenizer.encode_special_tokens = not parse
            for text in _texts(300):
                body = {"content": text, "add_special": True, "parse_special": parse}
                request = urllib.request.Request(f"{server.url}/tokenize", json.dumps(body).encode())
                with urllib.request.urlopen(request) as answer:
                    assert tokenizer.encode(text).ids == json.load(answer)["tokens"], text
        capfd.readouterr()
        openai_engine.load(config(f"{server.url}/v1", model=directory)).close()
        assert capfd.readouterr().err == ""
