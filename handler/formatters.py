"""The names that a user's model.py imports: decorators, and the values that formatters get and return.

Names and attributes are those of djl_python 0.29 and later, so that the same functions run under either. See
docs/formatters.md.
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
