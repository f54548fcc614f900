"""What `/v1/models` says that a model supports, compared with what becomes of a request that contains it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from handler.config.config import Config
from handler.core.errors import ServingError
from handler.core.text import Vocabulary
from handler.core.values import Task
from handler.protocols.anthropic.models import capabilities
from handler.protocols.kernel.context import ServerContext
from tests.unit.protocols.answers import CAPABLE, DIALECTS

PLAIN = replace(CAPABLE, chat_template="{{ messages }}")
THINKING = replace(
    CAPABLE,
    chat_template="{{ tools }} <think></think> {{ reasoning_content }} {{ enable_thinking }} {{ reasoning_effort }}",
    vocabulary=Vocabulary([b"<", b"a"]),
    no_media={"image": ""},
)
MAXIMUM = replace(THINKING, chat_template=THINKING.chat_template + "{% if reasoning_effort == 'max' %}")
UNSHAPED = replace(PLAIN, unsupported={"structured_output": "the engine has none"})
CONTEXTS = pytest.mark.parametrize("context", [PLAIN, THINKING, MAXIMUM, UNSHAPED], ids=["a", "b", "c", "d"])

PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "eA=="}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}}
SCHEMA = {"format": {"type": "json_schema", "schema": {"type": "object"}}}


def has(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, *blocks]}]}


def edit(kind: str) -> dict[str, Any]:
    return {"context_management": {"edits": [{"type": kind}]}}


def runs(kind: str) -> dict[str, Any]:
    return {"tools": [{"type": kind, "name": kind.rpartition("_")[0]}]}


FIELDS: Mapping[str, dict[str, Any]] = {
    "citations": has({"type": "text", "text": "a", "citations": {"enabled": True}}),
    "compaction.summarize": {"compaction": {"type": "summarize"}},
    "context_management.clear_thinking_20251015": edit("clear_thinking_20251015"),
    "context_management.clear_tool_uses_20250919": edit("clear_tool_uses_20250919"),
    "context_management.compact_20260112": edit("compact_20260112"),
    **{f"effort.{effort}": {"output_config": {"effort": effort}} for effort in ("low", "medium", "high")},
    "image_input": has(IMAGE),
    "pdf_input": has(PDF),
    "server_tools.web_search": runs("web_search_20250305"),
    "server_tools.code_execution": runs("code_execution_20250825"),
    "structured_outputs": {"output_config": SCHEMA},
    "thinking.types.enabled": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    "thinking.types.between_tools": {"thinking": {"type": "between_tools"}},
}
"""Fields of a request that need a capability, which are named by their paths."""


def part(found: Any, path: str) -> bool:
    for name in path.split("."):
        found = found[name]
    supported: bool = found["supported"]
    return supported


@CONTEXTS
@pytest.mark.parametrize("path", FIELDS)
def test_each_capability_is_that_of_a_request(context: ServerContext, path: str) -> None:
    """Without it, the request is refused or its field is reported to have no effect."""
    body = {"model": "", "max_tokens": 2048, "messages": [{"role": "user", "content": "a"}], **FIELDS[path]}
    try:
        ignored = DIALECTS["anthropic_messages"].parse(body, context).ignored
    except ServingError:
        obeyed = False
    else:
        obeyed = not ignored
    assert part(capabilities(context), path) is obeyed


@CONTEXTS
def test_thinking_may_be_disabled_with_every_model(context: ServerContext) -> None:
    """Every model obeys `adaptive` too, but only those that reason support it."""
    types = capabilities(context)["thinking"]["types"]
    assert types["adaptive"] == types["enabled"]
    body = {"model": "", "max_tokens": 16, "messages": [{"role": "user", "content": "a"}]}
    DIALECTS["anthropic_messages"].parse({**body, "thinking": {"type": "disabled"}}, context)
    assert part(capabilities(context), "thinking.types.disabled")


def test_an_effort_that_the_template_does_not_name_has_none() -> None:
    for context, supported in ((PLAIN, False), (THINKING, False), (MAXIMUM, True)):
        assert part(capabilities(context), "effort.max") is supported
        assert not part(capabilities(context), "effort.xhigh")


def test_a_capability_with_parts_is_supported_if_one_is() -> None:
    found: Any = capabilities(THINKING)
    assert [name for name, value in found.items() if value["supported"]] == [
        "compaction", "context_management", "effort", "image_input", "structured_outputs", "thinking",
    ]  # fmt: skip


def test_batches_need_a_store() -> None:
    stored = replace(PLAIN, config=Config(batches_store="/tmp/batches"))
    assert [part(capabilities(context), "batch") for context in (PLAIN, stored)] == [False, True]


@pytest.mark.parametrize("task", [task for task in Task if task is not Task.GENERATION])
def test_a_model_for_another_task_supports_none(task: Task) -> None:
    context = replace(THINKING, task=task, config=Config(batches_store="/tmp/batches"))
    assert not any(value["supported"] for value in capabilities(context).values())  # type: ignore[index]
