"""Bodies and answers of embeddings, rerank and labels."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from handler.config.lmi_version import VERSIONS, LmiVersion
from handler.core.framing import JSON, Framing
from handler.core.values import Delta, Extras, Finish, Pooling, Task, Truncation
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.dialect import Dialect
from handler.protocols.lmi.embedding import LmiEmbedding
from handler.protocols.openai.completions import OpenAiEmbeddings
from handler.protocols.tei.request import TeiEmbed
from tests.one_test import in_one_test
from tests.unit.protocols.answers import DIALECTS, VECTORS, VOCABULARY, answer, with_options

# -- bodies of embeddings, rerank and labels: what the engine is asked for, and what is refused by name ----------------


CONTEXT = ServerContext("echo", vocabulary=VOCABULARY, prompts={"query": "query: "}, most_tokens=lambda: 512)
PAIR = {"query": "a", "texts": ["b", "c"]}
DOCUMENTS = {"query": "a", "documents": ["b", {"text": "c"}]}
RIGHT = Truncation(side="right")
SENTENCES = {"source_sentence": "a", "sentences": ["b"]}

ASKED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("openai_embeddings", {"input": "a"}, {"prompt": ["a"], "pooling": Pooling("embed"), "truncation": None}),
    ("openai_embeddings", {"input": ["a", [4, 1]]}, {"prompt": ["a", "c b"], "prompt_ids": [None, (4, 1)]}),
    ("openai_embeddings", {"input": [4]}, {"prompt": ["c"], "prompt_ids": [(4,)]}),
    ("openai_embeddings", {"input": "a", "dimensions": 2}, {"pooling": Pooling("embed", 2)}),
    ("openai_embeddings", {"input": "a", "use_activation": False}, {"pooling": Pooling("embed", None, False)}),
    ("openai_embeddings", {"input": "a", "truncate_prompt_tokens": -1}, {"truncation": RIGHT}),
    ("openai_embeddings", {"input": "a", "truncate_prompt_tokens": 3, "truncation_side": "left"},
     {"truncation": Truncation(3, "left")}),
    ("openai_embeddings", {"input": "a", "truncation_side": "left"}, {"truncation": None}),
    ("openai_embeddings", {"input": "a", "priority": -3}, {"priority": -3}),
    ("tei_embed", {"inputs": ["a", [0]], "prompt_name": "query"}, {"prompt": ["query: a", "a"]}),
    ("tei_embed", {"inputs": "a", "truncate": True}, {"truncation": RIGHT}),
    ("tei_embed", {"inputs": "a", "truncate": True, "truncation_direction": "Left"},
     {"truncation": Truncation(side="left")}),
    ("tei_embed", {"inputs": "a", "truncation_direction": "left"}, {"truncation": None}),
    ("tei_similarity", {"inputs": SENTENCES, "parameters": {"truncate": True, "prompt_name": "query"}},
     {"prompt": ["query: a", "query: b"], "truncation": RIGHT, "pooling": Pooling("embed")}),
    ("lmi_embedding", {"inputs": "a", "parameters": {"normalize": False, "truncate": True, "dimensions": 2}},
     {"pooling": Pooling("embed", 2, False), "truncation": RIGHT}),
    ("tei_rerank", PAIR, {"prompt": ["a", "a"], "pair": ["b", "c"], "pooling": Pooling("score")}),
    ("tei_rerank", {**PAIR, "raw_scores": True, "truncate": True},
     {"pooling": Pooling("score", None, False), "truncation": RIGHT}),
    ("tei_predict", {"inputs": "a"}, {"prompt": ["a"], "pair": [None], "pooling": Pooling("classify")}),
    ("tei_predict", {"inputs": ["a", "b"]}, {"prompt": ["a"], "pair": ["b"]}),
    ("tei_predict", {"inputs": [["a"], ["b", "c"]]}, {"prompt": ["a", "b"], "pair": [None, "c"]}),
    ("rerank", DOCUMENTS, {"pair": ["b", "c"], "pooling": Pooling("score"), "truncation": None}),
    ("rerank", {**DOCUMENTS, "documents": "b", "truncate_prompt_tokens": 9, "use_activation": False},
     {"pair": ["b"], "truncation": Truncation(9, "right"), "pooling": Pooling("score", None, False)}),
    ("rerank_v2", {**DOCUMENTS, "max_tokens_per_doc": 4096, "priority": 2}, {"truncation": RIGHT, "priority": 2}),
]  # fmt: skip


@in_one_test(("dialect", "body", "fields"), ASKED, ids=str)
def test_what_the_engine_is_asked_for(dialect: str, body: dict[str, Any], fields: dict[str, Any]) -> None:
    requests = DIALECTS[dialect].parse(body, CONTEXT).requests
    for name, wanted in fields.items():
        found = [getattr(request, name) for request in requests]
        assert found == (wanted if isinstance(wanted, list) else [wanted] * len(found))


@pytest.mark.parametrize(
    ("dialect", "body", "own"),
    [
        ("lmi_embedding", {"inputs": "a"}, {"parameters": {"normalize": True}}),
        ("tei_embed", {"inputs": "a"}, {"normalize": True}),
        ("openai_embeddings", {"input": "a"}, {"use_activation": True}),
    ],
)
def test_option_normalize_is_for_requests_that_do_not_say(
    dialect: str, body: dict[str, Any], own: dict[str, Any]
) -> None:
    context = with_options(CONTEXT, normalize=False)
    (request,) = DIALECTS[dialect].parse(body, context).requests
    assert request.pooling == Pooling("embed", normalize=False)
    (request,) = DIALECTS[dialect].parse({**body, **own}, context).requests
    assert request.pooling == Pooling("embed")


@in_one_test("version", VERSIONS)
def test_embeddings_of_async_mode_are_lists_since_0_36(version: LmiVersion) -> None:
    context = with_options(CONTEXT, lmi_version=version, async_mode=True)
    since = version >= (0, 36)
    for body, of_release in (("a", [VECTORS["embed"][0]] if since else VECTORS["embed"][0]), (["a"], None)):
        found = answer("lmi_embedding", {"inputs": body}, context=context)
        assert json.loads(found.body) == (of_release or [VECTORS["embed"][0]])
    refused = answer("lmi_embedding", {"inputs": 1}, context=context)
    assert refused.status == 424
    assert json.loads(refused.body)["error"].startswith("Input parsing failed: ") is since
    other = with_options(context, async_mode=False)
    assert json.loads(answer("lmi_embedding", {"inputs": "a"}, context=other).body) == VECTORS["embed"][0]


REFUSED: list[tuple[str, Any, str]] = [
    ("openai_embeddings", [], "the body must be a JSON object with 'input'"),
    ("openai_embeddings", {}, "'input' must be a string"),
    ("openai_embeddings", {"input": ""}, "'input' must not be empty"),
    ("openai_embeddings", {"input": ["a", ""]}, "'input' must not be empty"),
    ("openai_embeddings", {"input": ["a", {}]}, "'input' must be a string"),
    ("openai_embeddings", {"input": [-1]}, "'input' must contain token ids of at least 0"),
    ("openai_embeddings", {"input": [6]}, "'input' contains ids that are not in the vocabulary of 6"),
    ("openai_embeddings", {"input": ["a"] * 2049}, "'input' has 2049 texts; the maximum is 2048"),
    ("openai_embeddings", {"input": "a", "model": "other"}, "Model not found: other"),
    ("openai_embeddings", {"input": "a", "dimensions": 0}, "dimensions=0: must be an integer"),
    ("openai_embeddings", {"input": "a", "encoding_format": "bytes"}, 'encoding_format="bytes": must be float'),
    ("openai_embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0: must be at least 1"),
    ("openai_embeddings", {"input": "a", "embed_dtype": "float16"}, 'embed_dtype="float16": is not supported'),
    ("openai_embeddings", {"input": "a", "normalize": True}, "normalize=true: is not supported: send use_act"),
    ("openai_embeddings", {"input": "a", "messages": [{}]}, "'messages': send either 'input' or 'messages'"),
    ("tei_embed", "a", "the body must be a JSON object with 'inputs'"),
    ("tei_embed", {"inputs": "a", "truncate": 1}, "truncate=1: must be true or false"),
    ("tei_embed", {"inputs": "a", "prompt_name": "x"}, 'prompt_name="x": the model has no such prompt'),
    ("tei_similarity", {"inputs": {"source_sentence": "a"}}, "'inputs.sentences' must be a list of strings"),
    ("tei_similarity", {"inputs": SENTENCES, "parameters": {"truncate": 1}}, "parameters.truncate=1: must be true"),
    ("tei_similarity", {"inputs": SENTENCES, "parameters": 1}, "'inputs' must be an object"),
    ("lmi_embedding", {"inputs": "a", "parameters": 1}, "'parameters' must be an object"),
    ("lmi_embedding", {"messages": []}, "the body has no 'inputs': this server embeds texts"),
    ("tei_rerank", {"query": "a", "texts": ["b", 1]}, "'texts[1]' must be a non-empty string"),
    ("tei_rerank", {"query": "a"}, "'texts' must be a list of strings"),
    (
        "tei_rerank",
        {"query": "a" * 8193, "texts": ["b"] * 2048},
        "'query' has 8193 characters for each of 2048 texts; the maximum is 16777216 in total",
    ),
    ("tei_predict", {"inputs": [["a"], ["b", "c", "d"]]}, "'inputs[1]' must be a string"),
    ("tei_predict", {"inputs": 1}, "'inputs' must be a string"),
    ("tei_predict", {"inputs": [["a"]] * 2049}, "'inputs' has 2049 texts"),
    ("rerank", {"documents": ["a"]}, "'query' must be a non-empty string"),
    ("rerank", {"query": "a" * 16385, "documents": ["b"] * 1024}, "'query' has 16385 characters for each of 1024"),
    ("rerank", {**DOCUMENTS, "documents": [""]}, "'documents[0]' must be a non-empty string"),
    ("rerank", {**DOCUMENTS, "documents": [{"content": []}]}, "'documents[0].text' must be"),
    (
        "rerank",
        {**DOCUMENTS, "documents": [{"text": "a", "n": 10**30}]},
        "'documents' cannot be repeated in the response",
    ),
    ("rerank", {**DOCUMENTS, "rank_fields": ["title"]}, 'rank_fields=["title"]: is not supported'),
    (
        "rerank",
        {**DOCUMENTS, "max_tokens_per_doc": 511},
        "max_tokens_per_doc=511: must not be below the model's limit of 512 tokens",
    ),
    ("rerank", {**DOCUMENTS, "top_n": -1}, "top_n=-1: must be an integer"),
    ("rerank", {**DOCUMENTS, "instruction": "x"}, 'instruction="x": is not supported: add it to the query'),
]


def _id(value: Any) -> str:
    return str(value)[:60]


@in_one_test(("dialect", "body", "message"), REFUSED, ids=_id)
def test_what_is_refused_by_name(dialect: str, body: Any, message: str) -> None:
    found = answer(dialect, body, context=CONTEXT)
    assert 400 <= found.status < 500
    value = json.loads(found.body)
    error = value.get("error", value.get("message"))
    assert (error["message"] if isinstance(error, dict) else error).startswith(message)


@in_one_test(
    ("dialect", "body", "unknown"),
    [
        ("openai_embeddings", {"input": "a", "user": "me", "foo": 1}, ["foo", "user"]),
        ("tei_embed", {"inputs": "a", "foo": 1}, ["foo"]),
        ("lmi_embedding", {"inputs": "a", "foo": 1, "parameters": {"top_p": 0.5}}, ["foo", "parameters.top_p"]),
        ("tei_similarity", {"inputs": SENTENCES, "foo": 1, "parameters": {"foo": 1}}, ["foo", "parameters.foo"]),
        (
            "tei_similarity",
            {"inputs": SENTENCES, "foo": 1, "truncate": True},
            ["foo", "truncate"],
        ),  # not in `parameters`
        ("rerank", {**DOCUMENTS, "foo": 1}, ["foo"]),
    ],
)
def test_unknown_names_are_reported_or_refused_in_pooled(
    dialect: str, body: dict[str, Any], unknown: Sequence[str]
) -> None:
    assert DIALECTS[dialect].parse(body, CONTEXT).ignored == unknown
    refused = answer(dialect, body, context=with_options(CONTEXT, unknown_parameters="refuse"))
    assert b"unknown names: foo" in refused.body


# -- answers of vectors: the last text's delta leaves little to do, however many vectors came before -------------------


VECTOR = (0.25, -1.5, 3.0)
TEXTS = ["a"] * 5


def numbers(value: Any) -> int:
    if isinstance(value, dict):
        value = [*value.values()]
    return sum(map(numbers, value)) if isinstance(value, list | tuple) else isinstance(value, float)


@pytest.mark.parametrize(
    ("schema", "body"),
    [
        (OpenAiEmbeddings(), {"input": TEXTS}),
        (OpenAiEmbeddings(), {"input": TEXTS, "encoding_format": "base64"}),
        (TeiEmbed(), {"inputs": TEXTS}),
        (LmiEmbedding(), {"inputs": TEXTS}),
        (LmiEmbedding(), {"inputs": "a"}),
    ],
)
def test_each_vector_is_encoded_when_it_comes(monkeypatch: pytest.MonkeyPatch, schema: Dialect, body: Any) -> None:
    encoded: list[int] = []
    encode = Framing.encode

    def note(self: Framing, value: Any) -> bytes:
        encoded.append(numbers(value))
        return encode(self, value)

    monkeypatch.setattr(Framing, "encode", note)
    reply = schema.parse(body, ServerContext("echo", task=Task.EMBEDDING)).reply
    texts = next(iter(body.values()))
    count = len(texts) if isinstance(texts, list) else 1
    answer = b""
    for index in range(count):
        reply.start(index, 1)
    for index in reversed(range(count)):
        answer = reply.feed(index, Delta(index, 0, (), Finish.STOP, extras=Extras(vector=VECTOR)))
    assert max(encoded) <= len(VECTOR)
    assert encoded[-1] == 0, "the vectors stand in the answer as they were encoded"
    value = json.loads(answer)
    found = [row["embedding"] for row in value["data"]] if isinstance(value, dict) else value
    assert JSON.encode(found).count(b"0.25,-1.5,3.0") == (0 if "encoding_format" in body else count)
