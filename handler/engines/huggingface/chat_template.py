"""Renders chat templates with jinja2, with the extensions that templates find in transformers.

This module does not need transformers, whose import takes more than a second.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from handler.config.model_files import read_json
from handler.core.errors import GenerationFailed, InvalidPayload, ServingError

Messages = Sequence[Mapping[str, Any]]

_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of message fields that may contain reasoning. Templates read the first two."""


class _Generation(Extension):
    """The tag `generation`, which surrounds the response of the assistant for training, and renders its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        content = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(content, lineno=line)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Encode a value without jinja2's escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


class ChatTemplate:
    """A chat template, which is compiled when it is rendered for the first time.

    Args:
        source: text of the template.
        tokens: special tokens by the names of their variables.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self._source = source
        self._tokens = tokens

    @functools.cached_property
    def _template(self) -> Any:
        return _environment().from_string(self._source)

    def render(
        self,
        messages: Messages,
        tools: Messages = (),
        arguments: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the prompt of a chat.

        Args:
            arguments: further variables of the template, which may replace special tokens.

        Raises:
            Exception: the template has a syntax error, or fails with these values. See `render_error`.
        """
        variables = {"documents": None, **self._tokens, **(arguments or {})}
        variables["messages"] = list(map(_message, messages))
        variables["tools"] = [dict(tool) for tool in tools] or None
        variables["add_generation_prompt"] = add_generation_prompt
        return str(self._template.render(variables))


def check_template(source: str) -> None:
    """Raise ValueError if a template has a syntax error, or uses a filter or a test that does not exist."""
    try:
        _environment().from_string(source)
    except TemplateSyntaxError as error:
        raise ValueError(f"{error}{template_line(error)}") from None


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Remove fields that are null, and give the reasoning both names that templates read."""
    fields = {name: value for name, value in message.items() if value is not None}
    reasoning = next((fields[name] for name in _REASONING if name in fields), None)
    return fields if reasoning is None else {"thinking": reasoning, **fields, "reasoning_content": reasoning}


def special_tokens(model: Path) -> dict[str, str]:
    """Return the special tokens in the tokenizer files of a model directory, by the names of their variables."""
    tokens = dict[str, str]()
    for file in ("special_tokens_map.json", "tokenizer_config.json") if model.is_dir() else ():
        values = read_json(model / file)
        for name in _TOKENS:
            value = values.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                tokens[name] = text
    return tokens


def shows_system(render: Callable[[Messages], str]) -> bool:
    """Return whether a template shows the text of a system message."""
    system, user = ({"role": role, "content": f"{role} of the probe"} for role in ("system", "user"))
    for form in (str, lambda text: [{"type": "text", "text": text}]):
        with contextlib.suppress(Exception):  # a template's own error, of any kind
            if system["content"] in render(
                [{**message, "content": form(message["content"])} for message in (system, user)]
            ):
                return True
    return False


def without_system(messages: Messages) -> Messages:
    """Put the text of system messages before the text of the next user's message, or in a user's message of its own."""
    chat, texts = list[Mapping[str, Any]](), list[str]()
    for message in (*messages, None):
        if message is not None and message["role"] == "system":
            texts.append(_text(message["content"]))
            continue
        is_users = message is not None and message["role"] == "user"
        if texts and not is_users:
            chat.append({"role": "user", "content": "\n".join(texts)})
        elif texts and message is not None:
            message = {**message, "content": _joined(texts, message["content"])}
        texts = []
        if message is not None:
            chat.append(message)
    return chat


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(str(part["text"]) for part in content if part["type"] == "text")
    return str(content)


def _joined(texts: list[str], content: Any) -> Any:
    if isinstance(content, list):
        return [{"type": "text", "text": "\n".join(texts)}, *content]
    return "\n".join([*texts, str(content)])


def render_error(error: Exception) -> ServingError:
    """Return the error of a request for an exception that was raised while its chat was rendered."""
    reason = f"{str(error) or type(error).__name__}{template_line(error)}"[:400]
    if isinstance(error, TemplateSyntaxError):
        return GenerationFailed(f"the model's chat template is broken: {reason}")
    return InvalidPayload(f"'messages': the model's chat template refuses them: {reason}")


def template_line(error: BaseException) -> str:
    """Return the end of an error message, with the line of the chat template that raised the error; "" if unknown."""
    line, at = getattr(error, "lineno", None), error.__traceback__
    while at is not None:
        if at.tb_frame.f_code.co_filename == "<template>":  # jinja2's name of a template that is not a file
            line = at.tb_lineno
        at = at.tb_next
    return "" if line is None else f" (line {line} of the template)"
