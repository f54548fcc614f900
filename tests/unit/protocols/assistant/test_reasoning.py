"""Thoughts are found in any cutting of an answer, by the marks of each family."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handler.config.config import Config
from handler.config.options.tables import REASONING_PARSERS
from handler.core.errors import ConfigError, InvalidParameter, InvalidPayload
from handler.core.text import Prompt, SequenceState, Vocabulary
from handler.core.values import Delta, Finish, Request, Sampling, StructuredOutput, Token
from handler.protocols.assistant.answer import ResponseForm, ResponseReader, describe_parsers, response_form
from handler.protocols.assistant.events import Arguments, CallStart, Event, Reasoning
from handler.protocols.assistant.reasoning import ReasoningForm, thinking_parser
from handler.protocols.assistant.reasoning_families import ALIASES, FAMILIES, choose_family
from handler.protocols.assistant.template import check_defaults
from handler.protocols.assistant.tools.formats import FORMATS
from handler.protocols.assistant.tools.request import Tools
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.dialect import Dialect
from handler.protocols.lmi.asynchronous import AsyncChat, AsyncPrompt
from handler.protocols.registry import INVOCATIONS, ROUTES
from tests.one_test import in_one_test
from tests.unit.protocols.answers import CAPABLE, CHAT, NAMED, TOOLS, USER, chat, choices, events, saying, with_options
from tests.unit.protocols.answers import answer as dialect_answer
from tests.unit.protocols.assistant import tool_texts

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
HARMONY = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
)

MUSE = (
    " to=self<|message|>Hm, <atem:function_calls>.<|eom|><|start|>assistant to=user<|message|>Wait.<|eom|>"
    "<|start|>assistant<|message|>Yes.<|eot|>"
)

K3 = ("<|close|>think<|sep|>", "<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>")

ANSWERS: Sequence[tuple[str, bool, str, str, str]] = (
    # family, whether the prompt leaves a thought open, the answer, its thoughts, its text
    ("deepseek_r1", True, "Hm.\n</think>\n\nYes.", "Hm.\n", "\n\nYes."),
    ("deepseek_r1", True, "<think>Hm.</think>Yes.", "Hm.", "Yes."),
    ("deepseek_v3", False, "Yes.", "", "Yes."),
    ("qwen3", True, "<think>\nHm.\n</think>\n\nYes.", "\nHm.\n", "\n\nYes."),
    ("qwen3", True, "Hm.</think>Use </think>.", "Hm.", "Use </think>."),
    ("qwen3", True, "It never ends</thin", "It never ends</thin", ""),
    ("qwen3", True, f"Hm.{CALL}", "Hm.", CALL),
    ("qwen3", False, "Say <think> and </think>.", "", "Say <think> and </think>."),
    ("qwen3", False, "\n<think>\n</think>Yes.", "\n", "\nYes."),
    ("glm45", False, "\n<think>Hm. \n</think>\nYes.<think>So</think>!", "Hm.So", "\n\nYes.!"),
    ("glm47", True, "Hm.</think>Yes.", "Hm.", "Yes."),
    ("glm47", True, f"Hm.</think>{CALL}\n<think>So</think>Yes.", "Hm.So", f"{CALL}\nYes."),
    ("deepseek_v4", True, "Hm.\n\n<｜DSML｜tool_calls>x", "Hm.", "<｜DSML｜tool_calls>x"),
    ("deepseek_v4", True, "Hm. <｜DSML｜function_calls>x", "Hm.", "<｜DSML｜function_calls>x"),
    ("deepseek_v4", True, "Hm. <｜DSML｜toolcalls>\nx", "Hm.", "<｜DSML｜toolcalls>\nx"),
    ("deepseek_v4", True, "Hm. <｜DSML｜tool>\nx", "Hm.", "<｜DSML｜tool>\nx"),
    ("minimax_m2", True, "Hm.\n</think>\n\nYes.", "Hm.", "\n\nYes."),
    ("minimax_m2_append_think", True, "Hm.</think>Yes.", "", "<think>Hm.</think>Yes."),
    ("kimi_k2", True, "Hm. <|tool_calls_section_begin|>x", "Hm.", "<|tool_calls_section_begin|>x"),
    ("mistral", False, "[THINK]Hm.[/THINK]Yes. [TH", "Hm.", "Yes. [TH"),
    ("gemma4", False, "<|channel>thought\nHm.\n<channel|>Yes.", "Hm.", "Yes."),
    ("gemma4", False, "<|channel>thought", "", ""),
    ("gemma4", False, "<|channel>thoug", "thoug", ""),
    ("gemma4", False, "<|channel>Hm.<channel|>Yes.<|channel", "Hm.", "Yes.<|channel"),
    ("openai_gptoss", True, HARMONY, "Hm.", "Wait.Yes."),
    ("openai_gptoss", True, "Plain <|mess", "", "Plain <|mess"),
    ("openai_gptoss", True, "<|channel|>fin", "", "<|channel|>fin"),
    ("openai_gptoss", True, "<|start|>assistant", "", "<|start|>assistant"),
    ("openai_gptoss", True, "<|start|>" * 120, "", "<|start|>"),
    (
        "openai_gptoss",
        True,
        f"<|channel|>commentary 2?<|message|>I.<|end|><|start|>assistant{HARMONY}",
        "Hm.",
        "I.Wait.Yes.",
    ),
    ("openai_gptoss", True, f"<|channel|>I look<|end|><|start|>assistant{HARMONY}", "Hm.", "I lookWait.Yes."),
    ("openai_gptoss", True, f"<|channel|>??<|start|>assistant{HARMONY}", "Hm.", "??Wait.Yes."),
    ("openai_gptoss", True, f"<|channel|>analysis So<|end|><|start|>assistant{HARMONY}", " SoHm.", "Wait.Yes."),
    ("openai_gptoss", True, "<|start|>assistant<|channel|>final Yes.<|return|>", "", " Yes."),
    ("openai_gptoss", True, f"<|start|>assistant<|end|><|start|>assistant{HARMONY}", "Hm.", "Wait.Yes."),
    (
        "muse_glimmer",
        True,
        f" to=self So<|eom|><|start|>assistant{MUSE}",
        "Hm, <atem:function_calls>.",
        " to=self SoWait.Yes.",
    ),
    ("muse_glimmer", True, MUSE, "Hm, <atem:function_calls>.", "Wait.Yes."),
    ("muse_glimmer", True, f"<|start|>assistant{MUSE}", "Hm, <atem:function_calls>.", "Wait.Yes."),
    ("muse_glimmer", True, " to=self<|message|>Hm.<|start|>assistant to=user<|message|>Yes.", "Hm.", "Yes."),
    ("muse_glimmer", True, " to=user<|message|>Yes. to=self <|eo", "", "Yes. to=self <|eo"),
    ("muse_glimmer", True, "to=do: tests", "", "to=do: tests"),
    ("granite", False, "Here's my thought process: Hm. Here is my response: Yes.", " Hm. ", " Yes."),
    ("granite", False, "Here is my house", "", "Here is my house"),
    ("nemotron_v3", True, "Hm.\n</think>\nYes.", "Hm.", "\nYes."),
    ("seed_oss", True, "<seed:think>Hm.</seed:think>Yes.", "Hm.", "Yes."),
    ("deepseek_v41", True, "Hm. <｜DSML｜ calls>x", "Hm.", "<｜DSML｜ calls>x"),
    ("ernie45", True, "Hm.\n</think>\n\n<response>\nYes.\n</response>\n", "Hm.\n", "\n\n\nYes.\n"),
    ("ernie45", True, "Hm.</think>Yes, <response>a</response> b", "Hm.", "Yes, <response>a</response> b"),
    ("ernie45", True, f"Hm.</think>\n{CALL}", "Hm.", f"\n{CALL}"),
    ("ernie45", True, "Hm.</think><resp", "Hm.", "<resp"),
    ("ernie45", True, "Hm.</think><response>a</respon", "Hm.", "a</respon"),
    ("ernie45", True, "Hm.</think><response> </response>\n b </response>", "Hm.", " </response>\n b "),
    ("hunyuan_a13b", False, "<think>\nHm.\n</think>\n<answer>\nYes.\n</answer>", "\nHm.\n", "\n\nYes.\n"),
    ("hunyuan_a13b", False, "Yes.", "", "Yes."),
    ("hunyuan_a13b", True, "Hm.<tool_calls>x", "Hm.", "<tool_calls>x"),
    ("hy_v3", False, "Yes </think>.", "", "Yes </think>."),
    ("hy_v3", True, "Hm.</think>Yes.", "Hm.", "Yes."),
    ("olmo3", True, "<think>Hm.</think>Yes.", "Hm.", "Yes."),
    ("olmo3", True, "Hm.<function_calls>x", "Hm.", "<function_calls>x"),
    (
        "inkling",
        False,
        "<|content_thinking|>Hm.<|end_message|><|message_model|><|content_text|>Yes.<|end_message|>",
        "Hm.",
        "Yes.",
    ),
    (
        "inkling",
        False,
        "<|content_text|>A<|end_message|><|message_model|><|content_thinking|>Hm.<|end_mess",
        "Hm.<|end_mess",
        "A",
    ),
    ("k2_horizon", True, "<ifm|think>Hm.</ifm|think>Yes.", "Hm.", "Yes."),
    ("kimi_k3", True, f"Hm.{K3[0]}{K3[1]}Yes.{K3[2]}{K3[3]}", "Hm.", "Yes."),
    ("kimi_k3", True, f"Hm.{K3[1]}Yes.", "Hm.", "Yes."),
    ("kimi_k3", True, f"Hm.{K3[0]}{K3[1]}Yes.{K3[2]}<|open|>", "Hm.", f"Yes.{K3[2]}<|open|>"),
    ("kimi_k3", True, "Hm.<|open|>tools<|sep|>x", "Hm.", "<|open|>tools<|sep|>x"),
    ("minimax_m3", False, "<mm:think>Hm.</mm:think>Yes.", "Hm.", "Yes."),
    ("minimax_m3", False, "</mm:think>Yes.", "", "Yes."),
    ("minimax_m3", False, "Hm.</mm:think>Yes.", "", "Hm.</mm:think>Yes."),
    (
        "cohere_command3",
        False,
        "<|START_THINKING|>Hm.<|END_THINKING|>\n<|START_RESPONSE|>Yes.<|END_RESPONSE|>",
        "Hm.",
        "\nYes.",
    ),
    ("cohere_command3", True, "Hm.<|END_THINKING|><|START_TEXT|>Yes.<|END_TEXT|>\n", "Hm.", "Yes."),
    ("cohere_command3", True, "Hm.<|START_ACTION|>x", "Hm.", "<|START_ACTION|>x"),
)


def parts(found: Iterable[Event]) -> tuple[str, str, list[tuple[str, str]]]:
    """The thoughts, the text, and the calls of an answer's events."""
    thoughts, text, calls = "", "", list[tuple[str, str]]()
    for event in found:
        if isinstance(event, str):
            text += event
        elif isinstance(event, Reasoning):
            thoughts += event.text
        elif isinstance(event, CallStart):
            calls.append((event.name, ""))
        elif isinstance(event, Arguments):
            calls[event.number] = (calls[event.number][0], calls[event.number][1] + event.text)
    return thoughts, text, calls


