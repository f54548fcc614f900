"""Embeddings and scores of llama-server: they are the server's own, and each fault ends one request."""

from __future__ import annotations

import contextlib
import json
import math
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy
import pytest

from handler import engines
from handler.config.config import Config
from handler.core.errors import ConfigError
from handler.core.values import FieldNames, Finish, Pooling, Request, Task, Truncation
from handler.engines.base import EngineConfig, EngineRequest, Output
from handler.engines.huggingface.pooling import encode_pooled
from handler.engines.llamacpp.files import model_directory
from handler.engines.llamacpp.pooling import LlamaPooling
from handler.engines.remote import engine as remote_engine
from handler.engines.remote import servers
from tests.checkpoints import byte_gguf
from tests.checkpoints.pooling_gguf import write_gguf
from tests.doubles import llama_server
from tests.doubles.llama_server import HANG, LlamaServer
from tests.one_test import in_one_test
from tests.process.engines.llamacpp import real
from tests.process.engines.llamacpp.real import RealServer
from tests.process.engines.llamacpp.test_llamacpp import REAL
from tests.process.engines.openai.server import status
from tests.process.engines.openai.test_bad_servers import PATIENCE
from tests.servers import wait_for
from tests.unit.engines.pooling_models import DOCUMENTS, GOLDEN, QUERY, TEXTS, write_model

EMBED, SCORE = Pooling("embed"), Pooling("score", normalize=False)
PIECES = [b"x"] * 60
TOGETHER = 1e-3
"""Largest difference between llama-server's numbers for a text alone and together with other texts."""
Served = LlamaServer | RealServer


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_engine, "_PAUSE", 0.01)
    monkeypatch.setattr(servers, "_PAUSE", 0.01)


class Both(NamedTuple):
    """A server, and the directory of its model."""

    server: Served
    model: Path
    task: Task


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("bert"), "bert")


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("reranker"), "xlm-roberta reranker")


@contextlib.contextmanager
def double(pooling: str, context: int = 40) -> Iterator[LlamaServer]:
    with llama_server.listening(PIECES) as server:
        server.pooling, server.context = pooling, context
        yield server


@pytest.fixture(scope="module", params=["double", pytest.param("real", marks=REAL)])
def embedder(request: pytest.FixtureRequest, bert: Path) -> Iterator[Both]:
    if request.param == "double":
        with double("mean") as server:
            yield Both(server, bert, Task.EMBEDDING)
        return
    file = write_gguf(bert, "bert", gguf.PoolingType.MEAN)
    with real.running(file, PIECES, 4, "--embeddings") as found:
        yield Both(found, bert, Task.EMBEDDING)


@pytest.fixture(scope="module", params=["double", pytest.param("real", marks=REAL)])
def ranker(request: pytest.FixtureRequest, reranker: Path) -> Iterator[Both]:
    if request.param == "double":
        with double("rank", 38) as server:
            yield Both(server, reranker, Task.RERANK)
        return
    file = write_gguf(reranker, "xlm-roberta reranker", gguf.PoolingType.RANK)
    with real.running(file, PIECES, 4, "--reranking") as found:
        yield Both(found, reranker, Task.RERANK)


def config(model: Path, task: Task, *found: Served, timeout: float = PATIENCE, **more: Any) -> EngineConfig:
    given = {
        "base_url": tuple(f"{server.url}/v1" for server in found),
        "base_url_kind": "llamacpp",
        "base_url_connect_timeout": 5.0,
        "base_url_timeout": timeout,
    }
    return EngineConfig(Config(engine_options=given, **more), model=model, task=task)


@contextlib.contextmanager
def engine(config: EngineConfig) -> Iterator[LlamaPooling]:
    made = engines.load("openai", config)
    assert isinstance(made, LlamaPooling)
    try:
        yield made
    finally:
        made.close()


def run(found: LlamaPooling, *keys: int) -> dict[int, Output]:
    results: dict[int, Output] = {}

    def ended() -> bool:
        results.update({output.key: output for output in found.step().others})
        return results.keys() >= {*keys}

    wait_for(ended, PATIENCE, "no answer comes")
    return results


