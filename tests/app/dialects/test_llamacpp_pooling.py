"""Embeddings and scores of llama-server in all dialects: they are the server's own."""

from __future__ import annotations

import base64
import math
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import pytest

from handler.config.loader import read_config
from handler.serving.check import check
from tests.app.server import AppServer, serve
from tests.checkpoints.pooling_gguf import write_gguf
from tests.doubles import llama_server
from tests.process.engines.llamacpp import real
from tests.process.engines.llamacpp.real import RealServer
from tests.process.engines.llamacpp.test_llamacpp import REAL
from tests.process.engines.llamacpp.test_pooling import PIECES, Served, embedding, own
from tests.servers import http, options
from tests.unit.engines.pooling_models import DOCUMENTS, QUERY, TEXTS, write_model

OWN = options(f"option.llama_server={real.PROGRAM}", "option.llama_server_args=-t 1")
WORDS = [" ".join(f"w{id}" for id in ids[1:-1]) for ids in TEXTS]


class Front(NamedTuple):
    """Our server, and llama-server behind it."""

    server: AppServer
    upstream: Served

    def post(self, path: str, body: Any, status: int = 200) -> Any:
        found = http.post(self.server.url + path, json=body)
        assert found.status_code == status, found.text
        return found.json()


def fronted(directory: Path, name: str, is_real: bool, pooling: gguf.PoolingType, flag: str) -> Iterator[Front]:
    model = write_model(directory, name)
    if is_real:
        upstream: Any = real.running(write_gguf(model, name, pooling), PIECES, 4, flag)
    else:
        upstream = llama_server.listening(PIECES)
    with upstream as found:
        if not is_real:
            found.pooling, found.context = pooling.name.lower(), 40
        url = f"option.base_url={found.url}/v1"
        with serve(str(model), "--engine", "openai", *options(url)) as server:
            server.wait_ready()
            yield Front(server, found)


@pytest.fixture(scope="module", params=["double", pytest.param("real", marks=REAL)])
def embedder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    directory = tmp_path_factory.mktemp("bert")
    yield from fronted(directory, "bert", request.param == "real", gguf.PoolingType.MEAN, "--embeddings")


@pytest.fixture(scope="module", params=["double", pytest.param("real", marks=REAL)])
def ranker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    directory, name = tmp_path_factory.mktemp("ranker"), "xlm-roberta reranker"
    yield from fronted(directory, name, request.param == "real", gguf.PoolingType.RANK, "--reranking")


def close(found: Any, expected: Any) -> bool:
    """Whether numbers agree. llama-server's own numbers depend on the texts that it computes together."""
    return bool(found == pytest.approx(expected, rel=2e-3, abs=2e-4))


def test_embeddings_in_all_dialects(embedder: Front) -> None:
    raw = [embedding(embedder.upstream, ids, -1) for ids in TEXTS]
    unit = [[value / math.hypot(*vector) for value in vector] for vector in raw]
    found = embedder.post("/v1/embeddings", {"input": WORDS, "use_activation": True})
    assert [entry["index"] for entry in found["data"]] == [0, 1, 2, 3, 4]
    assert all(close(entry["embedding"], vector) for entry, vector in zip(found["data"], unit, strict=True))
    assert found["usage"]["prompt_tokens"] == sum(map(len, TEXTS))
    by_ids = embedder.post("/v1/embeddings", {"input": TEXTS, "use_activation": False})
    assert all(
        entry["embedding"] == pytest.approx(vector, rel=2e-3, abs=2e-3)
        for entry, vector in zip(by_ids["data"], raw, strict=True)
    )
    coded = embedder.post("/v1/embeddings", {"input": WORDS[1], "encoding_format": "base64", "use_activation": True})
    data = base64.b64decode(coded["data"][0]["embedding"])
    assert close(struct.unpack(f"<{len(data) // 4}f", data), unit[1])
    short = embedder.post("/v1/embeddings", {"input": WORDS[1], "dimensions": 2, "use_activation": True})
    assert close(short["data"][0]["embedding"], [value / math.hypot(*raw[1][:2]) for value in raw[1][:2]])
    embedded = embedder.post("/embed", {"inputs": WORDS})
    assert all(close(vector, expected) for vector, expected in zip(embedded, unit, strict=True))
    (vector,) = embedder.post("/invocations", {"inputs": WORDS[1], "normalize": True})
    assert close(vector, unit[1])
    cosine = sum(one * other for one, other in zip(unit[1], unit[2], strict=True))
    similar = {"inputs": {"source_sentence": WORDS[1], "sentences": [WORDS[2]]}}
    assert close(embedder.post("/similarity", similar), [cosine])
    assert close(embedder.post("/score", {"text_1": WORDS[1], "text_2": WORDS[2]})["data"][0]["score"], cosine)


