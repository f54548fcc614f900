"""The golden answers of calls and thoughts, read by vLLM's parsers, and the rules for calls by its xgrammar."""

from __future__ import annotations

import json
from typing import Any

import pytest

from handler.core.values import StructuredOutput
from handler.protocols.assistant.reasoning_families import FAMILIES, HARMONY
from handler.protocols.assistant.tools.formats import FORMATS
from handler.protocols.assistant.tools.grammar import Notation, calls, calls_in_text
from handler.protocols.kernel.readers import structural_tag
from tests.unit.protocols.assistant.test_reasoning import ANSWERS, parts, read
from tests.unit.protocols.assistant.tool_texts import TOOLS, golden, write

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

# -- tool parsers ------------------------------------------------------------------------------------------------------
# The golden answers of each format of tool calls, read by vLLM's parser of that name (differences: docs/models.md).


REASONS = {
    "text after": "vLLM drops text after the calls",
    "text before": "vLLM drops text before the calls",
    "odd strings": "a mark in a string ends vLLM's call",
    "with an argument mark": "a mark in a string ends vLLM's call",
    "with an id mark": "vLLM has the call's id in its name",
    "unknown parameters": "without a schema vLLM has strings for bare values",
    "without ends": "vLLM drops a parameter without its end before the call's end",
    "without the call's end": "vLLM drops text after the calls",
    "without the end of the section": "vLLM drops text after the calls, here from the arguments on",
    "without an end mark": "vLLM wants the last mark",
    "one of several is no call": "vLLM drops what cannot be read, and all text after the calls",
    "after words": "vLLM drops the text around calls, or finds none without a mark",
    "a list after words": "vLLM drops the text around calls, or finds none without a mark",
    "a parameter without its end": "vLLM drops a parameter without its end before the call's end",
    "a value without its end": "vLLM drops a parameter without its end before the call's end",
    "without the end of a call": "vLLM drops a call without its end",
    "after words of other names": "vLLM drops the text around calls, or finds none without a mark",
    "a call without its end": "vLLM drops a parameter without its end before the call's end",
    "a name after the mark": "vLLM shows the mark as text",
    "the mark twice": "vLLM has a second mark in the call's name",
    "the mark twice before a name": "vLLM finds no call after a second mark",
    "the mark twice without a call": "vLLM drops marks without a call",
    "a misspelt mark without a call": "vLLM drops what follows a misspelt mark",
    "all arguments in one parameter": "vLLM leaves an empty object wrapped",
    **dict.fromkeys(
        (
            "cut",
            "cut in a value",
            "an end within a wrapped value",
            "cut in the arguments",
            "not closed",
            "broken",
            "broken JSON, then a call",
        ),
        "vLLM drops, closes or shows a call that broke off after its name; here it ends as it stands",
    ),
    **dict.fromkeys(
        ("no call", "no function", "no arguments", "no index", "other JSON", "cut in the name", "cut in the head"),
        "vLLM drops what follows a mark, or calls it; here it is text until a call's name is complete",
    ),
}

_TAGGED = "text after|cut in a value|a parameter without its end"
_DSML = f"{_TAGGED}|all arguments in one parameter|an end within a wrapped value"
_QWEN = f"{_TAGGED}|a call without its end|without ends|without the call's end|cut in the name|no function"
_DEEPSEEK = "one of several is no call|text after|cut|cut in the head|broken"
_HERMES = "odd strings|cut in the arguments|broken JSON, then a call"
DIFFERENT = {
    "hermes": f"{_HERMES}|text after",
    "granite4": f"{_HERMES}|without an end mark",
    "granite": "text after|cut|other JSON|one of several is no call",
    "llama3_json": "text before|after words|a list after words|a name after the mark",
    "phi4_mini_json": "text before|odd strings|text after|one of several is no call|after words|a list after words",
    "mistral": "with an id mark|with an argument mark|no arguments|one of several is no call|the mark twice|"
    "the mark twice before a name|the mark twice without a call",
    "qwen3_coder": _QWEN,
    "qwen3_xml": _QWEN,
    "seed_oss": _QWEN.replace("a call without its end|", ""),
    "minimax_m2": f"{_TAGGED}|no call",
    "deepseek_v32": _DSML,
    "deepseek_v4": f"{_DSML}|a misspelt mark without a call",
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "kimi_k2": "odd strings|text after|cut in the head|no index|without the end of the section|"
    "one of several is no call|without the end of a call",
    "glm45": "a value without its end|text after|cut in a value|no call",
    "glm47": "a value without its end|text after|cut in a value|no call",
    "gemma4": "text after|cut in a value|no call|unknown parameters|not closed",
    "pythonic": "text after|cut|broken|text before|after words of other names",
    "llama4_pythonic": "text after|cut|broken|text before|after words of other names",
}
"""The cases that vLLM's parsers read in another way."""