def ask(found: LlamaPooling, pooling: Pooling = EMBED, ids: Sequence[int] = TEXTS[1], key: int = 1) -> Output:
    found.add(EngineRequest(key, ids, pooling))
    return run(found, key)[key]


def numbers(output: Output) -> list[float]:
    assert (output.finish, output.error) == (Finish.EOS, None)
    assert output.extras is not None
    assert output.extras.vector is not None
    return list(output.extras.vector)


def own(server: Served, path: str, body: Any) -> Any:
    """The server's own answer."""
    with urllib.request.urlopen(urllib.request.Request(server.url + path, json.dumps(body).encode())) as answer:
        return json.load(answer)


def embedding(server: Served, ids: Sequence[int], normalize: int = 2) -> list[float]:
    (found,) = own(server, "/embedding", {"content": [*ids], "embd_normalize": normalize})
    (vector,) = found["embedding"]
    return list(vector)


def test_embeddings_are_the_servers_own(embedder: Both) -> None:
    server, model, task = embedder
    with engine(config(model, task, server)) as found:
        dimensions = len(embedding(server, TEXTS[1]))
        assert (found.info.dimensions, found.info.max_total_tokens) == (dimensions, 40)
        for key, ids in enumerate(TEXTS, 1):
            found.add(EngineRequest(key, ids, EMBED))
        results = run(found, *range(1, len(TEXTS) + 1))
        for key, ids in enumerate(TEXTS, 1):
            assert numbers(results[key]) == pytest.approx(embedding(server, ids), abs=TOGETHER)
        raw = embedding(server, TEXTS[1], -1)
        assert numbers(ask(found, Pooling("embed", normalize=False))) == pytest.approx(raw, rel=1e-6)
        half = raw[: dimensions // 2]
        assert numbers(ask(found, Pooling("embed", dimensions=len(half)))) == pytest.approx(
            [value / math.hypot(*half) for value in half], abs=1e-6
        )
        follows = Pooling("embed", normalize=None)
        assert numbers(ask(found, follows)) == pytest.approx(raw, rel=1e-6), "modules.json has no module Normalize"


@pytest.mark.parametrize(("pooling", "most"), [("mean", 40), ("last", 39)])
def test_a_server_that_may_divide_texts_needs_room_for_one_more_token(bert: Path, pooling: str, most: int) -> None:
    with double(pooling) as server, engine(config(bert, Task.EMBEDDING, server)) as found:
        assert found.info.max_total_tokens == most
        ids = [2, *[5] * (most - 2), 3]
        assert numbers(ask(found, ids=ids)) == pytest.approx(embedding(server, ids), abs=1e-6)


@REAL
def test_embeddings_are_those_of_transformers(embedder: Both) -> None:
    server, model, task = embedder
    if isinstance(server, LlamaServer):
        return
    golden = json.loads(GOLDEN.read_text())["bert"]["mean"]
    with engine(config(model, task, server)) as found:
        for ids, expected in zip(TEXTS, golden, strict=True):
            values = numbers(ask(found, Pooling("embed", normalize=False), ids))
            assert numpy.abs(numpy.array(values) - expected).max() < 5e-3  # llama.cpp's GELU has 16 bits


def test_without_modules_embeddings_are_normalized_as_by_the_server(embedder: Both, tmp_path: Path) -> None:
    server, model, task = embedder
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    with engine(config(tmp_path, task, server)) as found:
        values = numbers(ask(found, Pooling("embed", normalize=None)))
        assert values == pytest.approx(embedding(server, TEXTS[1]), abs=1e-6)


def pair(found: LlamaPooling, model: Path, document: str, truncation: Truncation | None = None) -> EngineRequest:
    """The request for a score, as the host makes it."""
    tokenizer: Any = engines.load_tokenizer("openai", config(model, Task.RERANK))
    names = FieldNames(prompt="query")
    request = Request(QUERY, pair=document, pooling=SCORE, truncation=truncation, names=names)
    request, prompt = encode_pooled(request, tokenizer, found.info)
    assert request.pooling is not None
    return EngineRequest(1, prompt.ids, request.pooling)


def scored(server: Served, document: str) -> float:
    (result,) = own(server, "/rerank", {"query": QUERY, "documents": [document]})["results"]
    return float(result["relevance_score"])


def test_scores_are_the_servers_own(ranker: Both) -> None:
    server, model, task = ranker
    with engine(config(model, task, server)) as found:
        assert found.info.max_total_tokens == 37, "the server adds a token more than the model's tokenizer"
        for document in DOCUMENTS:
            request = pair(found, model, document)
            raw = scored(server, document)
            assert numbers(ask(found, request.pooling, request.ids)) == pytest.approx([raw], abs=1e-6)
            between = request.pooling._replace(normalize=True)
            assert numbers(ask(found, between)) == pytest.approx([1 / (1 + math.exp(-raw))], abs=1e-6)


def test_a_server_that_does_not_report_its_context_computes_scores(reranker: Path) -> None:
    with double("rank") as server:
        server.lacks = frozenset({"default_generation_settings"})
        with engine(config(reranker, Task.RERANK, server, max_model_len=30)) as found:
            raw = scored(server, DOCUMENTS[0])
            assert numbers(ask(found, SCORE._replace(texts=(QUERY, DOCUMENTS[0])))) == pytest.approx([raw], abs=1e-6)


def test_a_pair_is_cut_to_what_the_server_accepts(ranker: Both) -> None:
    server, model, task = ranker
    words = [f"w{4 + number % 50}" for number in range(60)]
    with engine(config(model, task, server)) as found:
        for side, kept in (("right", words[:32]), ("left", words[-32:])):
            request = pair(found, model, " ".join(words), Truncation(None, side))
            assert request.pooling.texts == (QUERY, " ".join(kept))
            assert numbers(ask(found, request.pooling)) == pytest.approx([scored(server, " ".join(kept))], abs=1e-6)


def test_a_score_of_probabilities_is_not_converted(reranker: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (checkpoint / name).write_bytes((reranker / name).read_bytes())
    described = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**described, "model_type": "qwen3"}))
    files = [byte_gguf.make(tmp_path / name, name) / "model.gguf" for name in ("qwen3", "llama")]
    models = [(checkpoint, True), *((model_directory(file), file.parent.name == "qwen3") for file in files)]
    for model, is_probability in models:
        with double("rank") as server, engine(config(model, Task.RERANK, server)) as found:
            for normalize in (False, True):
                pooling = SCORE._replace(texts=(QUERY, "w7"), normalize=normalize)
                raw = scored(server, "w7")
                converted = 1 / (1 + math.exp(-raw)) if normalize and not is_probability else raw
                assert numbers(ask(found, pooling)) == pytest.approx([converted], abs=1e-6)


