"""The public API for a user's model.py: decorators, and the types that formatters receive and return.

Names and attributes are the same as in djl_python 0.29 and later, so that a model.py runs unchanged with either package
(docs/custom-code.md).
"""

from __future__ import annotations

from handler.plugins.api import (
    Input,
    RequestInput,
    RequestOutput,
    Response,
    Sequence,
    Session,
    TextGenerationOutput,
    TextInput,
    Token,
    input_formatter,
    output_formatter,
)

__all__ = [
    "Input",
    "RequestInput",
    "RequestOutput",
    "Response",
    "Sequence",
    "Session",
    "TextGenerationOutput",
    "TextInput",
    "Token",
    "input_formatter",
    "output_formatter",
]