def read(family: str, pieces: Iterable[str], *, thinking: bool, tools: bool = False) -> list[Event]:
    inner = FORMATS["hermes"].make(TOOLS) if tools else None
    parser = thinking_parser(FAMILIES[family], inner, thinking=thinking)
    return [*(event for piece in pieces for event in parser.feed(piece)), *parser.flush()]


@in_one_test(("family", "thinking", "answer", "thoughts", "text"), ANSWERS)
def test_thoughts_are_found_in_any_cutting(family: str, thinking: bool, answer: str, thoughts: str, text: str) -> None:
    wanted: tuple[str, str, list[tuple[str, str]]] = (thoughts, text, [])
    assert parts(read(family, [answer], thinking=thinking)) == wanted
    assert parts(read(family, answer, thinking=thinking)) == wanted
    for cut in range(len(answer)):
        assert parts(read(family, [answer[:cut], answer[cut:]], thinking=thinking)) == wanted


def test_every_family_is_an_option_and_has_an_answer_here() -> None:
    assert set(REASONING_PARSERS) == {"auto", "none", "hf", *FAMILIES, *ALIASES}
    assert set(FAMILIES) == {answer[0] for answer in ANSWERS}
    assert all(choose_family(alias, "") is FAMILIES[name] for alias, name in ALIASES.items())


