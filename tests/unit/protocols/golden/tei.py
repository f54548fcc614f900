"""The golden cases of embeddings, rerank and labels, in every dialect."""

from __future__ import annotations

from typing import Any

from handler.core.errors import Overloaded, PromptTooLong
from handler.core.values import Delta
from tests.unit.protocols.answers import failing, refused

PAIR: dict[str, Any] = {"query": "What is deep learning?", "texts": ["A cheese", "A kind of learning", "Ü"]}
RERANK: dict[str, Any] = {"query": PAIR["query"], "documents": ["A cheese", {"text": "A kind", "id": 7}, "Ü"]}
SENTENCES = {"source_sentence": "A cat", "sentences": ["A kitten", "A car"]}
TOO_LONG = refused(PromptTooLong("input", 600, 512))
BUSY = refused(Overloaded("the queue is full"))

_OPENAI = {
    "one": ({"input": "What is"}, None),
    "several": ({"input": ["What", "is"], "model": "model", "user": "me"}, None),
    "ids": ({"input": [[0, 1], [4]]}, None),
    "base64": ({"input": "What is", "encoding_format": "base64", "dimensions": 2}, None),
    "none": ({"input": []}, None),
    "wrong": ({"input": "a", "encoding_format": "int8"}, None),
    "too_long": ({"input": "a"}, TOO_LONG),
    "busy": ({"input": "a"}, BUSY),
    "fails": ({"input": "a"}, failing(0)),
}
_LMI = {
    "one": ({"inputs": "What is"}, None),
    "several": ({"inputs": ["What is"], "parameters": {"normalize": False}}, None),
    "of_tei": ({"inputs": "What is", "truncate": True}, None),
    "none": ({"text": "a"}, None),
    "wrong": ({"inputs": "a", "parameters": {"normalize": 1}}, None),
    "wrong_of_tei": ({"inputs": "a", "normalize": 1}, None),
    "fails": ({"inputs": "a"}, failing(0)),
    "busy": ({"inputs": "a"}, BUSY),
}
_TEI: dict[str, dict[str, tuple[Any, Any]]] = {
    "embed": {
        "one": ({"inputs": "What is"}, None),
        "several": ({"inputs": ["What", [0, 1]], "normalize": False, "truncate": True}, None),
        "none": ({"inputs": []}, None),
        "wrong": ({"inputs": "a", "truncation_direction": "up"}, None),
        "prompt_name": ({"inputs": "a", "prompt_name": "query"}, None),
        "not_json": (b"{", None),
        "too_long": ({"inputs": "a"}, TOO_LONG),
        "busy": ({"inputs": "a"}, BUSY),
        "fails": ({"inputs": "a"}, failing(0)),
    },
    "similarity": {"one": ({"inputs": SENTENCES}, None), "wrong": ({"inputs": "a"}, None)},
    "rerank": {
        "plain": (PAIR, None),
        "text": ({**PAIR, "return_text": True, "raw_scores": True}, None),
        "none": ({**PAIR, "texts": []}, None),
        "wrong": ({"query": "", "texts": ["a"]}, None),
    },
    "predict": {
        "one": ({"inputs": "I like you."}, None),
        "several": ({"inputs": [["a"], ["b", "c"]], "raw_scores": True}, None),
        "wrong": ({"inputs": ["a", "b", "c"]}, None),
    },
}
_RERANK = {
    "plain": (RERANK, None),
    "top": ({**RERANK, "top_n": 1, "return_documents": False, "model": "model"}, None),
    "chunks": ({**RERANK, "max_chunks_per_doc": 5}, None),
    "wrong": ({**RERANK, "documents": [{"title": "a"}]}, None),
    "too_long": (RERANK, TOO_LONG),
    "busy": (RERANK, BUSY),
    "fails": (RERANK, failing(0)),
}

CASES: dict[str, tuple[str, Any, list[Delta] | None]] = {
    **{f"embeddings/openai_{name}": ("openai_embeddings", *case) for name, case in _OPENAI.items()},
    **{f"embeddings/lmi_{name}": ("lmi_embedding", *case) for name, case in _LMI.items()},
    **{f"tei/{route}_{name}": (f"tei_{route}", *case) for route, cases in _TEI.items() for name, case in cases.items()},
    **{f"rerank/{name}": ("rerank", *case) for name, case in _RERANK.items()},
    "rerank/v2_plain": ("rerank_v2", RERANK, None),
    "rerank/by_documents": ("tei_rerank", RERANK, None),
}
