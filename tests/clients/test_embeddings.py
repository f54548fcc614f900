"""Clients of embeddings and rerank, as they are: openai, LangChain, huggingface_hub and cohere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.driver import HUBS, Driver, drivers, python_client
from tests.servers import LiveServer, http, serve

pytestmark = pytest.mark.clients

TEXTS = ["a b", "c", "ü 日本 d"]


@pytest.fixture(scope="module")
def embedding() -> Iterator[LiveServer]:
    with serve("--engine", "echo", "-o", "option.task=text-embedding") as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="module")
def ranking() -> Iterator[LiveServer]:
    with serve("--engine", "echo", "-o", "option.task=rerank", "-o", "option.served_model_name=rerank-v3.5") as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="module")
def vectors(embedding: LiveServer) -> list[Any]:
    return [
        pytest.approx(vector, rel=1e-6) for vector in http.post(f"{embedding.url}/embed", json={"inputs": TEXTS}).json()
    ]


def run(driver: Driver, url: str, code: str) -> Any:
    """What an expression is to a client; `url` and `texts` are variables of it."""
    *lines, last = code.strip().splitlines()
    body = [f"url, texts = {url!r}, {TEXTS!r}", *lines, f"print(json.dumps({last}))"]
    return json.loads(driver.run("\n".join(["import json", *body])))


@pytest.mark.parametrize("more", ["", ', encoding_format="float"', ', encoding_format="base64"'])
def test_openai(embedding: LiveServer, vectors: list[Any], more: str) -> None:
    """The client asks for base64 unless it is told otherwise."""
    code = f"""
from openai import OpenAI
answer = OpenAI(base_url=url + "/v1", api_key="none").embeddings.create(model="model", input=texts{more})
[[item.embedding for item in answer.data], answer.usage.prompt_tokens]
"""
    found, tokens = run(python_client("openai", "drive_openai"), embedding.url, code)
    if more.endswith('base64"'):  # the client leaves what was asked for as it came
        assert all(isinstance(item, str) for item in found)
    else:
        assert found == vectors
    assert tokens == 6


def test_openais_errors(embedding: LiveServer, ranking: LiveServer) -> None:
    code = """
import openai
def fails(url, **more):
    try:
        openai.OpenAI(base_url=url + "/v1", api_key="none").embeddings.create(model="model", input=texts, **more)
    except openai.APIStatusError as error:
        return [type(error).__name__, error.message]
fails(url, dimensions=999)
"""
    kind, message = run(python_client("openai", "drive_openai"), embedding.url, code)
    assert (kind, "dimensions=999" in message) == ("BadRequestError", True)
    kind, message = run(python_client("openai", "drive_openai"), ranking.url, code)
    assert (kind, "option.task=text-embedding" in message) == ("NotFoundError", True)


def test_langchain_for_embeddings(embedding: LiveServer, vectors: list[Any]) -> None:
    """By default LangChain sends ids of OpenAI's tokens, which are no other model's."""
    code = """
from langchain_openai import OpenAIEmbeddings
settings = dict(base_url=url + "/v1", api_key="none", model="model", check_embedding_ctx_length=False)
[*OpenAIEmbeddings(**settings).embed_documents(texts[:2]), OpenAIEmbeddings(**settings).embed_query(texts[2])]
"""
    assert run(python_client("openai", "drive_langchain_openai"), embedding.url, code) == vectors


@pytest.mark.parametrize("hub", ["1.33", "2.4"])
@pytest.mark.parametrize("path", ["", "/embed", "/invocations"])
def test_huggingface_hub_for_embeddings(embedding: LiveServer, vectors: list[Any], hub: str, path: str) -> None:
    driver = python_client(HUBS[hub], "drive_huggingface_hub")
    code = """
from huggingface_hub import InferenceClient
InferenceClient(url).feature_extraction(texts, normalize=True, truncate=True, truncation_direction="right").tolist()
"""
    assert run(driver, embedding.url + path, code) == vectors
    code = "from huggingface_hub import InferenceClient\nInferenceClient(url).feature_extraction(texts[0]).tolist()"
    assert run(driver, embedding.url + path, code) == (vectors[0] if path == "/invocations" else vectors[:1])


@pytest.mark.parametrize("path", ["", "/similarity"])
def test_sentence_similarity(embedding: LiveServer, path: str) -> None:
    code = """
from huggingface_hub import InferenceClient
InferenceClient(url).sentence_similarity(texts[0], other_sentences=texts)
"""
    found = run(python_client(HUBS["2.4"], "drive_huggingface_hub"), embedding.url + path, code)
    assert found[0] == pytest.approx(1)
    assert max(found[1:]) < 1


cohere = drivers("cohere", "drive_cohere")


@pytest.mark.parametrize("version", [1, 2])
def test_cohere(cohere: Driver, ranking: LiveServer, version: int) -> None:
    ranks = http.post(f"{ranking.url}/rerank", json={"query": "a b", "texts": TEXTS}).json()
    asked: dict[str, Any] = {"version": version, "model": "rerank-v3.5", "documents": TEXTS, "top_n": 2}
    answer = cohere.generate(ranking.url, "a b", **asked)
    assert answer["id"].startswith("rerank-")
    found = [(item["index"], item["relevance_score"]) for item in answer["results"]]
    assert found == [(rank["index"], rank["score"]) for rank in ranks[:2]]
    shown = [item.get("document") and item["document"]["text"] for item in answer["results"]]
    assert shown == ([TEXTS[index] for index, _ in found] if version == 1 else [None, None])


@pytest.mark.parametrize("version", [1, 2])
def test_coheres_errors(cohere: Driver, ranking: LiveServer, embedding: LiveServer, version: int) -> None:
    asked: dict[str, Any] = {"version": version, "model": "model", "documents": []}
    refused = cohere.call("generate", ranking.url, "a", **asked)
    assert refused.error == "cohere.errors.bad_request_error.BadRequestError"
    assert "'documents' must be a list of strings" in refused.message
    by_cosine = cohere.call("generate", embedding.url, "a", **{**asked, "documents": TEXTS})
    assert by_cosine.error is None, "an embedding model ranks too, as in vLLM"
    assert len(by_cosine.answer["results"]) == len(TEXTS)
