"""Checks of a parsed request against the engine's vocabulary."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from handler.core.errors import InvalidParameter
from handler.core.values import Request, Sampling
from handler.serving.encoder import Encoder


@pytest.mark.parametrize("name", ["stop_token_ids", "bad_token_ids", "allowed_token_ids", "logit_bias"])
def test_ids_outside_the_vocabulary_are_refused(name: str) -> None:
    tokenizer: Any = SimpleNamespace(vocabulary=range(10))
    values: dict[str, Any] = {name: ((10, 1.0),) if name == "logit_bias" else (10,)}
    encoder = Encoder(tokenizer, lambda: None, None, None)
    with pytest.raises(InvalidParameter, match="10 is not in the vocabulary of 10 tokens"):
        encoder.encode(Request("", Sampling(max_new_tokens=1, **values), prompt_ids=(1,)))
