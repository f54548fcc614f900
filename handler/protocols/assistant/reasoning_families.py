"""Model families that reason before they respond, named as in vLLM, with the markers around their reasoning.

Sources: the models' own chat templates, and vLLM 0.33, vllm/reasoning and vllm/parser.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from handler.core.text import Vocabulary


class Family(NamedTuple):
    """The reasoning format of a model family.

    Attributes:
        begin: the markers before reasoning. Each marker precedes any other marker that is a prefix of it.
        end: the markers after reasoning.
        calls: the markers before tool calls, which also end reasoning.
        calls_end: the marker after tool calls, after which reasoning may begin again. Without it, everything after the
            first tool call is passed to the tool call parser.
        thinks: whether a response begins within reasoning. Otherwise a marker in the response begins the reasoning.
        switch: the value of `enable_thinking` if the request does not set it.
        reopens: whether reasoning may begin again after it has ended.
        strips: whether whitespace at the end of reasoning is dropped.
        others: other markers. They are dropped unless a tool call parser reads the text.
        opening: markers that may precede the text outside of reasoning, and are dropped.
        closing_text: markers that may end the response, and are dropped.
        own_ending: whether each checkpoint may add its own suffix to the markers, such as `<think:opensource>`.
    """

    name: str
    begin: tuple[str, ...] = ("<think>",)
    end: tuple[str, ...] = ("</think>",)
    calls: tuple[str, ...] = ()
    calls_end: str = ""
    thinks: bool = True
    switch: bool = True
    reopens: bool = False
    strips: bool = False
    others: tuple[str, ...] = ()
    opening: tuple[str, ...] = ()
    closing_text: tuple[str, ...] = ()
    own_ending: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        return (*self.begin, *self.end, *self.calls, *self.others, *self.opening, *self.closing_text)

    def of(self, vocabulary: Vocabulary | None, template: str) -> Family:
        """Return the family with the markers of a checkpoint, read from its vocabulary or else its chat template."""
        if not self.own_ending:
            return self
        texts = [] if vocabulary is None else vocabulary.marks
        ending = next((match[1] for mark in texts if (match := _SUFFIXED_THINK.fullmatch(mark))), _ending(template))
        begin, end, calls = (
            tuple(mark.replace(">", f"{ending}>") for mark in marks) for marks in (self.begin, self.end, self.calls)
        )
        return self._replace(begin=begin, end=end, calls=calls)

    @property
    def closing(self) -> str:
        """The marker that always ends reasoning, or "" if there is none."""
        return self.end[0] if self.end and self.name not in MESSAGES else ""

    def is_on(self, kwargs: Mapping[str, Any]) -> bool:
        """Return whether reasoning remains enabled with the template arguments of a request."""
        switches = [bool(kwargs[name]) for name in ("thinking", "enable_thinking") if kwargs.get(name) is not None]
        return any(switches) if switches else self.switch

    def ends_open(self, prompt: str) -> bool | None:
        """Return True if a prompt ends with a begin marker, False if it ends with an end marker, and None otherwise."""
        end = prompt[-_TAIL:].rstrip()
        if end.endswith(self.end):
            return False
        return True if end.endswith(tuple(mark.rstrip() for mark in self.begin)) else None

    def is_open(self, text: str) -> bool:
        """Return whether an incomplete response ends within reasoning."""
        begun = max((text.rfind(mark) for mark in self.begin), default=-1)
        return begun > max((text.rfind(mark) for mark in self.end), default=-1)


_SUFFIXED_THINK = re.compile(r"<think(:[^\s>]{1,32})>")
_SET_ENDING = re.compile(r"""<think(:[^\s>'"]{1,32})>|\bset \w+ = ['"](:[^\s>'"]{1,32})['"]""")


@functools.lru_cache
def _ending(template: str) -> str:
    match = _SET_ENDING.search(template)
    return (match[1] or match[2]) if match else ""


_TAIL = 256  # characters at a prompt's end that are searched for its last marker

HARMONY, MUSE = "openai_gptoss", "muse_glimmer"
MESSAGES = (HARMONY, MUSE)
"""Families whose responses consist of messages with headers."""

APPEND = "minimax_m2_append_think"

_CALL = ("<tool_call>",)

_QWEN3 = Family("qwen3", calls=_CALL)
_GLM = Family("glm45", calls=_CALL, calls_end="</tool_call>", reopens=True, strips=True)

FAMILIES = {
    family.name: family
    for family in (
        Family("deepseek_r1"),
        Family("deepseek_v3", switch=False),
        Family(
            "deepseek_v4",
            calls=("<｜DSML｜tool_calls>", "<｜DSML｜function_calls>", "<｜DSML｜toolcalls>", "<｜DSML｜tool>"),
            strips=True,
        ),
        _QWEN3,
        _GLM,
        _GLM._replace(name="glm47"),
        Family("minimax_m2", calls=("<minimax:tool_call>",), strips=True),
        Family(APPEND, begin=(), end=()),
        Family("kimi_k2", calls=("<|tool_calls_section_begin|>",), strips=True),
        Family("mistral", ("[THINK]",), ("[/THINK]",), ("[TOOL_CALLS]",), thinks=False, reopens=True, strips=True),
        Family(
            "gemma4",
            ("<|channel>thought\n", "<|channel>thought", "<|channel>"),
            ("<channel|>",),
            ("<|tool_call>",),
            thinks=False,
            switch=False,
            reopens=True,
            strips=True,
        ),
        Family(
            HARMONY,
            (),
            ("<|channel|>final<|message|>",),
            others=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
        ),
        Family(MUSE, (), (" to=user<|message|>",), others=("<|start|>", "<|message|>", "<|eom|>", "<|eot|>")),
        Family(
            "granite",
            ("Here is my thought process:", "Here's my thought process:"),
            ("Here is my response:", "Here's my response:"),
            thinks=False,
            switch=False,
        ),
        _QWEN3._replace(name="nemotron_v3", strips=True),
        Family("deepseek_v41", calls=("<｜DSML｜ calls>",), strips=True),
        Family("ernie45", calls=_CALL, opening=("<response>",), closing_text=("</response>",)),
        Family(
            "hunyuan_a13b", calls=("<tool_calls>",), thinks=False, opening=("<answer>",), closing_text=("</answer>",)
        ),
        Family("hy_v3", calls=("<tool_calls>",), thinks=False, own_ending=True),
        Family("olmo3", calls=("<function_calls>",)),
        Family(
            "inkling",
            ("<|content_thinking|>",),
            ("<|end_message|>", "<|content_model_end_sampling|>"),
            ("<|content_invoke_tool_json|>",),
            "<|end_message|>",
            thinks=False,
            reopens=True,
            others=(
                *("<|message_model|>", "<|content_text|>", "<|content_invoke_tool_text|>", "<|content_tool_error|>"),
                *("<|end_message|>", "<|content_model_end_sampling|>"),
            ),
        ),
        Family("k2_horizon", ("<ifm|think>",), ("</ifm|think>",), ("<ifm|tool_calls>",)),
        Family(
            "kimi_k3",
            ("<|open|>think<|sep|>",),
            ("<|close|>think<|sep|>", "<|open|>response<|sep|>"),
            ("<|open|>tools<|sep|>",),
            others=("<|open|>", "<|close|>", "<|sep|>"),
            opening=("<|open|>response<|sep|>",),
            closing_text=("<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        ),
        Family(
            "minimax_m3",
            ("<mm:think>",),
            ("</mm:think>",),
            ("]<]minimax[>[<tool_call>",),
            thinks=False,
            opening=("</mm:think>",),  # at the beginning of a response without reasoning
        ),
        Family(
            "cohere_command3",
            ("<|START_THINKING|>",),
            ("<|END_THINKING|>",),
            ("<|START_ACTION|>",),
            thinks=False,
            opening=("<|START_RESPONSE|>", "<|START_TEXT|>"),
            closing_text=("<|END_RESPONSE|>", "<|END_TEXT|>"),
        ),
        Family("seed_oss", ("<seed:think>",), ("</seed:think>",), ("<seed:tool_call>",)),
    )
}

ALIASES = {
    "cohere_command4": "cohere_command3",
    "granite_thinking_parser": "qwen3",
    "holo2": "deepseek_r1",
    "hy_v4": "hy_v3",
    "ling3": "glm45",
    "mimo": "qwen3",
    "poolside_v1": "glm45",
    "step3": "deepseek_r1",
    "step3p5": "qwen3",
    "step5": "deepseek_r1",
}
"""Other names that vLLM uses for some of these families."""

_BY_MARK = {
    "<|open|>": "kimi_k3",
    "<mm:think>": "minimax_m3",
    "<|START_THINKING|>": "cohere_command3",
    "<ifm|think>": "k2_horizon",
    "<|content_thinking|>": "inkling",
    "<think{}>": "hy_v3",
    "<|channel|>analysis": HARMONY,
    "to=self<|message|>": MUSE,
    "<|channel>": "gemma4",
    "<seed:think>": "seed_oss",
    "[THINK]": "mistral",
    "my thought process": "granite",
}
_BY_COMPANY = {
    "<minimax:tool_call>": "minimax_m2",
    "<|tool_calls_section_begin|>": "kimi_k2",
    "<arg_key>": "glm45",
    "truncate_history_thinking": "nemotron_v3",
    "<function_calls>": "olmo3",
    "<answer>": "hunyuan_a13b",
    "<response>": "ernie45",
    "｜DSML｜": "deepseek_v4",
    "<｜Assistant｜>": "deepseek_r1",
    "": "qwen3",
}
"""Maps a string to the family whose chat templates contain both this string and </think>."""


@functools.lru_cache
def choose_family(name: str, template: str) -> Family | None:
    """Return the family of a model, or None if the reasoning in its responses is not parsed.

    Args:
        name: the value of `option.reasoning_parser`. "auto" means the first family whose markers are in the chat
            template. Reasoning then begins only at a marker in the prompt or in the response.
    """
    if name != "auto":
        return FAMILIES.get(ALIASES.get(name, name))
    families = {**_BY_MARK, **(_BY_COMPANY if "</think>" in template else {})}
    chosen = next((FAMILIES[family] for mark, family in families.items() if mark in template), None)
    return chosen if chosen is None or chosen.name in MESSAGES else chosen._replace(thinks=False)
