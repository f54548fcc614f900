"""Calls by the model's own response template, which `response_template/` reads with the rest of the answer."""

from __future__ import annotations

from collections.abc import Sequence

from handler.protocols.assistant.events import Event, Parser
from handler.protocols.assistant.tools.parsing import Format, Tool


class TemplateCalls(Parser):
    """Stands for the calls of an answer. By itself it leaves them in the text."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.tools = tools

    def feed(self, text: str) -> list[Event]:
        return [text] if text else []

    def flush(self) -> list[Event]:
        return []


HF = Format("hf", TemplateCalls)
