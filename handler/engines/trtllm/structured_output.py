"""What is found out of a client's guide before TensorRT-LLM gets it: whether an expression is one.

TensorRT-LLM has its guides compiled in C++, by no part of it that could be used without the engine. What it would do
with text that is no expression at all is not left to it.
"""

from __future__ import annotations

import re

from handler.core.values import StructuredOutput
from handler.engines.base import EngineConfig, StructuredOutputCheck

_CLASS = re.compile(r"\\[pP]\{[^}]*\}")  # Unicode classes, which Python's expressions lack and the engine's have


def check(structured_output: StructuredOutput) -> None:
    """Raises ValueError: it is no regular expression. Some take seconds to tell, so this needs limits about it."""
    if structured_output.kind == "regex":
        try:
            re.compile(_CLASS.sub("x", structured_output.value))
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"it is no regular expression: {str(error) or 'nested too deeply'}") from None


def structured_output_check(config: EngineConfig) -> StructuredOutputCheck:
    return check
