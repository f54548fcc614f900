"""Readers of the request fields that control the chat template, except for messages and tools."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from handler.config.config import Config
from handler.core.errors import ConfigError, InvalidParameter
from handler.core.values import LMI_NAMES, PLAIN_TEMPLATE, FieldNames, TemplateOptions
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.readers import boolean
from handler.protocols.kernel.schema import accepts

log = logging.getLogger("handler.template")

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
REASONING_FIELDS = ("reasoning", "reasoning_content", "thinking")
"""Names that chat templates use for an assistant's reasoning."""

_OPTION = "option.default_chat_template_kwargs"

_RESERVED = (
    "messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs",
)  # fmt: skip
"""Names of arguments that only the renderer of the template may set."""


def warn_of_unread(arguments: Iterable[str], template: str) -> None:
    """Log the default arguments that a chat template does not read."""
    if unread := [name for name in arguments if not knows(template, name)]:
        log.warning("%s: the chat template does not read %s", _OPTION, ", ".join(unread))


def knows(template: str, name: str) -> bool:
    """Return whether a chat template contains the word `name`, which suggests that it reads this variable."""
    return name in _words(template)


@functools.lru_cache
def _words(template: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", template))


def reads(template: str, name: str) -> bool:
    """Return whether the code of a chat template contains the variable `name`. Texts and attributes do not count."""
    return name in _variables(template)


_TAG = re.compile(r"\{[{%](.*?)[}%]\}", re.DOTALL)
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_STRING = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
_VARIABLE = re.compile(r"(?<![.\w])[^\W\d]\w*")


@functools.lru_cache
def _variables(template: str) -> frozenset[str]:
    tags = _TAG.findall(_COMMENT.sub("", template))
    return frozenset(name for tag in tags for name in _VARIABLE.findall(_STRING.sub("", tag)))


@accepts(type="object")
def arguments(value: Any) -> Mapping[str, Any]:
    """Read `chat_template_kwargs`."""
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    for name in value:
        if name in _RESERVED or not name.isidentifier():
            raise ValueError(f"must not set {name[:64]!r}")
    return value


def check_defaults(config: Config) -> None:
    """Check `option.default_chat_template_kwargs`.

    Raises:
        ConfigError: the value is not an object, or it sets an argument that only the template's renderer may set.
    """
    try:
        arguments(config.default_chat_template_kwargs or {})
    except ValueError as error:
        raise ConfigError(f"{config.where(_OPTION)}: {_OPTION}: {error}") from None


@accepts(type="array", items={"type": "object"})
def documents(value: Any) -> Sequence[Mapping[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError("must be a list of objects")
    return value


@accepts(enum=[*EFFORTS])
def effort(value: Any) -> str:
    if value not in EFFORTS:
        raise ValueError(f"must be one of {', '.join(EFFORTS)}")
    return str(value)


READERS = {
    "chat_template_kwargs": arguments,
    "documents": documents,
    "reasoning_effort": effort,
    "add_generation_prompt": boolean,
    "continue_final_message": boolean,
}


def read_template(
    values: Mapping[str, Any],
    messages: Sequence[Mapping[str, Any]],
    context: ServerContext,
    names: FieldNames = LMI_NAMES,
) -> tuple[TemplateOptions, list[str]]:
    """Return the options of the chat template, and the names of the fields that the template does not read.

    Args:
        values: the values that `READERS` have read, by name.
        names: the client's names for fields.

    Raises:
        InvalidParameter: the options contradict each other or the messages.
    """
    defaults = context.config.default_chat_template_kwargs or {}
    has_reasoning = any(REASONING_FIELDS[0] in message for message in messages)  # as the reader of messages adds them
    if not (values or defaults or has_reasoning):  # the usual case
        return PLAIN_TEMPLATE, []
    continues = values.get("continue_final_message", False)
    if continues and values.get("add_generation_prompt"):
        raise InvalidParameter("continue_final_message: requires add_generation_prompt=false")
    if continues and (messages[-1]["role"] != "assistant" or not messages[-1]["content"].strip()):
        raise InvalidParameter("continue_final_message: the last message must be an assistant message with text")
    template, client_arguments = context.chat_template, values.get("chat_template_kwargs", {})
    candidates = {name: values[name] for name in ("documents", "reasoning_effort") if name in values}
    if (level := values.get("reasoning_effort")) is not None and "enable_thinking" not in client_arguments:
        candidates["enable_thinking"] = level != "none"  # as in vLLM
    read = {name: value for name, value in candidates.items() if knows(template, name)}
    unread = [f"chat_template_kwargs.{name}" for name in client_arguments if not knows(template, name)]
    if "documents" in candidates and "documents" not in read:
        unread.append("documents")
    if level is not None and read.keys().isdisjoint(("reasoning_effort", "enable_thinking")):
        unread.append(names.reasoning_effort)
    if has_reasoning and not any(knows(template, name) for name in REASONING_FIELDS):
        unread.append(names.message_reasoning)
    arguments = {
        name: value for name, value in {**defaults, **read, **client_arguments}.items() if knows(template, name)
    }
    options = TemplateOptions(
        tuple(arguments.items()),
        add_generation_prompt=not continues and values.get("add_generation_prompt", True),
        continue_final_message=continues,
    )
    return options, unread
