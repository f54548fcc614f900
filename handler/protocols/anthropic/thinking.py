"""Anthropic's `thinking` and `output_config.effort`, as arguments of the model's chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from handler.protocols.assistant.choice import reasoning_family
from handler.protocols.assistant.template import knows
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.schema.shapes import Shape, listing, nullable, record
from handler.protocols.kernel.validation import Named

_DISPLAYS = (None, "summarized", "updates", "omitted")  # all but the last show the thought as it is

_ENABLED = {"enabled": True, "adaptive": None, "disabled": False}
_FIELDS: Mapping[str, Shape] = {
    "type": {"enum": [*_ENABLED]},
    "budget_tokens": {"type": ["integer", "null"], "minimum": 1},
    "display": {"enum": [*_DISPLAYS]},
}
THINKING: Mapping[str, Shape] = {
    "thinking": nullable({**record(_FIELDS), "required": ["type"], "additionalProperties": False}),
    "context_management": nullable(record({}, {"edits": listing({"type": "object"})}, additionalProperties=False)),
}
"""What `read_thinking` and `read_thoughts_kept` read."""

_THINKING = re.compile(r"\{%[^%]*(?<![.\w'\"])thinking\b")
"""A template that reads a variable `thinking`."""


class Thinking(NamedTuple):
    """`thinking`.

    Attributes:
        enabled: None leaves it to the model's template.
        budget: tokens of thoughts.
        show: thinking blocks have a text.
    """

    enabled: bool | None = None
    budget: int | None = None
    show: bool = True

    def template_arguments(self, context: ServerContext) -> tuple[dict[str, bool], list[str]]:
        """Return the template's switch, and the names that cannot be honoured: without a switch, a model of a known
        family thinks as it does, and no other does.
        """
        unheeded = ["thinking.budget_tokens"] if self.budget != self.token_budget(context) else []
        if self.enabled is None:
            return {}, unheeded
        template = context.chat_template
        if knows(template, "enable_thinking"):
            return {"enable_thinking": self.enabled}, unheeded
        if _THINKING.search(template):
            return {"thinking": self.enabled}, unheeded
        thinks = reasoning_family(context) is not None
        return {}, [*unheeded, "thinking"] if thinks is not self.enabled else unheeded

    def token_budget(self, context: ServerContext) -> int | None:
        """Return the budget where the engine and the model's family can honour it."""
        family = reasoning_family(context)
        lacks = "thinking_token_budget" in context.unsupported or context.vocabulary is None
        return None if lacks or family is None or not family.closing else self.budget


def read_thinking(value: Any) -> Thinking:
    """Read `thinking`.

    Raises:
        InvalidParameter: naming what would be right.
    """
    given = Named("thinking", value)
    if value is None:
        return Thinking()
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in _ENABLED or value.keys() - _FIELDS.keys():
        raise given.refused("must be an object with a 'type' that is enabled, adaptive or disabled")
    budget = value.get("budget_tokens")
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 1):
        raise given.refused("'budget_tokens' must be an integer of at least 1")
    if kind == "enabled" and budget is None:
        raise given.refused("'budget_tokens' is required")
    if value.get("display") not in _DISPLAYS:
        raise given.refused("'display' must be summarized, updates or omitted")
    return Thinking(_ENABLED[kind], budget if kind == "enabled" else None, value.get("display") != "omitted")


def read_thoughts_kept(value: Any) -> int | None:
    """Read `context_management`; return how many of the last messages with thoughts keep them, None for all.

    Raises:
        InvalidParameter: an edit is another one than to clear thoughts.
    """
    given = Named("context_management", value)
    edits = [] if value is None else value.get("edits", []) if isinstance(value, dict) else None
    if (
        not isinstance(edits, list)
        or (value and value.keys() - {"edits"})
        or not all(isinstance(edit, dict) for edit in edits)
    ):
        raise given.refused("must be an object with 'edits', a list of objects")
    kept = None
    for edit in edits:
        if edit.get("type") != "clear_thinking_20251015" or edit.keys() - {"type", "keep"}:
            raise given.refused("is not supported: the only edit here is clear_thinking_20251015; send what is left")
        match edit.get("keep") or {"type": "thinking_turns", "value": 1}:
            case "all" | {"type": "all"}:
                pass
            case {"type": "thinking_turns", "value": int(turns)} if turns > 0 and turns is not True:
                kept = turns
            case _:
                raise given.refused("'keep' must be all, or an object with 'type': 'thinking_turns' and a 'value'")
    return kept


def read_effort(body: Mapping[str, Any]) -> Any:
    """Return `output_config.effort`, which the parameters' table checks."""
    config = body.get("output_config")
    return config.get("effort") if isinstance(config, dict) else None
