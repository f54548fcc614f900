"""The rules for tool calls in each format, as the xgrammar beside vLLM reads them."""

from __future__ import annotations

from typing import Any

import pytest

from handler.core.values import StructuredOutput
from handler.protocols.assistant.tools.formats import FORMATS
from handler.protocols.assistant.tools.grammar import Notation, calls, calls_in_text
from handler.protocols.kernel.readers import structural_tag
from tests.unit.protocols.assistant.tool_texts import TOOLS, golden, write

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

CASES = {
    f"{name} {text}".strip(): (name, notation)
    for name, format in FORMATS.items()
    for text, notation in format.notations.items()
    if notation.style  # else xgrammar has no name for the form of its arguments
}
NOT_AS_GOLDEN = {"mistral [ARGS]", "smollm2", "gigachat3 <|function_call|>"}
"""The golden answers are in the format's other notation."""

Call = tuple[str, dict[str, Any]]
BONN: Call = ("weather", {"city": "Bonn", "days": 3})
TIME: Call = ("time", {})


class Grammars:
    """Compiles rules for a vocabulary of single bytes and an end token."""

    def __init__(self) -> None:
        import xgrammar

        self._xgrammar = xgrammar
        self._end = 256
        vocabulary = [*(bytes([byte]) for byte in range(self._end)), b"<end>"]
        tokenizer = xgrammar.TokenizerInfo(vocabulary, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[self._end])
        self._compiler = xgrammar.GrammarCompiler(tokenizer)

    def compile(self, rule: StructuredOutput) -> Any:
        return self._compiler.compile_structural_tag(rule.value)

    def accepts(self, grammar: Any, text: str) -> bool:
        """Whether the text may be a whole answer."""
        matcher = self._xgrammar.GrammarMatcher(grammar)
        return bool(matcher.accept_string(text) and matcher.accept_token(self._end))


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars()


@pytest.mark.parametrize("case", CASES)
def test_the_rule_of_a_format_is_followed(grammars: Grammars, case: str) -> None:
    name, notation = CASES[case]
    one, two = write(notation, BONN), write(notation, BONN, TIME)
    wrong = write(notation, ("weather", {"days": "x"}))
    required, single = (grammars.compile(structural_tag(calls(notation, TOOLS, single=each))) for each in (False, True))
    accepted = {text for text in (one, two, wrong, "text", f"text {one}") if grammars.accepts(required, text)}
    assert accepted == {one, *([two] if notation.several else [])}
    assert [grammars.accepts(single, text) for text in (one, two)] == [True, False]
    if case not in NOT_AS_GOLDEN:
        assert grammars.accepts(required, golden(name)["one"]["text"])
    if notation.mark:
        auto = grammars.compile(rule_of_strict(notation))
        accepted = {text for text in (one, two, wrong, "text", f"text {one}") if grammars.accepts(auto, text)}
        assert accepted == {one, two, "text", f"text {one}"}


def rule_of_strict(notation: Notation) -> StructuredOutput:
    return structural_tag(calls_in_text(notation, TOOLS, ["weather"], single=False), allows_text=True)
