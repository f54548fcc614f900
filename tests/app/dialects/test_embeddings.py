"""Embeddings, rerank and labels over HTTP, with echo and with small models."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.app.server import serve
from tests.doubles.downloads import files_of, serve_hub
from tests.servers import LiveServer, ask, http, options
from tests.unit.engines.pooling_models import CONFIGS, DOCUMENTS, GOLDEN, QUERY, RANKED, TEXTS, write_model

# -- embeddings, rerank and labels over HTTP: the routes of one model agree, and name what is not served ---------------


ECHO_TEXTS = ["a b", "c", "ü 日本 d"]
ECHO_QUERY = "a b"


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, LiveServer]]:
    """A server of the echo engine by task."""
    with (
        serve("--engine", "echo", *options("option.task=feature-extraction")) as embedding,
        serve("--engine", "echo", *options("option.task=rerank")) as rerank,
        serve("--engine", "echo", *options("option.task=classify")) as labels,
        serve("--engine", "echo") as chat,
    ):
        yield {"text-embedding": embedding, "rerank": rerank, "text-classification": labels, "text-generation": chat}


CHAT = {"messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d"}]}


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({}, "user: a b\nassistant: c d"),
        ({"add_generation_prompt": True}, "user: a b\nassistant: c d\nassistant:"),
        ({"continue_final_message": True}, "user: a b\nassistant: c d"),
        ({"truncate_prompt_tokens": 2}, "user: a"),
        ({"truncate_prompt_tokens": 2, "truncation_side": "left"}, "c d"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "e"}]}], "input": None}, "user: e"),
    ],
)
def test_a_chat_is_one_text(servers: dict[str, LiveServer], more: dict[str, Any], text: str) -> None:
    server, chat = servers["text-embedding"], {**CHAT, **more}
    for path, field in (("/v1/embeddings", "embedding"), ("/pooling", "data")):
        found, expected = ask(server, path, chat), ask(server, path, {"input": text})
        assert [item[field] for item in found["data"]] == [item[field] for item in expected["data"]]
        assert found["usage"] == expected["usage"]
    labels = servers["text-classification"]
    found, expected = ask(labels, "/classify", chat), ask(labels, "/classify", {"input": text})
    assert found["data"] == expected["data"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({**CHAT, "input": "a"}, "'messages': send either 'input' or 'messages'"),
        ({**CHAT, "continue_final_message": True, "add_generation_prompt": True}, "continue_final_message: requires"),
        ({**CHAT, "chat_template": "x"}, 'chat_template="x": is not supported: set option.chat_template'),
        ({**CHAT, "truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]}, "text only"),
        ({"messages": "a"}, "'messages' must be a non-empty list"),
        ({"messages": []}, "'input' must be"),
        ({"input": "a", "add_generation_prompt": True}, "no chat template is applied to texts; send messages"),
        ({"input": "a", "chat_template_kwargs": {"a": 1}}, "no chat template is applied to texts; send messages"),
        ({"messages": [{"role": "user", "content": "a " * 200_000}]}, "'messages' has"),
    ],
)
def test_a_chat_that_has_no_embedding_is_refused(servers: dict[str, LiveServer], body: Any, words: str) -> None:
    for path in ("/v1/embeddings", "/pooling"):
        assert words in ask(servers["text-embedding"], path, body, 400)["error"]["message"], path


@pytest.mark.parametrize(
    ("settings", "route", "field", "most", "texts"),
    [
        ("option.task=text-embedding option.max_model_len=16", "/v1/embeddings", "input", 16, 2048),
        ("option.task=text-embedding option.max_input_len=5", "/v1/embeddings", "input", 5, 2048),
        ("option.max_model_len=16", "/v1/completions", "prompt", 15, 256),
        ("option.max_input_len=5", "/v1/completions", "prompt", 5, 256),
    ],
)
def test_info_names_the_limits_that_hold(settings: str, route: str, field: str, most: int, texts: int) -> None:
    with serve("--engine", "echo", *options(*settings.split())) as server:
        server.wait_ready()
        info = http.get(server.url + "/info").json()
        assert (info["max_input_tokens"], info["max_client_batch_size"]) == (most, texts)
        for value, status in (("a " * most, 200), ("a " * (most + 1), 400), (["a"] * (texts + 1), 400)):
            body = {field: value} if field == "input" else {field: value, "max_tokens": 1}
            ask(server, route, body, status)


# -- embeddings --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vectors(servers: dict[str, LiveServer]) -> list[list[float]]:
    found: list[list[float]] = ask(servers["text-embedding"], "/embed", {"inputs": ECHO_TEXTS})
    return found


def test_all_routes_have_the_same_vectors(servers: dict[str, LiveServer], vectors: list[list[float]]) -> None:
    server = servers["text-embedding"]
    assert len({tuple(vector) for vector in vectors}) == len(ECHO_TEXTS)
    assert all(sum(number * number for number in vector) == pytest.approx(1) for vector in vectors)
    answer = ask(server, "/v1/embeddings", {"input": ECHO_TEXTS})
    assert [item["embedding"] for item in answer["data"]] == vectors
    assert [item["index"] for item in answer["data"]] == [0, 1, 2]
    assert answer["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
    assert ask(server, "/", {"inputs": ECHO_TEXTS}) == vectors
    assert ask(server, "/invocations", {"inputs": ECHO_TEXTS}) == vectors
    assert [ask(server, "/invocations", {"inputs": text}) for text in ECHO_TEXTS] == vectors
    assert ask(server, "/invocations", {"inputs": ECHO_TEXTS[0], "truncate": True}) == vectors[:1]
    assert ask(server, "/invocations", {"input": ECHO_TEXTS[0]})["data"][0]["embedding"] == vectors[0]
    assert (
        http.post(f"{server.url}/invocations", content="a b", headers={"content-type": "text/plain"}).json()
        == (vectors[0])
    )


def test_by_the_custom_attributes_too(servers: dict[str, LiveServer], vectors: list[list[float]]) -> None:
    headers = {"x-amzn-sagemaker-custom-attributes": "route=/embed"}
    assert servers["text-embedding"].post({"inputs": ECHO_TEXTS[0]}, headers=headers).json() == vectors[:1]
    headers = {"x-amzn-sagemaker-custom-attributes": "route=/v1/chat/completions"}
    refused = servers["text-embedding"].post({"messages": []}, headers=headers)
    assert "available routes: /invocations" in refused.text
    assert "/v1/embeddings" in refused.text


def test_base64_has_the_same_numbers(servers: dict[str, LiveServer], vectors: list[list[float]]) -> None:
    answer = ask(servers["text-embedding"], "/v1/embeddings", {"input": ECHO_TEXTS, "encoding_format": "base64"})
    data = [base64.b64decode(item["embedding"]) for item in answer["data"]]
    assert [list(struct.unpack(f"<{len(one) // 4}f", one)) for one in data] == [
        pytest.approx(vector, rel=1e-6) for vector in vectors
    ]


def test_dimensions_and_length(servers: dict[str, LiveServer], vectors: list[list[float]]) -> None:
    server, num = servers["text-embedding"], len(vectors[0])
    (short,) = ask(server, "/embed", {"inputs": "a b", "dimensions": 2})
    assert len(short) == 2
    assert sum(number * number for number in short) == pytest.approx(1)
    refused = ask(server, "/v1/embeddings", {"input": "a b", "dimensions": num + 1}, 400)
    assert refused["error"]["param"] == "dimensions"
    (raw,) = ask(server, "/embed", {"inputs": "a b", "normalize": False})
    assert sum(number * number for number in raw) > 2
    assert ask(server, "/v1/embeddings", {"input": "a b", "use_activation": False})["data"][0]["embedding"] == raw


def test_similarity_is_the_cosine(servers: dict[str, LiveServer], vectors: list[list[float]]) -> None:
    inputs = {"source_sentence": ECHO_TEXTS[0], "sentences": ECHO_TEXTS}
    cosines = [sum(one * other for one, other in zip(vectors[0], vector, strict=True)) for vector in vectors]
    for path in ("/similarity", "/", "/invocations"):
        assert ask(servers["text-embedding"], path, {"inputs": inputs}) == pytest.approx(cosines)


def test_truncation(servers: dict[str, LiveServer]) -> None:
    server, long = servers["text-embedding"], "a b c d"
    for side, kept in {"right": "a b", "left": "c d"}.items():
        cut = {"truncate_prompt_tokens": 2, "truncation_side": side}
        answer = ask(server, "/v1/embeddings", {"input": long, **cut})
        assert answer["usage"]["prompt_tokens"] == 2
        assert answer["data"] == ask(server, "/v1/embeddings", {"input": kept})["data"]


def test_each_text_is_a_request(servers: dict[str, LiveServer]) -> None:
    server = servers["text-embedding"]
    found = http.post(f"{server.url}/embed", json={"inputs": [f"{number} a" for number in range(300)]})
    assert len({tuple(vector) for vector in found.json()}) == 300
    assert found.headers["x-compute-tokens"] == "600"
    assert found.headers["x-compute-characters"] == "1390"
    assert ask(server, "/embed", {"inputs": ["a"] * 2049}, 413) == {
        "error": "'inputs' has 2049 texts; the maximum is 2048", "error_type": "Validation",
    }  # fmt: skip


def test_a_body_is_taken_whole_where_the_queue_has_room_for_its_first_text() -> None:
    room = options("option.max_rolling_batch_size=1", "job_queue_size=1")
    with serve("--engine", "echo", *options("option.task=embed"), *room) as server:
        assert len(ask(server, "/embed", {"inputs": [str(number) for number in range(2048)]})) == 2048


# -- rerank and labels -------------------------------------------------------------------------------------------


def test_all_routes_have_the_same_ranks(servers: dict[str, LiveServer]) -> None:
    server = servers["rerank"]
    ranks = ask(server, "/rerank", {"query": ECHO_QUERY, "texts": ECHO_TEXTS, "return_text": True})
    scores = [rank["score"] for rank in ranks]
    assert scores == sorted(scores, reverse=True)
    assert all(0 < score < 1 for score in scores)
    assert [rank["text"] for rank in ranks] == [ECHO_TEXTS[rank["index"]] for rank in ranks]
    assert {rank["index"] for rank in ranks} == {0, 1, 2}
    expected = [{"index": rank["index"], "relevance_score": rank["score"]} for rank in ranks]
    shown = [{**item, "document": {"text": ECHO_TEXTS[item["index"]]}} for item in expected]
    for path, results in {"/rerank": shown, "/v1/rerank": shown, "/v2/rerank": expected, "/invocations": shown}.items():
        answer = ask(server, path, {"query": ECHO_QUERY, "documents": ECHO_TEXTS})
        assert answer["results"] == results
        assert answer["usage"]["prompt_tokens"] > 0
    top = ask(
        server, "/v2/rerank", {"query": ECHO_QUERY, "documents": ECHO_TEXTS, "top_n": 1, "return_documents": True}
    )
    assert top["results"] == shown[:1]
    assert ask(server, "/invocations", {"query": ECHO_QUERY, "texts": ECHO_TEXTS}) == [
        {"index": rank["index"], "score": rank["score"]} for rank in ranks
    ]
    raw = ask(server, "/", {"query": ECHO_QUERY, "texts": ECHO_TEXTS, "raw_scores": True})
    assert [rank["index"] for rank in raw] == [rank["index"] for rank in ranks]
    assert not all(0 < rank["score"] < 1 for rank in raw)


def test_an_embedding_model_ranks_by_the_cosine_that_score_has(servers: dict[str, LiveServer]) -> None:
    server = servers["text-embedding"]
    scores = [row["score"] for row in ask(server, "/score", {"text_1": ECHO_QUERY, "text_2": ECHO_TEXTS})["data"]]
    best_first = sorted(range(len(scores)), key=lambda index: -scores[index])
    assert scores[0] == pytest.approx(1)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        answer = ask(server, path, {"query": ECHO_QUERY, "documents": [*ECHO_TEXTS, ECHO_TEXTS[1]], "top_n": 3})
        assert [rank["index"] for rank in answer["results"]][:2] == best_first[:2]
        found = {rank["index"]: rank["relevance_score"] for rank in answer["results"]}
        assert [found[index] for index in best_first[:2]] == [scores[index] for index in best_first[:2]]
    long = {"query": "a " * 200_000, "documents": ["b"]}
    assert "query" in http.post(server.url + "/v1/rerank", json=long).text
    models = http.get(server.url + "/v1/models").json()["data"]
    assert [model["input_modalities"] for model in models] == [["text"]] * 2


def test_labels_in_embeddings(servers: dict[str, LiveServer]) -> None:
    server = servers["text-classification"]
    one = ask(server, "/predict", {"inputs": "a b"})
    assert sum(label["score"] for label in one) == pytest.approx(1)
    assert one == sorted(one, key=lambda label: -label["score"])
    assert {label["label"] for label in one} == {"LABEL_0", "LABEL_1"}
    assert ask(server, "/invocations", {"inputs": [["a b"], ["c", "d"]]})[0] == one
    assert ask(server, "/", {"inputs": ["c", "d"]}) != one


# -- what is not served ------------------------------------------------------------------------------------------

ROUTES = {
    "text-generation": ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/generate"],
    "text-embedding": ["/v1/embeddings", "/embed", "/similarity"],
    "rerank": ["/rerank", "/v1/rerank", "/v2/rerank"],
    "text-classification": ["/predict"],
}


@pytest.mark.parametrize("task", ROUTES)
def test_routes_for_other_tasks_say_what_the_model_is_for(servers: dict[str, LiveServer], task: str) -> None:
    for other, paths in ROUTES.items():
        tasks = (
            "text-embedding or rerank" if other == "rerank" else other
        )  # which an embedding model does by the cosine
        for path in paths if task not in tasks.split(" or ") else ():
            found = http.post(servers[task].url + path, json={"inputs": "a"})
            assert found.status_code == 404, path
            assert f"it requires option.task={tasks}, but this model's task is {task}" in found.text
            assert found.json().keys() <= {"error", "error_type", "message", "type"}


@pytest.mark.parametrize("path", ["/embed_all", "/embed_sparse", "/embeddings", "/decode", "/vertex"])
def test_other_routes_of_tei_are_refused_by_name(servers: dict[str, LiveServer], path: str) -> None:
    answer = ask(servers["text-embedding"], path, {"inputs": "a"}, 404)
    assert answer["error"].startswith(f"{path} is not served here: ")


@pytest.mark.parametrize("task", ROUTES)
def test_the_task_is_told(servers: dict[str, LiveServer], task: str) -> None:
    url, generates = servers[task].url, task == "text-generation"
    info = http.get(f"{url}/info").json()
    assert info["model_pipeline_tag"] == task
    assert info["max_total_tokens"] - info["max_input_tokens"] == generates
    assert (info["max_client_batch_size"] == 2048) is not generates
    assert ("generate" in http.get(f"{url}/v2").json()["extensions"]) is generates
    for path in ("", "/config"):
        assert http.get(f"{url}/v2/models/model{path}").status_code == (200 if generates else 404)
    assert http.get(f"{url}/v2/models/model/ready").status_code == 200


def test_tgi_compat_has_teis_answer_at_invocations(vectors: list[list[float]]) -> None:
    with serve("--engine", "echo", *options("option.task=embed", "option.tgi_compat=true")) as server:
        assert server.post({"inputs": ECHO_TEXTS[0]}).json() == vectors[:1]
        assert server.post({"inputs": ""}).json()["error_type"] == "Validation"


# -- small models with random weights over HTTP: transformers' own numbers (golden), alone and in company --------------


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


def test_a_model_of_the_hub_in_embeddings(tmp_path: Path) -> None:
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
    assert refused["error"].startswith(f"'inputs[1]' has {2 * MOST + 2} tokens; the model accepts at most {MOST}. ")
    cut = ask(embedding, "/embed", {"inputs": LONG, "truncate": True})
    numpy.testing.assert_allclose(cut, ask(embedding, "/embed", {"inputs": FITS}), atol=1e-5)


def test_labels_of_a_small_model(classifier: LiveServer) -> None:
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
