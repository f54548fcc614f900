"""The check of TensorRT-LLM's guides, with the xgrammar that vLLM's environment has."""

from __future__ import annotations

from pathlib import Path

import pytest

from handler.config.config import Config
from handler.core.values import StructuredOutput
from handler.engines.base import EngineConfig
from handler.engines.trtllm.sampling import structured_output_check

pytestmark = pytest.mark.vllm


def test_tensorrt_llm_gets_what_costs_little_a_token(hf_demo: Path) -> None:
    check = structured_output_check(
        EngineConfig(Config(engine_options={"guided_decoding_backend": "xgrammar"}), model=hf_demo)
    )
    check(StructuredOutput("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}'))
    check(StructuredOutput("json_object", ""))
    check(StructuredOutput("choice", '["a", "b"]'))
    check(StructuredOutput("regex", "[a-z]{1,4}"))
    with pytest.raises(ValueError, match="takes the engine more than"):
        check(StructuredOutput("grammar", "root ::= [a-z]{300} s\ns ::= s s | [a-z]"))
    with pytest.raises(ValueError, match="is cyclic"):
        check(StructuredOutput("json_schema", '{"anyOf": [{"$ref": "#"}, {"type": "string"}]}'))