def test_a_checkpoints_own_ending_of_the_marks_is_its_vocabularys() -> None:
    family = FAMILIES["hy_v3"]
    texts = [b"<think:x1>", b"</think:x1>", b"<tool_calls:x1>", b"<think>", b"a"]
    fitted = family.of(Vocabulary(texts, special=frozenset(range(4))), "{% set a = ':x2' %}")
    assert (fitted.begin, fitted.end, fitted.calls) == (("<think:x1>",), ("</think:x1>",), ("<tool_calls:x1>",))
    plain = Vocabulary([b"<think>"], special=frozenset({0}))
    assert family.of(plain, "{{ x }}") == family.of(None, "") == family
    for template in ("{%- set HYTK = ':x1' %}{{ '<think{}>'.format(HYTK) }}", "<think:x1>"):
        assert family.of(plain, template) == family.of(None, template) == fitted
    assert FAMILIES["qwen3"].of(None, "<think:x1>") is FAMILIES["qwen3"]
    marks = FORMATS["hy_v3"].special(Vocabulary(texts, special=frozenset(range(4))))
    assert marks == {"<tool_calls:x1>"}


def test_calls_follow_thoughts() -> None:
    answer = f"Hm.</think>So: {CALL}"
    for pieces in ([answer], answer, [answer[:9], answer[9:30], answer[30:]]):
        assert parts(read("qwen3", pieces, thinking=True, tools=True)) == ("Hm.", "So: ", [("f", '{"a": 1}')])
    for pieces in ([f"Hm.{CALL}"], f"Hm.{CALL}"):  # a call ends a thought
        assert parts(read("qwen3", pieces, thinking=True, tools=True)) == ("Hm.", "", [("f", '{"a": 1}')])


