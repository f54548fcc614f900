"""Read bodies by the input formatter of a user's model.py (docs/formatters.md)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from handler.core.text import Prompt
from handler.plugins.api import Input, Session
from handler.plugins.functions import InputFormatter, failed, kind, run, users_objects


class CustomReader:
    """Turn a body's bytes into what a dialect parses, by the user's input formatter.

    Args:
        formatter: the user's function.
        decode: turns body and headers into the decoded payload, for formatters that take it.
        keywords: the keyword arguments that the formatter may ask for.
    """

    def __init__(
        self,
        formatter: InputFormatter,
        decode: Callable[[bytes, Mapping[str, str]], Any],
        keywords: Mapping[str, Any],
    ) -> None:
        self._formatter = formatter
        self._decode = decode
        accepts = formatter.accepts
        self._keywords = {name: value for name, value in keywords.items() if accepts is None or name in accepts}

    def read(
        self, body: bytes, headers: Mapping[str, str], session: Session | None = None
    ) -> tuple[dict[str, Any], Any]:
        """Return the body for the dialect, and the formatter's own object, None where it returned a dict.

        Raises:
            FormatterFailed: the formatter failed.
            InvalidPayload: the formatter takes the decoded payload, and the body is not JSON.
        """
        formatter = self._formatter
        item = self._decode(body, headers) if formatter.takes_payload else Input(body, headers, session)
        named = item.get("adapters") if isinstance(item, dict) else None
        keywords = self._keywords
        if session is not None and (formatter.accepts is None or "session" in formatter.accepts):
            keywords = {**keywords, "session": session}
        value = run(formatter, item, **keywords)
        with users_objects(formatter):
            read, given = self._read(value)
        if named is not None:  # LMI reads it before the formatter, which need not keep it
            read.setdefault("adapters", named)
        return read, given

    def _read(self, result: Any) -> tuple[dict[str, Any], Any]:
        formatter = self._formatter
        if isinstance(result, dict):
            return self._plain(result), None
        if getattr(result, "input_text", None) is None:
            raise failed(
                formatter, f"returned {kind(result)}; it must return a RequestInput with input_text, or a dict"
            )
        parameters = getattr(result, "parameters", None)
        value = {"inputs": result.input_text, "parameters": parameters}
        if isinstance(parameters, dict) and "stream" in parameters:  # where LMI's own reader puts the body's
            value["stream"] = parameters["stream"]
        if adapters := getattr(result, "adapters", None):
            value["adapters"] = adapters
        return self._plain(value), result

    def _plain(self, value: dict[str, Any]) -> dict[str, Any]:
        """Copy the value by way of JSON: the dialect must not meet foreign objects, nor share the user's."""
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
            text.encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise failed(self._formatter, "returned what is not JSON", error) from None
        plain: dict[str, Any] = json.loads(text)
        return plain


class FormatterTokenizer:
    """What input formatters get as `tokenizer`.

    Args:
        encode: the engine's; thread-safe.
    """

    def __init__(self, encode: Callable[[str], Prompt]) -> None:
        self._encode = encode

    def encode(self, text: str) -> list[int]:
        return self._encode(text).ids