def test_what_the_server_does_not_pool_is_refused(embedder: Front) -> None:
    refused = embedder.post("/v1/embeddings", {"input": WORDS[1], "dimensions": 65}, 400)
    assert "dimensions" in str(refused)
    long = " ".join(["w5"] * 50)
    assert "40" in str(embedder.post("/v1/embeddings", {"input": long}, 400))
    cut = embedder.post("/v1/embeddings", {"input": long, "truncate_prompt_tokens": -1, "use_activation": False})
    expected = embedding(embedder.upstream, [2, *[5] * 38, 3], -1)
    assert cut["data"][0]["embedding"] == pytest.approx(expected, rel=2e-3, abs=2e-3)
    assert "text-generation" in str(embedder.post("/v1/completions", {"prompt": "w5"}, 404))


def test_scores_in_all_dialects(ranker: Front) -> None:
    ranked = own(ranker.upstream, "/rerank", {"query": QUERY, "documents": DOCUMENTS})["results"]
    raw = {result["index"]: result["relevance_score"] for result in ranked}
    found = ranker.post("/rerank", {"query": QUERY, "texts": DOCUMENTS, "raw_scores": True})
    assert [entry["index"] for entry in found] == [result["index"] for result in ranked]
    assert all(close(entry["score"], raw[entry["index"]]) for entry in found)
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        found = ranker.post(path, {"model": "model", "query": QUERY, "documents": DOCUMENTS, "top_n": 3})
        assert [entry["index"] for entry in found["results"]] == [result["index"] for result in ranked][:3]
        for entry in found["results"]:
            assert close(entry["relevance_score"], 1 / (1 + math.exp(-raw[entry["index"]])))
    scores = ranker.post("/score", {"text_1": QUERY, "text_2": DOCUMENTS, "use_activation": False})["data"]
    assert all(close(entry["score"], raw[index]) for index, entry in enumerate(scores))
    long = " ".join(["w5"] * 50)
    assert ranker.post("/rerank", {"query": QUERY, "texts": [long]}, 413)
    cut = ranker.post("/rerank", {"query": QUERY, "texts": [long], "truncate": True, "raw_scores": True})
    num_kept = 32 if isinstance(ranker.upstream, RealServer) else 33  # beside the query, and 5 or 4 more
    kept = {"query": QUERY, "documents": [" ".join(["w5"] * num_kept)]}
    assert close(cut[0]["score"], own(ranker.upstream, "/rerank", kept)["results"][0]["relevance_score"])


@REAL
@pytest.mark.parametrize("pooling", ["auto", "last"])
def test_the_engines_own_server_embeds(tmp_path: Path, pooling: str) -> None:
    file = write_gguf(write_model(tmp_path, "bert"), "bert", gguf.PoolingType.MEAN)
    flags = () if pooling == "auto" else ("--pooling", pooling)
    with (
        real.running(file, PIECES, 4, "--embeddings", *flags) as upstream,
        serve(str(file), "--engine", "llamacpp", *OWN, *options(f"option.pooling={pooling}")) as server,
    ):
        server.wait_ready()
        found = Front(server, upstream).post("/v1/embeddings", {"input": WORDS})
        for entry, ids in zip(found["data"], TEXTS, strict=True):
            assert close(entry["embedding"], embedding(upstream, ids))


@REAL
def test_the_engines_own_server_ranks(tmp_path: Path) -> None:
    file = write_gguf(write_model(tmp_path, "xlm-roberta reranker"), "xlm-roberta reranker", gguf.PoolingType.RANK)
    with (
        real.running(file, PIECES, 4, "--reranking") as upstream,
        serve(str(file), "--engine", "llamacpp", *OWN) as server,
    ):
        server.wait_ready()
        body = {"query": QUERY, "texts": DOCUMENTS, "raw_scores": True}
        found = {entry["index"]: entry["score"] for entry in Front(server, upstream).post("/rerank", body)}
        for result in own(upstream, "/rerank", {"query": QUERY, "documents": DOCUMENTS})["results"]:
            assert close(found[result["index"]], result["relevance_score"])


@pytest.mark.parametrize("name", ["bert", "xlm-roberta reranker"])
def test_only_a_model_with_a_head_is_a_reranker(tmp_path: Path, name: str) -> None:
    file = write_gguf(write_model(tmp_path, name), name, gguf.PoolingType.MEAN)
    given = ["option.llm_engine=llamacpp", f"option.model_id={file}", "option.task=rerank"]
    reading = read_config(overrides=[*given, f"option.llama_server={sys.executable}"], environ={})
    problems = "".join(problem.message for problem in check(reading))
    assert ("is no reranker: it contains no matrix that scores texts" in problems) is (name == "bert"), problems
