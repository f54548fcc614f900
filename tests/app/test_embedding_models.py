"""Small models with random weights over HTTP: transformers' own numbers (golden), alone and in company."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.app.server import serve
from tests.doubles.hub import files_of, serve_hub
from tests.servers import LiveServer, http
from tests.unit.engines.pooling.models import CONFIGS, DOCUMENTS, GOLDEN, QUERY, RANKED, TEXTS, write_model

WANTED = json.loads(GOLDEN.read_text())
WORDS = [" ".join(f"w{id}" for id in ids[1:-1]) for ids in TEXTS]
"""The tokenizer puts the two special tokens around them."""

MOST = CONFIGS["bert"]["max_position_embeddings"]
LONG = " ".join(["w7"] * 2 * MOST)
FITS = " ".join(["w7"] * (MOST - 2))


def served(directory: Path, name: str, **files: Any) -> Iterator[LiveServer]:
    """A server of a model, whose task is read from its files."""
    model = write_model(directory, name)
    for stem, value in files.items():
        (model / f"{stem}.json").write_text(json.dumps(value))
    with serve(str(model), "-o", "option.dtype=fp32") as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="module")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    prompts = {"prompts": {"query": "w5 "}}
    yield from served(tmp_path_factory.mktemp("model"), "bert", config_sentence_transformers=prompts)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    yield from served(tmp_path_factory.mktemp("model"), "bert classifier")


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    yield from served(tmp_path_factory.mktemp("model"), "bert reranker")


def ask(server: LiveServer, path: str, body: Any, status: int = 200) -> Any:
    found = http.post(server.url + path, json=body)
    assert found.status_code == status, found.text
    return found.json()


def raw(server: LiveServer, texts: Any) -> numpy.ndarray[Any, Any]:
    answer = ask(server, "/v1/embeddings", {"input": texts, "use_activation": False})
    return numpy.array([item["embedding"] for item in answer["data"]])


def test_embeddings(embedding: LiveServer) -> None:
    wanted = numpy.array(WANTED["bert"]["mean"])
    numpy.testing.assert_allclose(raw(embedding, WORDS), wanted, atol=1e-4)
    numpy.testing.assert_allclose(raw(embedding, TEXTS), wanted, atol=1e-4)
    numpy.testing.assert_allclose(numpy.concatenate([raw(embedding, text) for text in WORDS]), wanted, atol=1e-4)
    normalized = wanted / numpy.linalg.norm(wanted, axis=1, keepdims=True)
    numpy.testing.assert_allclose(ask(embedding, "/embed", {"inputs": WORDS}), normalized, atol=1e-4)
    numpy.testing.assert_allclose(ask(embedding, "/invocations", {"inputs": WORDS[3]}), normalized[3], atol=1e-4)
    (short,) = ask(embedding, "/embed", {"inputs": WORDS[3], "dimensions": 8, "normalize": False})
    numpy.testing.assert_allclose(short, wanted[3, :8], atol=1e-4)


def test_a_model_of_the_hub(tmp_path: Path) -> None:
    """Its task is read from what was fetched. Code and options that lie beside it are the hub's, not the user's."""
    foreign = {"model.py": b"raise SystemExit('it runs')", "serving.properties": b"option.task=rerank\n"}
    files = files_of(write_model(tmp_path / "bert", "bert")) | foreign
    with (
        serve_hub({"someone/bert": files}) as hub,
        serve("someone/bert", "-o", "option.dtype=fp32", env=hub.environment(tmp_path / "home")) as server,
    ):
        server.wait_ready()
        numpy.testing.assert_allclose(raw(server, WORDS), numpy.array(WANTED["bert"]["mean"]), atol=1e-4)
    assert any(path.endswith("/model.py") for path in hub.asked)


def test_prompts_and_lengths(embedding: LiveServer) -> None:
    named = ask(embedding, "/embed", {"inputs": "w7 w9", "prompt_name": "query"})
    numpy.testing.assert_allclose(named, ask(embedding, "/embed", {"inputs": "w5 w7 w9"}), atol=1e-5)
    refused = ask(embedding, "/embed", {"inputs": ["w7", LONG]}, 413)
    assert refused["error"] == f"'inputs[1]' has {2 * MOST + 2} tokens; the model takes at most {MOST}"
    cut = ask(embedding, "/embed", {"inputs": LONG, "truncate": True})
    numpy.testing.assert_allclose(cut, ask(embedding, "/embed", {"inputs": FITS}), atol=1e-5)


def test_labels(classifier: LiveServer) -> None:
    answers = ask(classifier, "/predict", {"inputs": [[text] for text in WORDS], "raw_scores": True})
    for answer, logits in zip(answers, WANTED["bert classifier"]["logits"], strict=True):
        found = {item["label"]: item["score"] for item in answer}
        assert found == {f"label {index}": pytest.approx(logit, abs=1e-4) for index, logit in enumerate(logits)}
    alone = ask(classifier, "/predict", {"inputs": WORDS[3]})
    assert sum(item["score"] for item in alone) == pytest.approx(1)
    assert alone[0]["label"] == answers[3][0]["label"]


def test_scores_are_those_of_transformers(reranker: LiveServer) -> None:
    wanted = json.loads(RANKED.read_text())["bert reranker"]
    body = {"query": QUERY, "texts": DOCUMENTS, "raw_scores": True}
    found = {rank["index"]: rank["score"] for rank in ask(reranker, "/rerank", body)}
    assert [found[index] for index in range(len(wanted))] == pytest.approx(wanted, abs=1e-4)


def test_rerank(reranker: LiveServer) -> None:
    body: dict[str, Any] = {"query": "w5 w6", "texts": [*WORDS[:3], LONG], "truncate": True, "raw_scores": True}
    together = {rank["index"]: rank["score"] for rank in ask(reranker, "/rerank", body)}
    for index, text in enumerate(body["texts"]):
        (alone,) = ask(reranker, "/rerank", {**body, "texts": [text]})
        assert alone["score"] == pytest.approx(together[index], abs=1e-4)
    assert len({round(score, 3) for score in together.values()}) > 1
    documents = {"query": body["query"], "documents": body["texts"]}
    answer = ask(reranker, "/v2/rerank", documents)
    scores = {item["index"]: item["relevance_score"] for item in answer["results"]}
    assert scores == {index: pytest.approx(1 / (1 + numpy.exp(-score)), abs=1e-4) for index, score in together.items()}
    assert "'documents[3]' has" in ask(reranker, "/v1/rerank", documents, 400)["message"]


# -- LMI's files for engines of DJL's own, and vLLM's routes ------------------------------------------------------


def test_a_file_of_djls_rust_engine_is_served_unchanged(tmp_path: Path) -> None:
    model = write_model(tmp_path, "bert")
    (model / "serving.properties").write_text(
        "engine=Rust\nbatch_size=8\noption.task=text-embedding\nnormalize=False\n"
    )
    with serve(str(model), "-o", "option.dtype=fp32") as server:
        server.wait_ready()
        assert "DJL's own engines do not run here; openvino computes" in server.log
        vectors = [ask(server, "/invocations", {"inputs": text}) for text in WORDS]
        assert numpy.array(vectors) == pytest.approx(raw(server, WORDS), abs=1e-4)
        assert numpy.linalg.norm(vectors[0]) != pytest.approx(1, abs=0.01)
        assert len(ask(server, "/invocations", {"inputs": WORDS})) == len(WORDS)


def test_a_reranker_of_djls_rust_engine_is_one_by_its_files(tmp_path: Path) -> None:
    model = write_model(tmp_path, "bert reranker")
    (model / "serving.properties").write_text("engine=Rust\nreranking=true\noption.task=text-embedding\n")
    with serve(str(model), "-o", "option.dtype=fp32") as server:
        server.wait_ready()
        assert ask(server, "/invocations", {"query": "w5", "texts": ["w7", "w8"]})


def test_vllms_routes_have_the_same_numbers(embedding: LiveServer, classifier: LiveServer) -> None:
    [item] = ask(embedding, "/pooling", {"input": WORDS[0], "use_activation": False})["data"]
    assert numpy.array([item["data"]]) == pytest.approx(raw(embedding, WORDS[:1]), abs=1e-4)
    [item] = ask(classifier, "/classify", {"input": WORDS[0]})["data"]
    best = ask(classifier, "/predict", {"inputs": WORDS[0]})[0]
    assert (item["label"], max(item["probs"])) == (best["label"], pytest.approx(best["score"], abs=1e-4))
