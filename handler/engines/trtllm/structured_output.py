"""Checks a client's regular expression or grammar before TensorRT-LLM gets it.

TensorRT-LLM compiles in C++, by no part that works without the engine. So only the syntax of an expression is checked,
and that no rule of a grammar is cyclic; what a token costs is not measured.
"""

from __future__ import annotations

import re

from handler.core.values import StructuredOutput
from handler.engines.base import EngineConfig, StructuredOutputCheck
from handler.engines.structured_output.ebnf import later_parts

_CLASS = re.compile(r"\\[pP]\{[^}]*\}")  # Unicode classes, which Python's expressions lack and the engine's have


def check(structured_output: StructuredOutput) -> None:
    """Raise ValueError for a text that is no regular expression, or a grammar with a cyclic rule.

    Some take seconds: run it in the sandbox.
    """
    if structured_output.kind == "grammar" and "::=" in structured_output.value:  # else llguidance's notation
        later_parts(structured_output.value)
    if structured_output.kind == "regex":
        try:
            re.compile(_CLASS.sub("x", structured_output.value))
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"it is no regular expression: {str(error) or 'nested too deeply'}") from None


def structured_output_check(config: EngineConfig) -> StructuredOutputCheck:
    return check
