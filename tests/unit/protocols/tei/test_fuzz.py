"""Bodies of embeddings, rerank and labels of any JSON: each is read, or refused in its dialect's form."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handler.core.errors import ServingError
from handler.protocols.openai.completions import OpenAiEmbeddings
from handler.protocols.rerank import request as rerank
from handler.protocols.tei import request as tei
from tests.unit.protocols.answers import CAPABLE, DIALECTS

POOLED = ["openai_embeddings", "lmi_embedding", "tei_embed", "tei_similarity", "tei_rerank", "tei_predict", "rerank"]
NAMES = sorted(
    {"inputs", "input", "query", "texts", "documents", "parameters", "model", "text", "source_sentence", "sentences"}
    | OpenAiEmbeddings.table.parameters.keys()
    | rerank.TABLE.parameters.keys()
    | tei.EMBED.parameters.keys()
)
PLAIN = st.one_of(st.none(), st.booleans(), st.integers(-2, 9), st.floats(allow_nan=False), st.sampled_from(["", "a"]))
VALUE = st.recursive(
    PLAIN, lambda part: st.lists(part, max_size=3) | st.dictionaries(st.sampled_from(NAMES), part, max_size=3)
)


@pytest.mark.parametrize("dialect", POOLED)
@given(body=st.one_of(VALUE, st.dictionaries(st.sampled_from(NAMES), VALUE, max_size=6)))
def test_any_body_is_read_or_refused(dialect: str, body: Any) -> None:
    schema = DIALECTS[dialect]
    try:
        call = schema.parse(body, CAPABLE)
    except ServingError as error:
        found = schema.errors_of(body, CAPABLE).whole(error)
        assert 400 <= found.status < 500
        assert json.loads(found.body)
    else:
        assert call.requests
        assert all(request.pooling is not None and request.prompt for request in call.requests)