OTHERS = {
    *("apertus", "cohere_command3", "cohere_command4", "deepseek_v41", "dots", "functiongemma", "gigachat3"),
    *(
        "granite-20b-fc",
        "hy_v3",
        "hy_v4",
        "inkling",
        "internlm",
        "jamba",
        "k2_horizon",
        "kimi_k3",
        "lfm2",
        "longcat",
        "minicpm5",
        "muse_glimmer",
    ),
    *("minimax_m3", "olmo3", "step3", "xlam"),
}
"""Formats that tests/templates/vllm compares with vLLM 0.33's parsers, on the cases of vLLM's own tests."""


def tokenizer(marks: tuple[str, ...]) -> Any:
    """A tokenizer of bytes and marks: vLLM's parsers look for marks in it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={sign: id for id, sign in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(tokenizer_object=made)
    found.add_tokens([*dict.fromkeys([*marks, "<think>", "</think>", "[TOOL_CALLS]"])])
    return found


def theirs(format: str, text: str) -> tuple[str, list[tuple[str, Any]]]:
    """Return the text and the calls that vLLM's parser finds; a call without JSON is none."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    marks = FORMATS[format].marks
    if format == "mistral" and "[TOOL_CALLS][" in text:
        marks = marks[:1]  # the mark before arguments has vLLM read the newer form
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "?"}], model="m", tools=TOOLS)
    parser = ToolParserManager.get_tool_parser(format)(tokenizer(marks), request.tools)
    found = parser.extract_tool_calls(text, request=request)
    calls = [(call.function.name, loads(call.function.arguments)) for call in found.tool_calls]
    return (found.content or "").strip(), calls


def loads(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return f"not JSON: {text}"


@pytest.mark.parametrize("format", DIFFERENT)
def test_well_formed_calls_are_those_that_vllm_finds(format: str) -> None:
    different = set()
    for name, case in golden(format).items():
        text = "".join(event for event in case["events"] if isinstance(event, str)).strip()
        calls = [(event[0], loads(event[1])) for event in case["events"] if isinstance(event, list)]
        if (text, calls) != theirs(format, case["text"]):
            different.add(name)
    assert different == set(DIFFERENT[format].split("|"))
    assert different <= REASONS.keys()


def test_the_formats_are_vllms() -> None:
    """smollm2 is ours, mimo of vLLM 0.33, nemotron_json a plugin. vLLM reads gpt-oss by a library, not its text."""
    from vllm.tool_parsers import ToolParserManager

    ours = {"mimo", "nemotron_json", "smollm2"}
    assert set(FORMATS) - DIFFERENT.keys() - OTHERS == {"openai", *ours}
    assert set(FORMATS) - ours <= set(ToolParserManager.list_registered())


# -- the rules for tool calls in each format, as the xgrammar beside vLLM reads them -----------------------------------


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


# -- the answers of each family, read by vLLM's parser of that name ----------------------------------------------------


REASONING_DIFFERENT = {
    "\n<think>\n</think>Yes.": "with the thinking off, vLLM reads no marks; here the model may think all the same",
    "\n<think>Hm. \n</think>\nYes.<think>So</think>!": "the same",
    "Hm. <｜DSML｜function_calls>x": "vLLM knows the mark of V4 alone, here that of V3.2 ends a thought too",
    "Hm.</think>Use </think>.": "vLLM drops another end mark, which is text here",
}
"""Answers that vLLM reads in another way, and why."""


REASONING_OTHERS = {
    *("cohere_command3", "deepseek_v41", "ernie45", "hunyuan_a13b", "hy_v3", "k2_horizon", "kimi_k3", "minimax_m3"),
    *("inkling", "muse_glimmer", "olmo3"),
}
"""Families that tests/templates/vllm compares with vLLM 0.33's parsers, on the cases of vLLM's own tests."""


def reasoning_tokenizer() -> Any:
    """A tokenizer of bytes and marks: vLLM's parsers look for marks in it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={sign: id for id, sign in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(tokenizer_object=made)
    marks = {mark.strip() for family in FAMILIES.values() if family.name != "granite" for mark in family.marks}
    found.add_tokens(sorted(marks - {"<|channel>thought"}))
    return found


def reasoning_theirs(family: str, answer: str, *, thinking: bool) -> tuple[str, str]:
    """Return the thoughts and the text that vLLM finds."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.reasoning import ReasoningParserManager

    arguments = {"enable_thinking": thinking}
    messages = [{"role": "user", "content": "hi"}]
    request = ChatCompletionRequest(model="m", messages=messages, chat_template_kwargs=arguments)
    parser = ReasoningParserManager.get_reasoning_parser(family)(reasoning_tokenizer(), chat_template_kwargs=arguments)
    thoughts, text = parser.extract_reasoning(answer, request)
    return thoughts or "", text or ""


@pytest.mark.parametrize(
    ("family", "thinking", "answer"), [case[:3] for case in ANSWERS if case[0] not in {HARMONY, *REASONING_OTHERS}]
)
def test_it_is_read_as_vllm_reads_it(family: str, thinking: bool, answer: str) -> None:
    ours = parts(read(family, [answer], thinking=thinking))[:2]
    assert (reasoning_theirs(family, answer, thinking=thinking) == ours) == (answer not in REASONING_DIFFERENT)