@in_one_test(
    ("pooling", "task", "words"),
    [
        ("", Task.EMBEDDING, "does not compute embeddings: start it with --embeddings"),
        ("", Task.RERANK, "computes no rerank scores: start it with --reranking"),
        ("mean", Task.RERANK, "computes no rerank scores: start it with --reranking"),
        (
            "rank",
            Task.EMBEDDING,
            "computes only rerank scores, not embeddings: set option.task=rerank, or start it without --reranking",
        ),
        (
            "none",
            Task.EMBEDDING,
            "computes an embedding for each token instead of one for the text: start it with --pooling, for example ",
        ),
    ],
)
def test_a_server_that_was_started_for_another_task_is_named(
    bert: Path, reranker: Path, pooling: str, task: Task, words: str
) -> None:
    model = reranker if task is Task.RERANK else bert
    with double(pooling) as server, pytest.raises(ConfigError) as refused, engine(config(model, task, server)):
        pass
    assert words in str(refused.value)


def test_what_no_server_of_the_kind_computes_is_refused_before_the_start(bert: Path, tmp_path: Path) -> None:
    with double("mean") as server:
        changes: list[tuple[Task, dict[str, Any], str]] = [
            (Task.CLASSIFICATION, {}, "llama-server returns only one score per text"),
            (
                Task.EMBEDDING,
                {"pooling": "cls"},
                "option.pooling=cls: omit the option, and start llama-server with `--pooling cls`",
            ),
            (Task.EMBEDDING, {"pooling": "max"}, "option.pooling=max: llama-server supports cls, last, mean"),
            (Task.RERANK, {"pooling": "mean"}, "option.pooling=mean: it applies only to embeddings"),
        ]
        for task, change, words in changes:
            with pytest.raises(ConfigError, match=words):
                engines.check("openai", str(bert), config(bert, task, server, **change))
        found = config(bert, Task.EMBEDDING, server)
        other = Config(engine_options={**found.engine_options, "base_url_kind": "vllm"}, task="text-embedding")
        with pytest.raises(ConfigError, match="servers of the kind vllm only generate text here"):
            engines.check("openai", str(bert), EngineConfig(other, model=bert, task=Task.EMBEDDING))


