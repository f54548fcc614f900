"""Anthropic's words for what the readers of a chat name."""

from __future__ import annotations

import re

_WORDS = (
    (re.compile(r'tool_choice="required"'), 'tool_choice={"type": "any"}'),
    (re.compile(r"(tools\[\d*\])\.function\.parameters"), r"\1.input_schema"),
    (re.compile(r"(tools\[\d*\])\.function\."), r"\1."),
    (re.compile(r"(?<![\w.])reasoning_effort\b"), "output_config.effort"),
    (re.compile(r"messages\[\]\.reasoning\b"), "messages[].content[].thinking"),
    (re.compile(r"(?<![\w.])thinking_token_budget\b"), "thinking.budget_tokens"),
    (re.compile(r"chat_template_kwargs with enable_thinking false"), 'thinking {"type": "disabled"}'),
)


def in_own_words(text: str) -> str:
    """Name the fields of a chat in a message, or in a list of names, as Anthropic does."""
    for pattern, own in _WORDS:
        text = pattern.sub(own, text)
    return text