def test_a_mark_in_a_calls_arguments_begins_no_thought() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": "<think>b</think>"}}</tool_call>'
    assert parts(read("glm45", call, thinking=False, tools=True)) == ("", "", [("f", '{"a": "<think>b</think>"}')])


def test_without_tools_a_call_of_gpt_oss_is_text() -> None:
    for header in (
        " to=functions.f<|channel|>commentary json",
        "<|channel|>commentary to=functions.f <|constrain|>json",
    ):
        assert parts(read("openai_gptoss", f"{header}<|message|>{{}}<|call|>", thinking=True)) == ("", "{}", [])


@pytest.mark.parametrize("asked", [True, False])
def test_a_call_of_muse_glimmer_is_one_in_a_message_to_a_tool_alone(asked: bool) -> None:
    call = '<atem:function_calls><atem:invoke name="weather"></atem:invoke></atem:function_calls>'
    said = f" to=self<|message|>So {call}<|eom|><|start|>assistant to=user<|message|>I write {call}.<|eom|>"
    text = f"{said}<|start|>assistant to=weather<|message|>{call}<|eot|>"
    form = FORMATS["muse_glimmer"].make(tool_texts.TOOLS) if asked else None
    for pieces in ([text], text):
        parser = thinking_parser(FAMILIES["muse_glimmer"], form, thinking=True)
        found = [event for piece in pieces for event in parser.feed(piece)] + parser.flush()
        beside = f"I write {call}." if asked else f"I write {call}.{call}"
        assert parts(found) == (f"So {call}", beside, [("weather", "{}")] if asked else [])
        form = FORMATS["muse_glimmer"].make(tool_texts.TOOLS) if asked else None


COMPANIES = {
    "deepseek_r1": "deepseek_v3",
    "deepseek_v3": "deepseek_v31",
    "qwen3": "hermes",
    "glm45": "glm45",
    "glm47": "glm47",
    "minimax_m2": "minimax_m2",
    "kimi_k2": "kimi_k2",
    "mistral": "mistral",
    "gemma4": "gemma4",
    "openai_gptoss": "openai",
    "muse_glimmer": "muse_glimmer",
    "granite": "granite",
    "nemotron_v3": "qwen3_coder",
    "seed_oss": "seed_oss",
    "deepseek_v41": "deepseek_v41",
    "ernie45": "hermes",
    "hunyuan_a13b": "jamba",
    "hy_v3": "hy_v4",
    "olmo3": "olmo3",
    "k2_horizon": "k2_horizon",
    "inkling": "inkling",
    "minimax_m3": "minimax_m3",
    "cohere_command3": "cohere_command3",
    "kimi_k3": "kimi_k3",
}
"""The format of each family's calls."""


@in_one_test("family", COMPANIES)
def test_calls_of_every_format_are_found_after_a_thought(family: str) -> None:
    format, form = FORMATS[COMPANIES[family]], FAMILIES[family]
    of_messages = {
        "openai_gptoss": "<|channel|>analysis<|message|>Hm.<|end|>",
        "muse_glimmer": " to=self<|message|>Hm.<|eom|>",
    }
    thought = f"{form.begin[0]}Hm.{form.end[0]}" if form.begin else of_messages[family]
    for case in tool_texts.golden(COMPANIES[family]).values():
        text, wanted = case["text"], case["events"]
        if family == "openai_gptoss" and not text.startswith("<|"):
            continue  # such an answer has no thought
        for pieces in ([thought + text], thought + text):
            parser = thinking_parser(form, format.make(tool_texts.TOOLS), thinking=form.thinks)
            found = [event for piece in pieces for event in parser.feed(piece)] + parser.flush()
            assert parts(found)[0] == "Hm."
            beside = [event for event in found if not isinstance(event, Reasoning)]
            assert parts(beside)[1:] == parts_of(wanted)


def parts_of(read: tool_texts.Read) -> tuple[str, list[tuple[str, str]]]:
    text = "".join(item for item in read if isinstance(item, str))
    return text, [(item[0], item[1]) for item in read if not isinstance(item, str)]


MARKS = [*sorted({mark for family in FAMILIES.values() for mark in family.marks}), CALL, "Hm.", " ", "<", "\n"]