def test_a_text_that_exceeds_a_batch_ends_only_itself(bert: Path) -> None:
    with double("mean", 100) as server:
        server.batch = 50
        with engine(config(bert, Task.EMBEDDING, server)) as found:
            assert found.info.max_total_tokens == 40, "the model's own limit"
            server.batch = 10  # restarted without a closed connection
            output = ask(found, ids=TEXTS[3])
            assert output.refused
            assert "is too large to process" in (output.error or "")
            server.batch = 50
            assert numbers(ask(found, key=2)) == pytest.approx(embedding(server, TEXTS[1]), abs=1e-6)
    with double("mean", 30) as server, engine(config(bert, Task.EMBEDDING, server)) as found:
        assert found.info.max_total_tokens == 30


def body(value: Any) -> bytes:
    data = json.dumps(value).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data)


@in_one_test(
    ("script", "words"),
    [
        ([body({"embedding": 1})], "sent a response that cannot be read"),
        ([body([])], "sent a response that cannot be read"),
        ([body([{"embedding": [[1, "2", 3, 4]]}])], "sent a response that cannot be read"),
        ([body([{"embedding": [[1, 2]]}])], "sent an embedding of another size than at the start"),
        ([body([{"embedding": [[1, 2, 3, 4]] * 2}])], "sent an embedding of another size than at the start"),
        ([status(500, "down")], "answered 500"),
        ([body([{"embedding": [[1, 2, 3, 4]]}])[:-9]], "closed the connection"),
        ([HANG], "sent no token for 2 s"),
    ],
)
def test_a_fault_is_tried_again_and_at_last_named(bert: Path, script: list[bytes], words: str) -> None:
    timeout = 2.0 if "2 s" in words else PATIENCE
    with double("mean") as server, engine(config(bert, Task.EMBEDDING, server, timeout=timeout)) as found:
        server.scripts = [script] * 3
        assert words in (ask(found).error or "")
        server.scripts = []
        assert numbers(ask(found, key=2)) == pytest.approx(embedding(server, TEXTS[1]), abs=1e-6)


def test_a_server_that_was_restarted_with_another_model_gets_no_texts(bert: Path) -> None:
    with double("mean") as server, engine(config(bert, Task.EMBEDDING, server)) as found:
        assert numbers(ask(found))
        for name, dimensions in (("another.gguf", 4), ("tiny.gguf", 3)):
            server.dimensions = dimensions
            server.restart(name)
            assert "serves another model" in (ask(found, key=2).error or "")
        server.dimensions = 4
        server.restart("tiny.gguf")
        assert numbers(ask(found, key=3))


def test_a_cancelled_text_leaves_the_server(embedder: Both) -> None:
    server, model, task = embedder
    with engine(config(model, task, server)) as found:
        for key in range(2, 40):
            found.add(EngineRequest(key, TEXTS[key % 5], EMBED))
        for key in range(2, 40, 2):
            found.cancel(key)
        results = run(found, *range(3, 40, 2))
        assert not {*range(2, 40, 2)} & results.keys()
        for key in range(3, 40, 2):
            expected = embedding(server, TEXTS[key % 5])
            assert numbers(results[key]) == pytest.approx(expected, abs=TOGETHER), "each gets its own"


def test_kept_connections_need_no_question(bert: Path) -> None:
    with double("mean") as server, engine(config(bert, Task.EMBEDDING, server)) as found:
        for key in range(1, 4):
            ask(found, key=key)
        before, began = server.asked.copy(), time.monotonic()
        for key in range(4, 34):
            assert numbers(ask(found, key=key))
        asked = {path: server.asked[path] - before[path] for path in server.asked}
        assert asked == {"/embedding": 30, "/rerank": 0, "/v1/models": 0, "/props": 0}
        assert time.monotonic() - began < PATIENCE
