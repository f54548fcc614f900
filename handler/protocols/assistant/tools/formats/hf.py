"""Calls by the model's own response template, which `response_template/` reads with the rest of the answer."""

from __future__ import annotations

from collections.abc import Sequence

from handler.protocols.assistant.events import PlainText
from handler.protocols.assistant.tools.parsing import Format, Tool


class TemplateCalls(PlainText):
    """Stands for the calls of an answer. By itself it leaves them in the text."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.tools = tools


HF = Format("hf", TemplateCalls)
