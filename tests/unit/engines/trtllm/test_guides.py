"""What is found out of a guide before TensorRT-LLM gets it, in the process that tries them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from handler.core.values import StructuredOutput
from handler.engines.base import EngineConfig
from handler.engines.structured_output.validator import StructuredOutputValidator
from handler.engines.trtllm.sampling import structured_output_check


@pytest.fixture(scope="module")
def checks() -> Iterator[StructuredOutputValidator]:
    found = StructuredOutputValidator(partial(structured_output_check, EngineConfig()), seconds=1.0, memory=64 << 20)
    yield found
    found.close()


@pytest.mark.parametrize(
    ("structured_output", "wanted"),
    [
        (StructuredOutput("regex", r"\d+|\p{Lu}[\P{N}x]*"), ""),
        (StructuredOutput("regex", "("), "it is not a regular expression: missing )"),
        (StructuredOutput("regex", "(" * 16_000), "it is not a regular expression"),
        (StructuredOutput("regex", "(?i)" + "[a-\U0010ffff]" * 800), "more than 1 s (option.guide_timeout)"),
        (StructuredOutput("grammar", "("), ""),
        (StructuredOutput("json_schema", "{}"), ""),
    ],
)
def test_an_expression_that_is_none_or_takes_too_long_is_refused(
    checks: StructuredOutputValidator, structured_output: StructuredOutput, wanted: str
) -> None:
    found = checks.check(structured_output).result(60)
    assert wanted in found
    assert bool(found) == bool(wanted)
