"""Forms of a message's content that a chat template takes: a text, or a list of parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from handler.core.media import MediaTokens

Messages = list[dict[str, Any]]

_PROBE = "lmi handler probe"


class ContentForms(NamedTuple):
    """The forms of a content that a template renders.

    Attributes:
        text, parts: whether it renders a text, and a list of parts.
        placeholders: by kind, what stands for a medium where it renders texts only.
    """

    text: bool
    parts: bool
    placeholders: Mapping[str, str]

    def adapt(self, messages: Sequence[Mapping[str, Any]]) -> Messages:
        """Return the messages in a form that the template renders.

        Where it renders texts only, a medium's placeholder is a line before the message's text, as vLLM has it.
        """
        return [{**message, "content": self._content(message["content"])} for message in messages]

    def _content(self, content: Any) -> Any:
        if isinstance(content, str):
            return content if self.text or not self.parts else [{"type": "text", "text": content}]
        if self.parts or not isinstance(content, list):
            return content
        media = [self.placeholders[part["type"]] for part in content if part["type"] in self.placeholders]
        return "\n".join([*media, *(part["text"] for part in content if part["type"] == "text")])


def find_forms(
    render: Callable[[Messages], str], tokens: Mapping[str, MediaTokens], content_format: str = "auto"
) -> ContentForms:
    """Try both forms.

    Args:
        render: applies the template; raises where the template fails.
        tokens: by kind, of the media that the model takes.
        content_format: string or openai, which say the form; or auto.
    """
    placeholders = {kind: one.text for kind, one in tokens.items()}
    if content_format != "auto":
        return ContentForms(content_format == "string", content_format == "openai", placeholders)
    text = _try(render, _PROBE)
    parts = _try(render, [{"type": "text", "text": _PROBE}])
    written = "'text'" in parts or '"text"' in parts  # the list itself, as text
    return ContentForms(_PROBE in text, _PROBE in parts and not written, placeholders)


def last_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message's content, of several parts the last one's."""
    content = message["content"]
    if isinstance(content, list):
        return next((str(part["text"]) for part in reversed(content) if part["type"] == "text"), "")
    return str(content)


def _try(render: Callable[[Messages], str], content: Any) -> str:
    try:
        return render([{"role": "user", "content": content}])
    except Exception:  # a template's own error, of any kind
        return ""
