"""Checks a client's structured output before TensorRT-LLM gets it.

TensorRT-LLM makes a mask of allowed tokens at every step, for all requests. With its backend xgrammar, the installed
xgrammar tries each text here, in the sandbox. Its backend llguidance limits its own work, but not reading a text: so
only the syntax of an expression is checked, and that no rule of a grammar is cyclic.
"""

from __future__ import annotations

import re
from importlib.util import find_spec

from handler.core.values import StructuredOutput
from handler.engines.base import EngineConfig, StructuredOutputCheck
from handler.engines.structured_output.ebnf import acyclic
from handler.engines.trtllm.sampling import guided_decoding_arguments

_CLASS = re.compile(r"\\[pP]\{[^}]*\}")  # Unicode classes, which Python's expressions lack and the engine's have


def check(structured_output: StructuredOutput) -> None:
    """Raise ValueError for a text that is not a regular expression, or a grammar with a cyclic rule.

    Some take seconds: run it in the sandbox.
    """
    if structured_output.kind == "grammar" and "::=" in structured_output.value:  # else llguidance's notation
        acyclic(structured_output.value)
    if structured_output.kind == "regex":
        try:
            re.compile(_CLASS.sub("x", structured_output.value))
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"it is not a regular expression: {str(error) or 'nested too deeply'}") from None


def structured_output_check(config: EngineConfig) -> StructuredOutputCheck:
    backend = config.options.engine_options.get("guided_decoding_backend")
    if backend != "xgrammar" or config.model is None or find_spec("xgrammar") is None:
        return check
    from handler.engines.huggingface.xgrammar_check import XgrammarCheck

    tried = XgrammarCheck(config.model, trust_remote_code=bool(config.options.engine_options.get("trust_remote_code")))

    def check_and_try(structured_output: StructuredOutput) -> None:
        check(structured_output)
        ((kind, text),) = guided_decoding_arguments(structured_output).items()
        tried({"json": "JSON"}.get(kind, kind.upper()), str(text))

    return check_and_try