@settings(deadline=None)
@given(st.sampled_from(sorted(FAMILIES)), st.lists(st.sampled_from(MARKS) | st.text(max_size=4), max_size=8), st.data())
def test_any_cutting_of_anything_gives_the_same_parts_in_reasoning(
    family: str, words: list[str], data: st.DataObject
) -> None:
    answer = "".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=5)))
    pieces = [answer[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
    thinking, tools = data.draw(st.booleans()), data.draw(st.booleans())
    whole = parts(read(family, [answer], thinking=thinking, tools=tools))
    assert parts(read(family, pieces, thinking=thinking, tools=tools)) == whole
    if not tools and not family.startswith(("openai", "minimax_m2_a")):
        marks = "|".join(re.escape(mark) for mark in sorted(FAMILIES[family].marks, key=len, reverse=True))
        kept = re.sub(rf"\s|{marks}", "", answer)
        assert len(re.sub(rf"\s|{marks}", "", whole[0] + whole[1])) >= len(re.sub(marks, "", kept))


# -- the prompt -------------------------------------------------------------------------------------------------------


@in_one_test(
    ("name", "prompt", "arguments", "answer", "thoughts"),
    [
        ("qwen3", "<|im_start|>assistant\n", {}, "Hm.</think>Yes.", "Hm."),
        ("qwen3", "<|im_start|>assistant\n<think>\n", {}, "Hm.</think>Yes.", "Hm."),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", {}, "Yes.", ""),
        ("qwen3", "<|im_start|>assistant\n", {"enable_thinking": False}, "Yes.", ""),
        ("deepseek_v3", "<｜Assistant｜>", {}, "Yes.", ""),
        ("deepseek_v3", "<｜Assistant｜><think>", {"thinking": True}, "Hm.</think>Yes.", "Hm."),
        ("gemma4", "<|turn>model\n<|channel>thought\n", {}, "Hm.<channel|>Yes.", "Hm."),
        ("openai_gptoss", "<|start|>assistant", {}, HARMONY, "Hm."),
        ("muse_glimmer", "<|start|>assistant", {}, MUSE, "Hm, <atem:function_calls>."),
    ],
)
def test_the_prompts_end_says_whether_a_thought_is_open(
    name: str, prompt: str, arguments: dict[str, Any], answer: str, thoughts: str
) -> None:
    thinking = ReasoningForm(FAMILIES[name], arguments)
    thinking.read_prompt(Request(""), prompt)
    parser = thinking.parser()
    assert parts([*parser.feed(answer), *parser.flush()])[0] == thoughts


@pytest.mark.parametrize(
    ("prefix", "thoughts"), [("<think>Well", " so"), ("<think>Well</think>Then", ""), ("Then", "")]
)
def test_an_answer_that_continues_a_message_continues_its_thought(prefix: str, thoughts: str) -> None:
    thinking = ReasoningForm(FAMILIES["qwen3"], {}, prefix)
    thinking.read_prompt(Request(""), f"assistant\n{prefix}")
    assert parts(thinking.parser().feed(" so</think>"))[0] == thoughts


BYTES = Vocabulary([bytes([byte]) for byte in range(128)])
GUIDED = Sampling(structured_output=StructuredOutput("regex", "a"))


def test_structured_output_begins_after_a_thought_or_at_once() -> None:
    for family, prompt, is_open in (("qwen3", "a\n", True), ("mistral", "a\n", False), ("openai_gptoss", "a", True)):
        thinking = ReasoningForm(FAMILIES[family], {}, vocabulary=BYTES)
        thoughts = thinking.read_prompt(Request("", GUIDED), prompt).sampling.thoughts
        assert thoughts is not None
        assert (thoughts.is_open, thoughts.calls) == (is_open, FAMILIES[family].calls)
        assert bytes(thoughts.closing).decode() == FAMILIES[family].closing
    for arguments, prompt in (({"enable_thinking": False}, "assistant\n"), ({}, "<think>\n</think>\n\n")):
        thinking = ReasoningForm(FAMILIES["qwen3"], arguments, lacks="it cannot")
        budgeted = GUIDED._replace(thinking_token_budget=2)
        assert thinking.read_prompt(Request("", budgeted), prompt).sampling == GUIDED
        assert parts(thinking.parser().feed("a")) == ("", "a", [])


@in_one_test(
    ("family", "lacks", "sampling", "message"),
    [
        ("qwen3", "it cannot", GUIDED, "grammar: the model reasons before it answers, and it cannot; send chat_temp"),
        ("qwen3", "", GUIDED._replace(presence_penalty=0.5), "presence_penalty=0.5: with parameters.grammar, reason"),
        ("qwen3", "", Sampling(thinking_token_budget=2, frequency_penalty=1.0), "with thinking_token_budget, reason"),
        ("minimax_m2_append_think", "", GUIDED, "no end marker with option.reasoning_parser=minimax"),
        (
            "openai_gptoss",
            "",
            Sampling(thinking_token_budget=2),
            "thinking_token_budget: reasoning has no end marker with",
        ),
    ],
)
def test_what_cannot_follow_a_thought_is_refused(family: str, lacks: str, sampling: Sampling, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        ReasoningForm(FAMILIES[family], {}, None, BYTES, lacks).read_prompt(Request("", sampling), "assistant\n")


# -- stop strings -----------------------------------------------------------------------------------------------------


@in_one_test(
    ("open_", "answer", "shown"),
    [
        (True, "a STOP b</think>c STOP d", "a STOP b</think>c "),
        (True, "a STOP b", "a STOP b"),
        (False, " <think>a STOP</think>b STOP", " <think>a STOP</think>b "),
        (False, "a STOP b</think>", "a "),
        (False, "<thi", "<thi"),
    ],
)
def test_stop_strings_do_not_end_a_thought(open_: bool, answer: str, shown: str) -> None:
    vocabulary = Vocabulary([bytes([byte]) for byte in range(128)])
    prompt = "<think>" if open_ else "</think>"
    request = ReasoningForm(FAMILIES["qwen3"], {}).read_prompt(Request("", Sampling(stop=("STOP",))), prompt)
    state, text = SequenceState(Prompt("", [], vocabulary), request.sampling), ""
    for id in answer.encode():
        text += state.push(id, None).text
        if state.stopped:
            break
    else:
        tokens, _ = state.feed([], [], Finish.LENGTH)
        text += "".join(token.text for token in tokens)
    assert text == shown


# -- answers ----------------------------------------------------------------------------------------------------------

QWEN = with_options(replace(NAMED, chat_template="{{ tools }} <tool_call> enable_thinking"), reasoning_parser="qwen3")
ANSWER = f"<think>Hm. So\n</think>\n\nWait. {CALL}"


def test_a_stream_and_a_whole_answer_say_the_same() -> None:
    (whole,) = json.loads(chat({"tools": TOOLS}, saying(ANSWER), QWEN).body)["choices"]
    message = whole["message"]
    assert message["reasoning"] == message["reasoning_content"] == "Hm. So\n"
    assert (message["content"], whole["finish_reason"]) == ("\n\nWait. ", "tool_calls")
    deltas = [one["delta"] for one in choices(events(chat({"tools": TOOLS, "stream": True}, saying(ANSWER), QWEN)))]
    for name in ("reasoning", "reasoning_content", "content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == message[name]


def test_thoughts_are_counted_and_may_be_left_out() -> None:
    body = {"stream": True, "stream_options": {"include_usage": True}, "include_reasoning": False, "logprobs": True}
    words = ("<think>", "Hm.", " So", "</think>", "Yes.")
    script = [Delta(1, 0, (Token(id, text, -0.5, False),)) for id, text in enumerate(words)]
    script[-1] = script[-1]._replace(finish=Finish.EOS)
    *chunks, last = events(chat(body, script, QWEN))
    assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    shown = choices(chunks)
    assert all("reasoning" not in one["delta"] for one in shown)
    assert "Hm." not in json.dumps(shown)
    whole = json.loads(chat({"include_reasoning": False, "logprobs": True}, script, QWEN).body)
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    assert "Hm." not in json.dumps(whole)


def test_a_thought_without_an_end_leaves_no_content() -> None:
    (choice,) = json.loads(chat({}, saying("Hm. So", finish=Finish.LENGTH), QWEN).body)["choices"]
    assert choice["message"]["content"] is None
    assert (choice["message"]["reasoning"], choice["finish_reason"]) == ("Hm. So", "length")


@in_one_test(
    ("template", "family"),
    [
        ("{{ messages }}", None),
        ("<|channel|>analysis<|message|>", "openai_gptoss"),
        ("'<|start|>assistant to=self<|message|>' <atem:function_calls>", "muse_glimmer"),
        ("<think></think>", "qwen3"),
        ("<think></think> <arg_key>", "glm45"),
        ("<｜Assistant｜><think></think>", "deepseek_r1"),
        ("'<|open|>' + tag", "kimi_k3"),
        ("<mm:think> ]<]minimax[>[", "minimax_m3"),
        ("<|START_THINKING|>", "cohere_command3"),
        ("'<think{}>'.format(x)", "hy_v3"),
        ("</think> <function_calls>", "olmo3"),
        ("</think> <answer>", "hunyuan_a13b"),
        ("</think> <response>", "ernie45"),
    ],
)
def test_auto_goes_by_the_template(template: str, family: str | None) -> None:
    found = choose_family("auto", template)
    assert (found and found.name) == family
    assert choose_family("", template) is None


BY_DEFAULT = replace(NAMED, chat_template="{{ tools }} <tool_call> <think></think>")


MESSAGES = {"messages": [USER]}
CHATS: Mapping[str, tuple[Dialect, dict[str, Any]]] = {
    "OpenAI's": (ROUTES["/v1/chat/completions"], MESSAGES),
    "Messages": (ROUTES["/v1/messages"], {**MESSAGES, "max_tokens": 9}),
    "Responses": (ROUTES["/v1/responses"], {"input": "hi"}),
    "LMI's": (INVOCATIONS["lmi"], MESSAGES),
    "LMI's of async mode": (AsyncChat(), MESSAGES),
}
PROMPTS: Mapping[str, tuple[Dialect, dict[str, Any]]] = {
    "LMI": (INVOCATIONS["lmi"], {"inputs": "hi"}),
    "LMI's async mode": (AsyncPrompt(), {"inputs": "hi"}),
    "completions": (ROUTES["/v1/completions"], {"prompt": "hi"}),
    "TGI": (ROUTES["/generate"], {"inputs": "hi"}),
}


@in_one_test("name", [None, "auto", "none"])
@in_one_test("api", [*CHATS, *PROMPTS])
def test_by_default_reasoning_is_apart_where_the_template_shows_it(api: str, name: str | None) -> None:
    context = with_options(BY_DEFAULT, reasoning_parser=name)
    dialect, body = {**CHATS, **PROMPTS}[api]
    shown = dialect_answer(dialect, body, saying("<think>Hm.</think>Yes."), context).body.decode()
    assert ("<think>Hm.</think>Yes." in shown) is (name == "none" or api in PROMPTS)
    assert ("Hm." in shown, "Yes." in shown) == (True, True)


def test_a_model_whose_template_shows_no_reasoning_is_read_as_ever() -> None:
    (choice,) = json.loads(chat({}, saying("<think>Hm.</think>Yes."), NAMED).body)["choices"]
    assert choice["message"]["content"] == "<think>Hm.</think>Yes."
    assert "reasoning" not in choice["message"]


def test_by_default_a_rule_that_cannot_follow_reasoning_starts_at_once() -> None:
    for sampling, lacks in ((GUIDED, "it cannot"), (GUIDED._replace(presence_penalty=0.5), "")):
        thinking = ReasoningForm(FAMILIES["qwen3"], {}, None, BYTES, lacks, explicit=False)
        assert thinking.read_prompt(Request("", sampling), "<think>\n").sampling == sampling
        assert parts(thinking.parser().feed("a")) == ("", "a", [])
    budgeted = GUIDED._replace(thinking_token_budget=2)
    with pytest.raises(InvalidParameter, match="it cannot"):
        ReasoningForm(FAMILIES["qwen3"], {}, None, BYTES, "it cannot", explicit=False).read_prompt(
            Request("", budgeted), ""
        )


def test_the_start_says_which_parsers_read_the_answers() -> None:
    assert describe_parsers(BY_DEFAULT) == (
        "reasoning: qwen3, according to the chat template (option.reasoning_parser=none leaves it in the text); "
        "tool calls: hermes, according to the chat template"
    )
    assert describe_parsers(NAMED) == (
        "reasoning: none, according to the chat template; tool calls: smollm2, as no chat template shows tools"
    )
    named = with_options(BY_DEFAULT, reasoning_parser="none", tool_call_parser="mistral")
    assert (
        describe_parsers(named) == "reasoning: according to option.reasoning_parser=none; "
        "tool calls: according to option.tool_call_parser=mistral"
    )


def test_without_a_parser_calls_stay_in_the_text() -> None:
    context = with_options(BY_DEFAULT, tool_call_parser="none")
    (choice,) = json.loads(chat({"tools": TOOLS}, saying(f"Well. {CALL}"), context).body)["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (f"Well. {CALL}", "stop")
    (request,) = CHAT.parse({"messages": [USER], "tools": TOOLS}, context).requests
    assert request.tools, "the prompt shows them all the same"


# -- the template's arguments -----------------------------------------------------------------------------------------

SHOWN = with_options(
    replace(QWEN, chat_template="a enable_thinking reasoning_effort reasoning_content"),
    default_chat_template_kwargs={"a": 1, "b": 1},
)
THOUGHT = {"role": "assistant", "content": None, "reasoning_content": "Hm."}
OFF = {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": 0}}


@in_one_test(
    ("context", "body", "wanted", "unknown"),
    [
        (SHOWN, {}, {"a": 1}, []),
        (SHOWN, {"chat_template_kwargs": {"a": 2, "c": 2}}, {"a": 2}, ["c"]),
        (SHOWN, {"reasoning_effort": "none"}, {"a": 1, "reasoning_effort": "none", "enable_thinking": False}, []),
        (SHOWN, OFF, {"a": 1, "reasoning_effort": "low", "enable_thinking": 0}, []),
        (QWEN, {"reasoning_effort": "low"}, {"enable_thinking": True}, []),
        (NAMED, {"reasoning_effort": "low"}, {}, ["reasoning_effort"]),
        (NAMED, {"documents": [{}]}, {}, ["documents"]),
        (NAMED, {"messages": [USER, THOUGHT]}, {}, ["messages[].reasoning"]),
        (SHOWN, {"messages": [USER, THOUGHT]}, {"a": 1}, []),
    ],
)
def test_what_the_template_does_not_read_is_reported(
    context: ServerContext, body: dict[str, Any], wanted: dict[str, Any], unknown: list[str]
) -> None:
    call = CHAT.parse({"messages": [USER], **body}, context)
    arguments = dict(call.requests[0].template.arguments)
    assert arguments == wanted
    assert [name.removeprefix("chat_template_kwargs.") for name in call.ignored] == unknown
    if unknown:
        with pytest.raises(InvalidPayload, match="unknown names: "):
            CHAT.parse({"messages": [USER], **body}, with_options(context, unknown_parameters="refuse"))


@pytest.mark.parametrize(
    ("words", "finish", "number"),
    [
        (("<think>", "Hm.", " So", "</", "think", ">", "Yes."), Finish.EOS, 2),
        (("<think>", "Hm.", " <", "b", ">", "</think>", "Yes."), Finish.EOS, 4),
        (("<think>", "Hm.", "</", "think"), Finish.LENGTH, 3),  # the response ends before the marker does
        (("<think>", "Hm. </", "think", ">", "Yes."), Finish.EOS, 1),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_tokens_of_a_marker_are_not_reasoning(
    words: Sequence[str], finish: Finish, number: int, *, stream: bool
) -> None:
    script = [Delta(1, 0, (Token(id, text, -0.5, False),)) for id, text in enumerate(words)]
    script[-1] = script[-1]._replace(finish=finish)
    if stream:
        usage = events(chat({"stream": True, "stream_options": {"include_usage": True}}, script, QWEN))[-1]["usage"]
    else:
        usage = json.loads(chat({}, script, QWEN).body)["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": number}


@pytest.mark.parametrize("names", [("reasoning", "reasoning_content"), ("reasoning_content", "reasoning")])
def test_empty_reasoning_beside_reasoning_is_as_absent(names: tuple[str, str]) -> None:
    empty, full = names
    turn = {"role": "assistant", "content": "Yes.", empty: "", full: "Hm."}
    parsed = CHAT.parse({"messages": [USER, turn, USER]}, QWEN)
    assert parsed.requests[0].messages[1]["reasoning_content"] == "Hm."


def test_thoughts_in_messages_reach_the_template() -> None:
    (request,) = CHAT.parse({"messages": [USER, {**THOUGHT, "content": "Yes."}]}, SHOWN).requests
    names = ("reasoning", "reasoning_content", "thinking")
    assert request.messages[1] == {"role": "assistant", "content": "Yes.", **dict.fromkeys(names, "Hm.")}


def test_default_arguments_of_the_renderer_are_refused_at_the_start() -> None:
    check_defaults(Config(default_chat_template_kwargs={"enable_thinking": False}))
    with pytest.raises(ConfigError, match=r"^default: .*kwargs: must not set 'tools'"):
        check_defaults(Config(default_chat_template_kwargs={"tools": []}))


# -- white space at the ends of text and reasoning, however the answer is cut ------------------------------------------


THINKING = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes"}


def reader(**options: Any) -> ResponseReader:
    found = response_form(Tools(), with_options(CAPABLE, trim_answers=True, **options)).reader()
    assert found is not None
    return found


def trimmed_read(pieces: list[str], **options: Any) -> tuple[str, str]:
    """Return the text and the reasoning of an answer that comes in pieces."""
    answer = reader(**options)
    events: list[Event] = [event for piece in pieces for event in answer.feed(Token(1, piece, 0.0, False))]
    events += answer.flush(Finish.EOS)
    assert all(event != "" for event in events)
    return (
        "".join(event for event in events if isinstance(event, str)),
        "".join(event.text for event in events if isinstance(event, Reasoning)),
    )


@pytest.mark.parametrize(
    ("answer", "text", "reasoning"),
    [
        ("<think>\n Well \n now.\n</think>\n\nIt is  \n so.\n", "It is  \n so.", "Well \n now."),
        ("<think> \n</think>\n\n", "", ""),
        ("<think>a</think>b", "b", "a"),
    ],
)
def test_the_ends_of_text_and_reasoning_have_none(answer: str, text: str, reasoning: str) -> None:
    for cut in range(len(answer)):
        assert trimmed_read([answer[:cut], answer[cut:]], **THINKING) == (text, reasoning)
    assert trimmed_read(list(answer), **THINKING) == (text, reasoning)


@given(st.lists(st.text(alphabet="a \n\t", max_size=4)))
def test_plain_text_is_trimmed_as_a_whole(pieces: list[str]) -> None:
    assert trimmed_read(pieces) == ("".join(pieces).strip(), "")


def test_without_the_option_plain_text_has_no_reader() -> None:
    assert ResponseForm().reader() is None
    assert response_form(Tools(), CAPABLE) == ResponseForm()
