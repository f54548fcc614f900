"""`/v1/models` in Anthropic's format, with what the served model supports.

Source: the types of Anthropic's Python package 2.14. Its clients choose what to send from these values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from handler.core.errors import InvalidParameter
from handler.core.values import Task
from handler.protocols.anthropic.api import listed, read_page, rfc3339
from handler.protocols.anthropic.types import EDITS, EFFORTS
from handler.protocols.assistant.answer import reasoning_family
from handler.protocols.assistant.template import knows
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.messages import taken_media
from handler.protocols.kernel.readers import show
from handler.protocols.kernel.schema import Count

_USUAL = ("low", "medium", "high")


class AnthropicSupport(TypedDict):
    supported: bool


class AnthropicCapabilities(TypedDict):
    """What requests with a model may contain. Some capabilities have parts, such as the edits of the context."""

    batch: AnthropicSupport
    citations: AnthropicSupport
    code_execution: AnthropicSupport
    compaction: dict[str, Any]
    context_management: dict[str, Any]
    effort: dict[str, Any]
    image_input: AnthropicSupport
    pdf_input: AnthropicSupport
    server_tools: dict[str, Any]
    structured_outputs: AnthropicSupport
    thinking: dict[str, Any]


class AnthropicModel(TypedDict):
    """A model or an adapter."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: Count | None
    capabilities: AnthropicCapabilities


class AnthropicModels(TypedDict):
    """A page of models, with the ids of its first and last model. The next page begins after `last_id`."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


def model(id: str, created: float, context: ServerContext) -> AnthropicModel:
    """Describe a model.

    Args:
        created: the time of creation, in seconds since 1970.
    """
    return {
        "type": "model",
        "id": id,
        "display_name": id,
        "created_at": rfc3339(created),
        "lifecycle": "active",
        "max_input_tokens": context.most_tokens(),
        "capabilities": capabilities(context),
    }


def capabilities(context: ServerContext) -> AnthropicCapabilities:
    """Return what requests with the served model may contain, based on its files, the engine and the options."""
    generates = context.task is Task.GENERATION
    return {
        "batch": _support(generates and context.config.batches_store != "off"),
        "citations": _support(False),
        "code_execution": _support(False),
        "compaction": _parts(dict.fromkeys(("summarize",), generates)),
        "context_management": _parts(dict.fromkeys(EDITS, generates)),
        "effort": _parts(_efforts(context)),
        "image_input": _support(generates and "image" in taken_media(context)),
        "pdf_input": _support(False),
        "server_tools": _parts(dict.fromkeys(("web_search", "code_execution"), False)),
        "structured_outputs": _support(generates and "structured_output" not in context.unsupported),
        "thinking": _thinking(generates and reasoning_family(context) is not None),
    }


def _support(supported: bool) -> AnthropicSupport:
    return {"supported": supported}


def _parts(parts: Mapping[str, bool]) -> dict[str, Any]:
    """Return a capability, which is supported if any of its parts is."""
    return {"supported": any(parts.values()), **{name: _support(supported) for name, supported in parts.items()}}


def _efforts(context: ServerContext) -> dict[str, bool]:
    """Return which efforts have an effect on the prompt. Templates that take an effort accept the three usual ones."""
    template = context.chat_template if context.task is Task.GENERATION else ""
    takes = knows(template, "reasoning_effort")
    return {effort: takes and (effort in _USUAL or knows(template, effort)) for effort in EFFORTS}


def _thinking(thinks: bool) -> dict[str, Any]:
    """Return whether the model reasons. `disabled` is accepted by every model, and `between_tools` by none."""
    types = {"enabled": thinks, "adaptive": thinks, "disabled": True, "between_tools": False}
    return {"supported": thinks, "types": {name: _support(supported) for name, supported in types.items()}}


LIFECYCLES = ("active", "deprecated", "retired")


def in_lifecycles(models: Sequence[AnthropicModel], lifecycles: Sequence[str]) -> Sequence[AnthropicModel]:
    """Return the models in the given stages of their lifecycle, or all models if no stage is given.

    Raises:
        InvalidParameter: a stage is unknown.
    """
    for lifecycle in lifecycles:
        if lifecycle not in LIFECYCLES:
            raise InvalidParameter(f"lifecycle={show(lifecycle)}: must be one of {', '.join(LIFECYCLES)}")
    return [model for model in models if model["lifecycle"] in lifecycles] if lifecycles else models


def page(models: Sequence[AnthropicModel], query: Mapping[str, str]) -> AnthropicModels:
    """Return a page of the models.

    Args:
        query: the query parameters `limit`, and `after_id` (the page starts after this model) or `before_id` (the page
            ends before this model).

    Raises:
        InvalidParameter: one of these parameters is invalid.
    """
    limit, ids = read_page(query).limit, [model["id"] for model in models]
    if "before_id" in query:
        end = _index(ids, "before_id", query)
        first = max(0, end - limit)
        has_more = first > 0
    else:
        first = _index(ids, "after_id", query) + 1 if "after_id" in query else 0
        end = first + limit
        has_more = end < len(ids)
    page: AnthropicModels = listed(models[first:end], has_more=has_more)
    return page


def _index(ids: Sequence[str], name: str, query: Mapping[str, str]) -> int:
    if query[name] not in ids:
        raise InvalidParameter(f"{name}={show(query[name])}: there is no such model")
    return ids.index(query[name])
